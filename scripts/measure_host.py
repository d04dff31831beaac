#!/usr/bin/env python3
"""How fast a host with a GPU issues work in each state of a process, and what that makes of predictions.

    python scripts/measure_host.py --megatron PATH/Megatron-LM --out DIR [--only one-tiny,one-small,ds-z3]

On one machine, one after the other, nothing else running: the host benchmark in a process of its own and as
``prism calibrate --host`` takes it; then each job really, with the benchmark after every iteration, and emulated on the
same host without its GPU. Jobs are those of ``measure_megatron.py`` and, as ``ds-NAME``, ``measure_deepspeed.py``, on one
GPU. The emulated job is priced with the host as each state has it. Prints a table and writes ``DIR/results.json`` after
every job: by iteration the wall and CPU time of the process and its busiest threads, page faults, context switches and
garbage collections. The device is waited for at the end of each measured iteration.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import measure_deepspeed
import measure_megatron
import msgspec

from prism_plugins.cli_run import load_job
from prism_plugins.costs.calibration import HostCosts, read_calibration
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.measured import shipped_calibration
from prism_plugins.costs.model import build_cost_model
from prism_plugins.errors import PrismError
from prism_plugins.host_speed import with_host_of_slices
from prism_plugins.program.slices import HostFigures, SliceReport
from prism_plugins.rundir import RunDir
from prism_plugins.simulate.engine import Simulation

ITERATIONS = 10
WARM_UP = 3
CLUSTER = "h200x1"


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    if sys.argv[1:2] == ["--worker"]:
        return worker()
    if sys.argv[1:2] == ["--own-process"]:
        return own_process()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM (core_r0.16.0)")
    parser.add_argument("--out", type=Path, required=True, help="folder of results, logs and run directories")
    parser.add_argument("--only", default="one-tiny,one-small,ds-z3", help="comma-separated job names")
    parser.add_argument("--timeout-s", type=float, default=240, help="of each process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        if name not in known_jobs():
            parser.error(f"--only: no job {name}; known: {', '.join(known_jobs())}")
    hosts = {
        "process of its own": figures_of(
            run(["--own-process", str(args.out / "own.json")], "own", args), args.out / "own.json"
        ),
        "calibrate --host": calibrated(args),
    }
    results = []
    for name in args.only.split(","):
        results.append(measure(name, hosts, args))
        (args.out / "results.json").write_text(
            json.dumps({"hosts": msgspec.to_builtins(hosts), "jobs": results}, indent=1)
        )


def known_jobs() -> list[str]:
    """Names of ``--only``."""
    megatron = [name for name, (num_gpus, _) in measure_megatron.JOBS.items() if num_gpus == 1]
    return megatron + [f"ds-{name}" for name in measure_deepspeed.JOBS]


def calibrated(args: argparse.Namespace) -> HostFigures | None:
    """What ``prism calibrate --host`` measures."""
    out = args.out / "host.json"
    run(["-m", "prism_plugins.cli", "calibrate", "--host", "--out", str(out)], "calibrate", args)
    host = read_calibration(out).host
    return host.benchmark if host else None


def measure(name: str, hosts: dict[str, HostFigures | None], args: argparse.Namespace) -> dict:
    """One job, real and emulated; prints its lines."""
    real_json, run_dir = args.out / f"real-{name}.json", args.out / f"run-{name}"
    failed = run(
        [*TORCHRUN, __file__, "--worker", str(real_json), *script_of(name, args)], f"real-{name}", args
    )
    emulated = [
        *TORCHRUN, *script_of(name, args), "--prism-emulate", "--prism-world-size", "1",
        "--prism-cluster", CLUSTER, "--prism-iterations", "5", "--prism-no-cache", "--prism-out", str(run_dir),
    ]  # fmt: skip
    failed = run(emulated, f"emulated-{name}", args, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") or failed
    result: dict = {"name": name, "failed": failed}
    if failed or not real_json.exists():
        print(f"{name}: failed, see {args.out}/*-{name}.txt: {failed}", flush=True)
        return result
    real = json.loads(real_json.read_text())
    steady = real["iterations"][WARM_UP:]
    ms = statistics.median(row["wall_ms"] for row in steady)
    job, reports, _ = load_job(RunDir(run_dir))
    result |= real | {"median_ms": ms, "slice": slice_of(reports[0]), "predicted_ms": {}}
    states = hosts | {"the job itself": msgspec.convert(real["figures"], HostFigures)}
    print(
        f"{name}: {ms:.1f} ms an iteration, {statistics.median(row['cpu_ms'] for row in steady):.0f} ms of CPU; slice "
        f"{statistics.median(reports[0].cpu_seconds_per_iteration[1:]) * 1e3:.0f} ms of CPU, a step of the benchmark "
        f"{statistics.median(result['slice']['dispatch_us']):.0f} us"
    )
    for state, figures in states.items():
        if figures is None:
            continue
        predicted = predicted_ms(job, reports, figures)
        result["predicted_ms"][state] = predicted
        print(
            f"  host by {state:20} {statistics.median(figures.dispatch_us):7.0f} us a step, GEMM "
            f"{figures.enqueue_us.get('gemm', 0.0):5.1f} us: predicted {predicted:8.1f} ms ({predicted / ms - 1:+.1%})",
            flush=True,
        )
    return result


def predicted_ms(job, reports: dict[int, SliceReport], figures: HostFigures) -> float:
    """Iteration time of an emulated job on a host, ops by the shipped calibration."""
    one = msgspec.structs.replace(figures, dispatch_us=(statistics.median(figures.dispatch_us),))
    host = HostCosts(op_us=0.0, dispatch_us=0.0, view_us=0.0, benchmark=one)
    cluster = with_host_of_slices(load_cluster(CLUSTER), job, reports, host)
    costs = build_cost_model(cluster, calibration=shipped_calibration())
    return Simulation(job, costs).timeline.iteration_time_ns / 1e6


def slice_of(report: SliceReport) -> dict:
    """What a slice measured of its iterations and of its host."""
    figures = msgspec.to_builtins(report.host) if report.host else {"dispatch_us": []}
    return figures | {
        "cpu_ms": [round(s * 1e3, 1) for s in report.cpu_seconds_per_iteration],
        "wall_ms": [round(s * 1e3, 1) for s in report.seconds_per_iteration],
    }


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


def script_of(name: str, args: argparse.Namespace) -> list[str]:
    """The script of a job and its arguments."""
    if name.startswith("ds-"):
        job = name.removeprefix("ds-")
        config = args.out / f"{job}.ds_config.json"
        config.write_text(json.dumps(measure_deepspeed.config_of(job)))
        more = measure_deepspeed.JOBS[job][0].split()
        return [
            *(str(measure_deepspeed.SCRIPT), *more),
            *("--deepspeed_config", str(config.resolve()), "--steps", str(ITERATIONS)),
        ]
    return [
        *(str(args.megatron / "pretrain_gpt.py"), *measure_megatron.BASE.split()),
        *("--train-iters", str(ITERATIONS), *measure_megatron.JOBS[name][1].split()),
    ]


def run(arguments: list[str], label: str, args: argparse.Namespace, **changes: str) -> str:
    """A Python process with its output in ``DIR/label.txt``; what went wrong, or nothing."""
    script = [__file__] if arguments[0] == "--own-process" else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "4",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PRISM_TE": "none",
        "PYTHONPATH": f"{args.megatron}:{os.environ.get('PYTHONPATH', '')}",
        **changes,
    }
    with (args.out / f"{label}.txt").open("wb") as log:
        try:
            code = subprocess.run(
                [sys.executable, *script, *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=args.timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{label}: over {args.timeout_s:g} s"
    return f"{label}: exit status {code}" if code else ""


def figures_of(failed: str, path: Path) -> HostFigures | None:
    """Figures that a process wrote."""
    if failed:
        print(failed, flush=True)
        return None
    return msgspec.json.decode(path.read_bytes(), type=HostFigures)


def own_process() -> None:
    """The benchmark where nothing else ran."""
    from prism_plugins.host_benchmark import DispatchBenchmark, figures_of_training

    dispatch = DispatchBenchmark().measure_us(budget_s=2.0)
    figures = msgspec.structs.replace(figures_of_training([round(dispatch, 1)]), in_training=False)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(figures))


class Watch:
    """What iterations of this process use, and how fast its host is after each."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.steps: list[float] = []
        self._collections: list[float] = []
        self._benchmark = None
        gc.callbacks.append(self._collected)

    def begin(self) -> None:
        """An iteration begins."""
        self._collections.clear()
        self._before = self._now()

    def end(self) -> None:
        """It has ended: wait for the device, then run the benchmark."""
        import torch

        from prism_plugins.host_benchmark import AFTER_ITERATION_S, DispatchBenchmark

        torch.cuda.synchronize()
        was, now = self._before, self._now()
        used = {name: round(now[name] - was[name], 3) for name in now if name != "threads"}
        threads = {name: round(ms - was["threads"].get(name, 0.0), 1) for name, ms in now["threads"].items()}
        busiest = dict(sorted(threads.items(), key=lambda item: -item[1])[:5])
        self.rows.append(
            used | {"collections": len(self._collections) // 2, "collecting_ms": self._collecting_ms()}
            | {"cpu_ms_by_thread": busiest}
        )  # fmt: skip
        self._benchmark = self._benchmark or DispatchBenchmark()
        self.steps.append(self._benchmark.measure_us(budget_s=AFTER_ITERATION_S))

    def write(self, path: str) -> None:
        """At the end of the process."""
        from prism_plugins.host_benchmark import figures_of_training

        found = figures_of_training(round(us, 1) for us in self.steps[WARM_UP:])
        record = {"iterations": self.rows, "steps_us": self.steps, "figures": msgspec.to_builtins(found)}
        Path(path).write_text(json.dumps(record))

    def _collected(self, phase: str, info: dict) -> None:
        del phase, info
        self._collections.append(time.perf_counter())

    def _collecting_ms(self) -> float:
        times = self._collections
        return round(sum(b - a for a, b in zip(times[::2], times[1::2], strict=False)) * 1e3, 2)

    @staticmethod
    def _now() -> dict:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        threads: dict[str, float] = {}
        for task in Path("/proc/self/task").iterdir():
            try:
                used = int((task / "schedstat").read_text().split()[0]) / 1e6
                name = f"{(task / 'comm').read_text().strip()} {task.name}"
            except (OSError, ValueError):  # it ended
                continue
            threads[name] = used
        return {
            "wall_ms": time.perf_counter() * 1e3,
            "cpu_ms": time.process_time() * 1e3,
            "system_ms": usage.ru_stime * 1e3,
            "page_faults": usage.ru_minflt,
            "waits": usage.ru_nvcsw,
            "preemptions": usage.ru_nivcsw,
            "threads": threads,
        }


def worker() -> None:
    """Run the script given on the command line with its iterations watched."""
    import runpy

    out, sys.argv = sys.argv[2], sys.argv[3:]
    watch = Watch()
    if Path(sys.argv[0]).name == "pretrain_gpt.py":
        measure_megatron.prepare()
        watch_megatron(watch)
    else:
        watch_deepspeed(watch)
    atexit.register(watch.write, out)
    runpy.run_path(sys.argv[0], run_name="__main__")


def watch_megatron(watch: Watch) -> None:
    """An iteration is a call of ``train_step``."""
    import megatron.training.training as training

    original = training.train_step

    def train_step(*args, **kwargs):
        watch.begin()
        result = original(*args, **kwargs)
        watch.end()
        return result

    training.train_step = train_step


def watch_deepspeed(watch: Watch) -> None:
    """An iteration is from one optimizer step to the next."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.step

    def step(self, *args, **kwargs):
        last = self.is_gradient_accumulation_boundary()
        result = original(self, *args, **kwargs)
        if last:
            if hasattr(watch, "_before"):
                watch.end()
            watch.begin()
        return result

    DeepSpeedEngine.step = step


if __name__ == "__main__":
    try:
        main()
    except PrismError as problem:
        sys.exit(f"prism: error: {problem}")
