#!/usr/bin/env python3
"""Compare predicted memory with Megatron-LM's own recordings on H100s, case by case, on a machine without a GPU.

    prism setup-te
    python scripts/bench_memory.py --megatron PATH/Megatron-LM [--only WORD,…] [--jobs N] [--out DIR] [--list]
    python scripts/bench_memory.py --out DIR --markdown [--against OTHER]     # the table of what was run; two builds of torch
    python scripts/collect_memory_recordings.py CLONE                         # the recordings of a test at other times

tests/data/megatron_golden_h100.json holds functional tests of NVIDIA/Megatron-LM: their arguments and the bytes that their
last rank logged (`mem_allocated_bytes` after an iteration, `mem_max_allocated_bytes` since the start). Each case runs with its
own arguments and environment on mock data, as the last rank of its job; `--launch` emulates the whole job instead, as a
user would. Arguments that only name files, checkpoints or logs are left out; a case with an argument that this Megatron-LM
or prism does not have is reported and not counted. Recordings were made with Megatron-LM's main branch and releases; another
checkout may allocate otherwise.

One line per case: predicted and recorded bytes, and their relative difference. Many tests were recorded several times, with other
bytes each time (tests/data/megatron_golden_h100_repeats.json): the second figure is the difference from the nearest of those that were
recorded within half a year. With ``--out`` what ran is kept, and not run again
when the script is called again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.errors import PrismError, SliceFailed
from prism_plugins.options import Job, Options
from prism_plugins.program.slices import JobFacts
from prism_plugins.progress import Progress
from prism_plugins.rundir import RunDir
from prism_plugins.slice_plan import dependencies
from prism_plugins.slice_pool import SlicePool
from prism_plugins.slice_runner import SliceRunner

DATA = Path(__file__).parent.parent / "tests" / "data" / "megatron_golden_h100.json"
REPEATS = DATA.with_name("megatron_golden_h100_repeats.json")
SAME_SOFTWARE = datetime.timedelta(days=183)
"""Recordings further apart are of other versions of torch and Transformer Engine."""
SCRIPTS = {
    "gpt": "pretrain_gpt.py",
    "mixtral": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
}
NOT_OF_THE_MODEL = (
    "--use-checkpoint", "--timing-log", "--distributed-timeout", "--no-mmap-bin-files", "--num-workers", "--use-persistent-ckpt",
    "--train-samples", "--train-iters", "--tokenizer", "--logging-level", "--check-weight-hash", "--manual-gc", "--enable-experimental",
    "--verify-integrity", "--async-strategy", "--async-ckpt",
)  # fmt: skip
ADDED = (
    "--lr", "1e-4", "--eval-interval", "1000", "--eval-iters", "1", "--split", "99,1,0", "--log-params-norm", "--log-num-zeros-in-grad",
)  # fmt: skip
"""What every recorded test has and the data leaves out. Both norms and zeros are computed on the device."""
WORD_PIECES = {"bert": ("BertWordPieceLowerCase", 30522), "t5": ("BertWordPieceCase", 28996)}
"""Tokenizer and size of its vocabulary (bert-large-uncased, the default of pretrain_bert.py; bert-large-cased, which the test
names)."""
KEPT = "result.json"
DENSE_WORST, DENSE_MEAN, MOE_WORST = 0.005, 0.001, 0.03


class Case(NamedTuple):
    """A recorded job."""

    name: str
    script: str
    num_gpus: int
    args: tuple[str, ...]
    env: dict[str, str]
    allocated: int
    peak: int
    data: str
    """Whose data set is to be made (``bert``, ``t5``), where there is no mock one; else empty."""
    kind: str
    """``dense`` or ``moe``."""
    left_out: str
    """Why it cannot be run; empty: it can."""
    repeats: tuple[tuple[int, int], ...]
    """Allocated and peak bytes of all its recordings by about the same software."""

    @property
    def apex(self) -> bool:
        """Megatron's own layers as recorded, with the fused kernels of the container's Apex."""
        return ("--transformer-impl", "local") in zip(self.args, self.args[1:], strict=False)

    @property
    def label(self) -> str:
        """Its name without the revision and the machine, which is the same for all."""
        return self.name.partition("@")[0].removesuffix("/dev_dgx_h100")

    @property
    def slug(self) -> str:
        """Name of its folder."""
        return self.name.replace("/", "_")

    def off(self, result: Result) -> tuple[float, float]:
        """Relative difference of allocated and peak bytes."""
        return result.allocated / self.allocated - 1, result.peak / self.peak - 1

    def off_nearest(self, result: Result) -> tuple[float, float]:
        """The same against the recording of this test that is nearest."""
        both = [
            (result.allocated / allocated - 1, result.peak / peak - 1) for allocated, peak in self.repeats
        ]
        return min(both, key=lambda pair: max(abs(pair[0]), abs(pair[1])))


class Result(NamedTuple):
    """Predicted bytes of the last rank."""

    allocated: int
    peak: int


def load_cases() -> list[Case]:
    """All recordings."""
    repeats = json.loads(REPEATS.read_text())
    return [
        _case(entry, repeats)
        for entry in json.loads(DATA.read_text())
        if "mem_allocated_bytes" in entry["measured"]
    ]


def _repeats(entry: dict[str, Any], all_repeats: dict[str, Any]) -> set[tuple[int, int]]:
    """The recordings of an entry's test that are about as old, under its name and the one it has today."""
    names = [entry["id"].removeprefix("mcore-golden/").partition("/dev_dgx_h100")[0]]
    names += re.findall(r"test_cases/([^/]+/[^/]+)/golden_values_dev_dgx_h100\.json", entry["notes"])
    day = datetime.date.fromisoformat(entry["date"])
    return {
        (allocated, peak)
        for name in names
        for _, date, allocated, peak in all_repeats.get(name, ())
        if abs(datetime.date.fromisoformat(date) - day) <= SAME_SOFTWARE
    }


