#!/usr/bin/env python3
"""Are layouts whose times somebody measured ranked as they were measured?

    python scripts/check_tune_published.py --megatron PATH/Megatron-LM [--only korthikanti,h200] [--out DIR]

Every pair of layouts of one model on the same GPUs, with the same global batch and precision, in
``tests/data/published_h100_a100.json`` (each case names its source) and in the jobs that were run on two H200s
(``tests/data/megatron_h200x2*.json``, ``deepspeed_h200.json``), whose measured times are more than 5 % apart. Each is composed as `prism tune`
does, with the arguments of ``bench_published.py``: on Apex's kernels where the job had them, with Transformer Engine where it
had that. Where several releases ran one layout, the mean of their times counts.

One line per pair; exits 1 when one is ranked the other way round. With --out, searches that are done are not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from bench_published import CLUSTERS, DATA, list_of, megatron_args, why_not

from prism_plugins.errors import PrismError, SliceFailed
from prism_plugins.integration.knobs import pairs, without
from prism_plugins.integrations.deepspeed.tune import DeepSpeedTuner
from prism_plugins.integrations.megatron.tune import MegatronTuner
from prism_plugins.integrations.megatron.tune_knobs import LAYOUT_SWITCHES, LAYOUT_VALUES
from prism_plugins.options import parse_command
from prism_plugins.tune.progress import TuneProgress
from prism_plugins.tune.search import Search
from prism_plugins.tune.settings import Settings

_APART = 0.05
_SAME = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups", "--seq-length",
    "--vocab-size", "--num-experts", "--moe-router-topk", "--global-batch-size", "--fp8-format",
)  # fmt: skip
"""What makes two runs the same job; releases differ in other things."""
_H200 = ("megatron_h200x2_dp_pp.json", "megatron_h200x2.json")
_OF_MEASURING = ("--train-iters", "--num-workers")
_TUNERS = {"megatron": MegatronTuner(), "deepspeed": DeepSpeedTuner()}

Knobs = tuple[tuple[str, str], ...]


class Run(NamedTuple):
    """One layout that was run."""

    name: str
    seconds: float
    world: int
    cluster: str
    implementation: str
    """``apex``, ``te`` or ``torch``: whose kernels it ran."""
    args: tuple[str, ...]
    rest: tuple[str, ...]
    """The arguments without those of the layout."""
    knobs: Knobs
    config: str = ""
    """Of a DeepSpeed job: its configuration file."""

    @property
    def launch(self) -> tuple:
        """Runs with the same one are composed by the same search."""
        return (
            self.world,
            self.cluster,
            self.implementation,
            self.rest,
            dict(self.knobs).get("stages"),
            self.config,
        )

    @property
    def job(self) -> tuple:
        """Runs with the same one are compared."""
        same = pairs(self.args, _SAME, ("--bf16", "--fp16"))
        return (self.world, self.cluster, self.implementation, *sorted(same.items()))


def published() -> Iterator[Run]:
    """The published cases that can be run as they were."""
    for case in json.loads(DATA.read_text()):
        if why_not(case):
            continue
        kernels = "apex" if list_of(case) == "local" else "te"
        args = megatron_args(case, "local" if kernels == "apex" else "transformer_engine")
        yield run_of(
            case["id"],
            case["measured"]["step_time_s"],
            case["num_gpus"],
            CLUSTERS[case["gpu"]],
            kernels,
            args,
        )


def measured_on_h200() -> Iterator[Run]:
    """The jobs run on one and two H200s."""
    for name in _H200:
        data = json.loads((DATA.parent / name).read_text())
        for job in data["jobs"]:
            args = [*without(data["base_args"].split(), _OF_MEASURING, ()), *job["args"].split()]
            args += ["--train-iters", "12", "--num-workers", "1"]
            seconds = job["median_ms"] / 1e3
            yield run_of(f"h200x2/{job['name']}", seconds, job["num_gpus"], "dgx-h200", "torch", args)


def measured_deepspeed() -> Iterator[Run]:
    """The DeepSpeed jobs run on one H200, those that its configuration file tells apart."""
    data = json.loads((DATA.parent / "deepspeed_h200.json").read_text())
    for job in data["jobs"]:
        config = job["config"]
        if job["args"] or "fp16" in config:
            continue
        zero = config["zero_optimization"]
        knobs = {
            "zero": str(zero["stage"]),
            "tp": "1",
            "pp": "1",
            "micro_batch": str(config["train_micro_batch_size_per_gpu"]),
            "offload": "none",
            "bucket": "500000000",
            "overlap": str(zero.get("overlap_comm", zero["stage"] == 3)).lower(),
        }
        yield Run(
            name=f"h200/deepspeed-{job['name']}",
            seconds=job["median_ms"] / 1e3,
            world=1,
            cluster="dgx-h200",
            implementation="deepspeed",
            args=(),
            rest=(),
            knobs=tuple(knobs.items()),
            config=json.dumps(config),
        )


def run_of(name: str, seconds: float, world: int, cluster: str, implementation: str, args: list[str]) -> Run:
    """A run with its arguments taken apart."""
    given = pairs(args, LAYOUT_VALUES, LAYOUT_SWITCHES)
    experts = pairs(args, ("--num-experts", "--num-layers"), ())
    pp = int(given.get("--pipeline-model-parallel-size", 1))
    chunk = int(given.get("--num-layers-per-virtual-pipeline-stage", 0))
    first = given.get("--decoder-first-pipeline-num-layers")
    tp = given.get("--tensor-model-parallel-size", "1")
    optimizer = "distributed" if "--use-distributed-optimizer" in given else "plain"
    knobs = {
        "tp": tp,
        "cp": given.get("--context-parallel-size", "1"),
        "ep": given.get("--expert-model-parallel-size", "1"),
        "etp": given.get("--expert-tensor-parallel-size", tp) if "--num-experts" in experts else "1",
        "pp": str(pp),
        "vpp": str(int(experts["--num-layers"]) // pp // chunk) if chunk else "1",
        "stages": f"first {first}" if first else "even",
        "micro_batch": given["--micro-batch-size"],
        "sp": str("--sequence-parallel" in given).lower(),
        "recompute": given.get("--recompute-granularity", "none"),
        "optimizer": optimizer + ("+overlap" if "--overlap-grad-reduce" in given else ""),
        "order": "dp-pp",
    }
    rest = without(args, LAYOUT_VALUES, LAYOUT_SWITCHES)
    return Run(
        name, seconds, world, cluster, implementation, tuple(args), tuple(sorted(rest)), tuple(knobs.items())
    )


def compose(runs: list[Run], megatron: Path, out: Path, jobs: int) -> dict[str, float]:
    """Seconds an iteration of the layouts of runs with the same launch, by one search; by name."""
    first = runs[0]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(megatron), os.environ.get("PYTHONPATH"))))
    if first.implementation != "te":
        os.environ["PRISM_TE"] = "none"
    flags = [f"--prism-world-size={first.world}", f"--prism-cluster={first.cluster}", f"--prism-jobs={jobs}"]
    if first.implementation == "apex":
        flags.append("--prism-apex")
    command = [str(megatron / "pretrain_gpt.py"), *first.args]
    if first.config:
        out.parent.mkdir(parents=True, exist_ok=True)
        path = out.with_name(f"{out.name}.config.json")
        path.write_text(first.config)
        command = [str(Path(__file__).with_name("train_llama_deepspeed.py")), "--deepspeed_config", str(path)]
    job = parse_command(["--prism-emulate", *flags, *command])
    assert job is not None
    chosen = {name: tuple(dict.fromkeys(dict(run.knobs)[name] for run in runs)) for name, _ in first.knobs}
    settings = Settings(chosen=chosen, emulations=0, everything=True, out=str(out))
    with TuneProgress(quiet=True) as progress:
        search = Search(job, _TUNERS, settings, progress=progress)
        search.run()
    found = {
        tuple((name, str(value).lower()) for name, value in c.knobs.items()): c.composed.iteration_ms / 1e3
        for c in search.composed
        if c.composed
    }
    return {run.name: found[run.knobs] for run in runs if run.knobs in found}


def main() -> int:
    """Compose the runs and compare pairs; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron", type=Path, default=os.environ.get("MEGATRON_LM"), help="Megatron-LM checkout"
    )
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--out", type=Path, help="directory of the searches")
    parser.add_argument("--workers", type=int, default=1, help="searches at a time")
    parser.add_argument("--jobs", type=int, default=2, help="slices at a time of a search")
    args = parser.parse_args()
    if args.megatron is None:
        parser.error("--megatron or MEGATRON_LM is needed")
    wanted = args.only.split(",")
    runs = [
        run
        for run in (*published(), *measured_on_h200(), *measured_deepspeed())
        if any(part in run.name for part in wanted)
    ]
    sweeps = [sweep for sweep in grouped(runs, lambda run: run.job) if len(pairs_of(sweep)) > 0]
    launches = [part for sweep in sweeps for part in grouped(sweep, lambda run: run.launch)]
    composed: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(
            args.workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool,
    ):
        out = args.out or Path(scratch)
        ended = {
            pool.submit(compose, part, args.megatron, out / part[0].name.replace("/", "_"), args.jobs): part
            for part in launches
        }
        for future in as_completed(ended):
            try:
                composed |= future.result()
            except (PrismError, SliceFailed) as error:
                print(f"{ended[future][0].name}: {error}", flush=True)
                continue
            told = ", ".join(
                f"{run.name} {composed[run.name]:.2f} s composed, {run.seconds:.2f} measured"
                for run in ended[future]
            )
            print(told, flush=True)
    return compare(sweeps, composed)


