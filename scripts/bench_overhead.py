#!/usr/bin/env python3
"""What the flag costs the kernels of a slice: timed iterations on one GPU, with and without it, in turn.

    python scripts/bench_overhead.py --megatron PATH/Megatron-LM --out DIR [--job one1] [--pairs 2]

A job of one GPU runs by itself and as a slice of its emulation, ``--pairs`` times each, in turn. Both are timed alike: CUDA
events at the begin and the end of each training step, no profiler, the same iterations of the process. Where the GPU is busy all
the time, their distance is the time of the kernels. Writes ``DIR/overhead.json``.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_one_gpu
import measure_megatron

from prism_plugins.gpu.timing import make_schedule

GOAL = 0.005


def main() -> int:
    """Run the pairs; returns 1 where the goal is missed."""
    if sys.argv[1:2] == ["--worker"]:
        time_steps()
        measure_megatron.worker()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM (core_r0.16.0)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--job", default="one1", help="a job of one GPU, of bench_one_gpu.py")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--cluster", default="h200x2")
    parser.add_argument("--timeout-s", type=float, default=120)
    args = parser.parse_args()
    args.physical, args.no_replay = 1, True
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "slice": []}
    for number in range(args.pairs):
        for name, times in (("plain", plain(args, number)), ("slice", as_slice(args, number))):
            found[name].append(times)
            print(f"{name} {number}: {times['step_ms']:.3f} ms", flush=True)
    plain_ms, slice_ms = (statistics.median(one["step_ms"] for one in found[k]) for k in ("plain", "slice"))
    overhead = slice_ms / plain_ms - 1
    result = {"job": args.job, "date": time.strftime("%Y-%m-%d"), **found, "overhead": overhead}
    (args.out / "overhead.json").write_text(json.dumps(result, indent=1))
    print(f"{args.job}: without {plain_ms:.3f} ms, in a slice {slice_ms:.3f} ms: {overhead:+.3%}")
    return int(abs(overhead) > GOAL)


def plain(args: argparse.Namespace, number: int) -> dict[str, float]:
    """The job by itself."""
    folder = args.out.resolve() / f"plain-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    schedule = make_schedule(args.iterations)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", __file__, "--worker",
        str(args.megatron / "pretrain_gpt.py"), *measure_megatron.BASE.split(),
        "--train-iters", str(schedule.warm_up + schedule.timed + 1), *bench_one_gpu.JOBS[args.job][1].split(),
    ]  # fmt: skip
    env = {
        **os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4", "PRISM_MEASURE_DIR": str(folder),
        "PYTHONPATH": f"{args.megatron}:{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    run(command, env, folder / "log.txt", args.timeout_s)
    steps = json.loads((folder / "steps.json").read_text())
    begins, betweens = steps["begin_to_begin_ms"], steps["between_ms"]
    kept = slice(schedule.warm_up, schedule.warm_up + schedule.timed)
    return _times(begins[kept], statistics.median(betweens[kept]))


def as_slice(args: argparse.Namespace, number: int) -> dict[str, float]:
    """The job as the slice of its emulation."""
    folder = args.out / f"slice-{number}"
    command, env = bench_one_gpu.emulation(args.job, 1, folder, args)
    log = args.out / f"slice-{number}.log"
    run(command, env, log, args.timeout_s)
    measured = json.loads((folder / "slices" / "0" / "measured.json").read_text())
    return _times(measured["iteration_ms"], measured["between_ms"])


def run(command: list[str], env: dict[str, str], log: Path, timeout_s: float) -> None:
    """Run a command; end with its output where it fails."""
    with log.open("wb") as file:
        code = subprocess.run(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s
        ).returncode
    if code:
        raise SystemExit(f"{log.read_text(errors='replace')[-3000:]}\nexit status {code}: {log}")


def _times(begin_to_begin_ms: list[float], between_ms: float) -> dict[str, float]:
    iteration = statistics.median(begin_to_begin_ms)
    return {
        "step_ms": iteration - between_ms,
        "iteration_ms": iteration,
        "between_ms": between_ms,
        "iterations": len(begin_to_begin_ms),
    }


def time_steps() -> None:
    """Wrap ``train_step`` with CUDA events; what they say is written when the process ends."""
    import megatron.training.training as training
    import torch

    original, begins, ends = training.train_step, [], []

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def train_step(*args, **kwargs):
        begins.append(event())
        result = original(*args, **kwargs)
        ends.append(event())
        return result

    def write() -> None:
        torch.cuda.synchronize()
        steps = {
            "begin_to_begin_ms": [a.elapsed_time(b) for a, b in itertools.pairwise(begins)],
            "between_ms": [a.elapsed_time(b) for a, b in zip(ends, begins[1:], strict=False)],
        }
        (Path(os.environ["PRISM_MEASURE_DIR"]) / "steps.json").write_text(json.dumps(steps))

    training.train_step = train_step
    atexit.register(write)


if __name__ == "__main__":
    sys.exit(main())