def _case(entry: dict[str, Any], repeats: dict[str, Any]) -> Case:
    model, flags, measured = entry["model"], entry["flags"], entry["measured"]
    name = entry["id"].removeprefix("mcore-golden/")
    given: dict[str, Any] = flags.get("all_args") or {}
    arch = model.get("arch", "")
    left_out = ""
    if arch not in SCRIPTS:
        left_out = f"a {arch or 'unknown'} model"
    elif not given:
        left_out = "its arguments were not recorded"
    elif not entry.get("num_gpus"):
        left_out = "its number of GPUs was not recorded"
    elif flags.get("fsdp") or "--use-megatron-fsdp" in given:
        left_out = "Megatron-FSDP, which prism does not emulate"
    elif flags.get("cuda_graph") or any("cuda-graph" in a for a in given):
        left_out = "CUDA graphs, which prism does not emulate"
    elif "--fine-grained-activation-offloading" in given:
        left_out = "activation offloading"
    elif flags.get("optimizer") == "muon":
        left_out = "Muon"
    args: list[str] = []
    for key, value in given.items():
        if key.startswith(NOT_OF_THE_MODEL):
            continue
        if value is True:
            args.append(key)
        elif value is not False and value is not None:
            text = str(value)
            args += [key, *(text.strip("[]").split() if text.startswith("[") and "*" not in text else [text])]
    args += ADDED
    # A batch that grows is counted in samples.
    args += ("--train-samples", "100000") if "--rampup-batch-size" in given else ("--train-iters", "20")
    if "--overlap-param-gather-with-optimizer-step" in given:
        args += ("--ckpt-format", "torch")  # the only one that Megatron allows with it
    if arch in WORD_PIECES:
        # The other tokenizers of this name ask Hugging Face for theirs.
        args += ("--legacy-tokenizer", "--tokenizer-type", WORD_PIECES[arch][0])
    else:
        # The null tokenizer adds one token; a smaller vocabulary is padded to the same size.
        vocabulary = model.get("padded_vocab") or 50304
        smaller = vocabulary - 64 if arch == "gpt" else vocabulary - 120
        args += ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(smaller))
    return Case(
        name=name,
        script=SCRIPTS.get(arch, ""),
        num_gpus=int(entry.get("num_gpus") or 0),
        args=tuple(args),
        env={k: str(v) for k, v in (flags.get("env") or {}).items()},
        allocated=int(measured["mem_allocated_bytes"]),
        peak=int(measured["mem_max_allocated_bytes"]),
        data=arch if arch in WORD_PIECES else "",
        kind="moe" if model.get("num_experts") else "dense",
        left_out=left_out,
        repeats=tuple(
            {(int(measured["mem_allocated_bytes"]), int(measured["mem_max_allocated_bytes"]))}
            | _repeats(entry, repeats)
        ),
    )