def grouped(runs: Iterable[Run], key: Callable[[Run], tuple]) -> list[list[Run]]:
    """Runs with the same key, in the order of the first of each."""
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return list(found.values())


def pairs_of(sweep: list[Run]) -> list[tuple[list[Run], list[Run]]]:
    """Pairs of layouts (the runs of each) that were measured more than 5 % apart."""
    layouts = grouped(sweep, lambda run: run.knobs)
    return [
        (a, b) for a, b in itertools.combinations(layouts, 2) if abs(_ratio(a, b, _measured) - 1) > _APART
    ]


def compare(sweeps: list[list[Run]], composed: Mapping[str, float]) -> int:
    """Print each pair; the exit status."""
    right = wrong = missing = 0
    print("composed  measured   pair")
    for a, b in itertools.chain.from_iterable(pairs_of(sweep) for sweep in sweeps):
        names = (
            f"{' = '.join(r.name for r in a)} / {' = '.join(r.name for r in b)}: {_difference(a[0], b[0])}"
        )
        if not all(run.name in composed for run in (*a, *b)):
            missing += 1
            print(f"                     {names} was not composed")
            continue
        told, measured = _ratio(a, b, lambda run: composed[run.name]), _ratio(a, b, _measured)
        same = (told > 1) == (measured > 1)
        right, wrong = right + same, wrong + (not same)
        print(f"{told:8.3f}  {measured:8.3f}   {names}{'' if same else '  OTHER WAY ROUND'}")
    print(f"{right} of {right + wrong} pairs ranked as measured, {missing} not composed")
    return int(wrong + missing > 0)


def _measured(run: Run) -> float:
    return run.seconds


def _ratio(a: list[Run], b: list[Run], time_of: Callable[[Run], float]) -> float:
    return statistics.mean(map(time_of, a)) / statistics.mean(map(time_of, b))


def _difference(a: Run, b: Run) -> str:
    parts = [f"{name} {x}/{y}" for (name, x), (_, y) in zip(a.knobs, b.knobs, strict=True) if x != y]
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