def make_data(kind: str, folder: Path) -> list[str]:
    """Write a vocabulary of word pieces and an indexed data set of random sentences; the arguments that name them.

    The data set has the format of Megatron's ``IndexedDataset`` (``_IndexWriter`` in megatron/core/datasets/indexed_dataset.py).
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = WORD_PIECES[kind][1]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *(f"piece{n}" for n in range(size - len(special)))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    documents, sentences, words = 200, 20, 40
    random = numpy.random.default_rng(0)
    tokens = random.integers(len(special), size, documents * sentences * words, dtype=numpy.int32)
    (folder / "text.bin").write_bytes(tokens.tobytes())
    count = documents * sentences
    int32_code = 4
    with (folder / "text.idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, int32_code, count, documents + 1))
        index.write(numpy.full(count, words, numpy.int32).tobytes())
        index.write((numpy.arange(count, dtype=numpy.int64) * words * tokens.itemsize).tobytes())
        index.write((numpy.arange(documents + 1, dtype=numpy.int64) * sentences).tobytes())
    return ["--data-path", str(folder / "text"), "--vocab-file", str(folder / "vocab.txt")]


def python_path(first: Path) -> dict[str, str]:
    """The variable under which Python looks for a checkout before anything else."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))}


def arguments(case: Case, out: Path) -> list[str]:
    """The arguments of a case, with the data it needs written beside its run directory."""
    return [*case.args, *(make_data(case.data, out.with_name(f"{out.name}-data")) if case.data else ())]


def emulate(case: Case, *, megatron: Path, out: Path) -> Result:
    """Slice the last rank and what its slice needs. Raises PrismError or SliceFailed."""
    last = case.num_gpus - 1
    options = Options(world_size=case.num_gpus, ranks=(last,), out=str(out), cache=False, apex=case.apex)
    job = Job(options=options, run_as="script", argv=(str(megatron / case.script), *arguments(case, out)))
    cluster = load_cluster(options.cluster)
    previous = dict(os.environ)
    os.environ.update(case.env | python_path(megatron))
    try:
        with Progress(quiet=True) as progress, SlicePool(1, lambda line, is_error: None) as pool:
            runner = SliceRunner(
                job,
                gpu=cluster.gpu_facts(),
                gpus_per_node=cluster.gpus_per_node,
                rundir=RunDir(out),
                cache=None,
                executors=[pool],
                progress=progress,
            )

            def add_last(facts: JobFacts) -> None:
                needed = dependencies(facts, last)
                runner.add({rank: dependencies(facts, rank) for rank in needed if rank} | {last: needed})

            runner.add({0: ()})
            runner.run(on_facts=add_last)
    finally:
        os.environ.clear()
        os.environ.update(previous)
    report = runner.reports[last]
    return Result(report.allocated_bytes_end, report.peak_allocated_bytes)


def launch(case: Case, *, megatron: Path, out: Path) -> Result:
    """Emulate the whole job by its launch. Raises PrismError when it fails."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(megatron / case.script), *arguments(case, out)),
        *("--prism-emulate", "--prism-world-size", str(case.num_gpus), "--prism-ranks", str(case.num_gpus - 1)),
        *("--prism-out", str(out)), *(("--prism-apex",) if case.apex else ()),
    ]  # fmt: skip
    environment = os.environ | case.env | python_path(megatron)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = [
            x for x in done.stderr.splitlines() if x.startswith("prism: error")
        ] or done.stderr.splitlines()[-1:]
        raise PrismError(lines[0].removeprefix("prism: error: ") if lines else "no message")
    report = RunDir(out).read_report(case.num_gpus - 1)
    return Result(report.allocated_bytes_end, report.peak_allocated_bytes)


def reason(error: Exception, out: Path) -> str:
    """One line of an error; where it says nothing itself, the last line that a slice printed."""
    text = str(error)
    if found := re.search(r"unrecognized arguments: (.*)", text):
        return f"this Megatron-LM has no {found[1].split()[0]}"
    first = re.sub(r"^prism: error: ", "", text.splitlines()[0] if text else type(error).__name__)
    if "its output:" in first or "exited with status" in first:
        logs = sorted(out.glob("slices/*/log.txt"), key=lambda p: p.stat().st_mtime)
        lines = logs[-1].read_text(errors="replace").split("\n") if logs else []
        first = next((x.strip() for x in reversed(lines) if x.strip()), first)
        if found := re.search(r"unrecognized arguments: (.*)", first):
            return f"this Megatron-LM has no {found[1].split()[0]}"
    return first[:200]


def run_case(case: Case, *, megatron: Path, out: Path, whole: bool) -> Result | str:
    """The bytes of a case, or why it failed."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        result = (launch if whole else emulate)(case, megatron=megatron, out=out)
    except (PrismError, SliceFailed) as error:
        return reason(error, out)
    temporary = out / "result.tmp"
    temporary.write_text(json.dumps(result._asdict()))
    temporary.rename(out / KEPT)
    return result


def kept(out: Path) -> Result | None:
    """The bytes that an earlier call found."""
    try:
        return Result(**json.loads((out / KEPT).read_text()))
    except FileNotFoundError:
        return None


def run_cases(
    cases: list[Case], *, megatron: Path, out: Path, whole: bool, jobs: int
) -> Iterator[tuple[Case, Result | str]]:
    """Cases as they end, those run before first."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        started: dict[Future[Result | str], Case] = {}
        for case in cases:
            if (known := kept(out / case.slug)) is not None:
                yield case, known
            else:
                future = pool.submit(run_case, case, megatron=megatron, out=out / case.slug, whole=whole)
                started[future] = case
        for future in as_completed(started):
            yield started[future], future.result()


def line(case: Case, result: Result) -> str:
    """Predicted and recorded bytes of a case."""
    off, nearest = case.off(result), case.off_nearest(result)
    return (
        f"{case.label:100} allocated {result.allocated:12} / {case.allocated:12} {100 * off[0]:+9.4f} %   "
        f"peak {result.peak:12} / {case.peak:12} {100 * off[1]:+9.4f} %   "
        f"nearest of {len(case.repeats)}: {100 * nearest[0]:+.4f} % {100 * nearest[1]:+.4f} %"
    )


class Errors:
    """Relative differences by kind of model: from the recording, and from the nearest recording of the same test."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add(self, case: Case, result: Result) -> None:
        """Count a case."""
        self.pairs.setdefault((case.kind, "recorded"), []).append(case.off(result))
        self.pairs.setdefault((case.kind, "nearest"), []).append(case.off_nearest(result))


def markdown(cases: list[Case], out: Path) -> int:
    """Print the table of the cases that ran, dense models first; the exit status."""
    print(
        "| recording | allocated | peak | nearest recording of the test | of |\n| --- | --- | --- | --- | --- |"
    )
    errors = Errors()
    for case in sorted(cases, key=lambda c: (c.kind != "dense", c.label)):
        if not case.left_out and (result := kept(out / case.slug)) is not None:
            errors.add(case, result)
            nearest = " / ".join(f"{100 * off:+.3f} %" for off in case.off_nearest(result))
            print(
                f"| {case.label} | {percent(result.allocated, case.allocated)} | {percent(result.peak, case.peak)} "
                f"| {nearest} | {len(case.repeats)} |"
            )
    return report(errors)


def percent(predicted: int, recorded: int) -> str:
    """A difference, in bytes where it is small."""
    difference = predicted - recorded
    return (
        f"{difference:+} B".replace("+0 B", "0 B")
        if abs(difference) <= 1024
        else f"{100 * difference / recorded:+.3f} %"
    )


def compare(cases: list[Case], out: Path, other: Path) -> int:
    """Print where two runs of the benchmark differ; the exit status."""
    pairs = [(case, kept(out / case.slug), kept(other / case.slug)) for case in cases]
    both = [(case, a, b) for case, a, b in pairs if a is not None and b is not None]
    different = [(case, a, b) for case, a, b in both if a != b]
    for case, a, b in different:
        print(f"{case.label:100} allocated {a.allocated} / {b.allocated}   peak {a.peak} / {b.peak}")
    print(f"{len(both)} cases ran in both, {len(both) - len(different)} with the same bytes")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, default=os.environ.get("MEGATRON_LM"))
    parser.add_argument("--only", default="", help="comma-separated words; cases whose name contains one")
    parser.add_argument(
        "--launch", action="store_true", help="emulate whole jobs instead of their last ranks"
    )
    parser.add_argument(
        "--out", type=Path, help="keep results and run directories here, and go on from there"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--list", action="store_true", help="say which cases can run, and why others cannot")
    parser.add_argument("--markdown", action="store_true", help="run nothing: the table of what --out holds")
    parser.add_argument("--against", type=Path, help="run nothing: where --out and this directory differ")
    args = parser.parse_args()
    words = [w for w in args.only.split(",") if w]
    cases = [c for c in load_cases() if not words or any(w in c.name for w in words)]
    if args.list:
        for case in cases:
            print(f"{case.name:110} {case.left_out or 'runs'}")
        return 0
    if args.markdown or args.against:
        if args.out is None:
            parser.error("--out says where the results are")
        return compare(cases, args.out, args.against) if args.against else markdown(cases, args.out)
    if args.megatron is None:
        parser.error("say where Megatron-LM is: --megatron or MEGATRON_LM")
    errors = Errors()
    for case in cases:
        if case.left_out:
            print(f"{case.label:100} left out: {case.left_out}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        running = run_cases(
            [c for c in cases if not c.left_out],
            megatron=Path(args.megatron).resolve(),
            out=args.out or Path(scratch),
            whole=args.launch,
            jobs=args.jobs,
        )
        for case, result in running:
            if isinstance(result, str):
                print(f"{case.label:100} failed: {result}", flush=True)
                continue
            errors.add(case, result)
            print(line(case, result), flush=True)
    return report(errors)


def report(errors: Errors) -> int:
    """Print the summary; 1 when a goal is missed."""
    good = True
    for (kind, against), pairs in sorted(errors.pairs.items()):
        for what, values in zip(("allocated", "peak"), zip(*pairs, strict=True), strict=True):
            sizes = [abs(v) for v in values]
            print(
                f"{kind:6} {what:10} {against:9} {len(sizes):3} cases: mean {100 * statistics.mean(sizes):.4f} %, "
                f"median {100 * statistics.median(sizes):.4f} %, worst {100 * max(sizes):.4f} %"
            )
            worst, mean = (DENSE_WORST, DENSE_MEAN) if kind == "dense" else (MOE_WORST, MOE_WORST)
            good = good and (
                against != "recorded" or (max(sizes) <= worst and statistics.mean(sizes) <= mean)
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
