#!/usr/bin/env python3
"""Simulate iterations that an H200 really ran, from what slices recorded of them, and compare.

    python scripts/check_recorded_iterations.py [one1 ds-z1 ds-z3]

``tests/data/iterations_h200`` holds what slices of ``bench_one_gpu.py`` on an H200 recorded: iterations that CUPTI alone watched, and
a traced one. Each is made a program and simulated without marks of the slice (no phases, events of streams, or calls: one GPU
has no peers). Two comparisons: the watched iterations with their simulation, nothing fitted; and, corrected as a slice is,
the slice's iterations that nothing watched and the real job of the same call. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from pathlib import Path

import numpy as np

from prism_plugins.capture.kernel_times import KernelTimes, kernel_times
from prism_plugins.capture.kineto import Trace, parse_trace
from prism_plugins.capture.kineto_program import SignatureTable, build_iteration
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.in_situ import InSituCosts
from prism_plugins.costs.model import build_cost_model
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.measured import GpuState, Measured, MeasuredOp, Watched
from prism_plugins.program.model import EVENT_DTYPE, EventKind, Program
from prism_plugins.simulate.engine import simulate
from prism_plugins.world.layout import Layout

DATA = Path(__file__).parents[1] / "tests" / "data"
JOBS = ("one1", "ds-z1", "ds-z3")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", default=JOBS, help=f"of {', '.join(JOBS)}")
    runs = json.loads((DATA / "one_gpu_h200.json").read_text())["runs"]["jobs"]
    print("job     watched ms  simulated           slice ms  simulated           real ms   slice")
    for name in parser.parse_args().jobs:
        run = runs[name][-1]
        (found,) = run["slices"].values()
        watched, traced = load(name, "watched"), load(name, "traced")
        times = kernel_times(watched)
        assert times is not None
        span, timed = statistics.mean(times.span_ns) / 1e6, statistics.median(found["iteration_ms"])
        plain = simulated_ms(traced, times)
        fitted, _ = times.fitted(timed * 1e6, host_ratio=found["watched"]["host_scale"])
        like_slice, real = simulated_ms(traced, fitted), run["truth"]["ms"]
        print(
            f"{name:6} {span:11.1f} {plain:10.1f} {plain / span - 1:+7.2%} {timed:11.1f} {like_slice:10.1f} "
            f"{like_slice / timed - 1:+7.2%} {real:10.1f} {timed / real - 1:+7.2%}"
        )


def load(job: str, what: str) -> Trace:
    """A recorded trace."""
    path = DATA / "iterations_h200" / f"{job}.{what}.json.xz"
    return parse_trace(lzma.decompress(path.read_bytes()), source=str(path))


def simulated_ms(traced: Trace, times: KernelTimes) -> float:
    """The iteration, priced by the recorded times of kernels and host."""
    table = SignatureTable()
    iteration = build_iteration(traced, marks=[], table=table, times=times)
    refs = iteration.events["ref"][iteration.events["kind"] == EventKind.KERNEL]
    size = len(table.signatures)
    total, host, count = (
        np.bincount(refs, weights, size) for weights in (iteration.op_ns, iteration.op_host_ns, None)
    )
    ops = [
        MeasuredOp(table.signatures[i], total[i] / count[i], int(count[i]), host[i] / count[i])
        for i in range(size)
    ]
    tail = [(EventKind.DEVICE_SYNC, 0, 0, 0, 0), (EventKind.HOST, 0, 0, 0, round(times.tail_ns))]
    program = Program(
        rank=0,
        events=np.concatenate([iteration.events, np.array(tail, EVENT_DTYPE)]),
        signatures=table.signatures,
        comms=[],
        groups=[],
        phases=[],
        initial=[],
        source="sliced",
    )
    job = JobPrograms(
        layout=Layout(world_size=1),
        classes=(RankClass(name="all", ranks=np.array([0]), representative=0, exemplar=program),),
    )
    cluster = load_cluster("dgx-h200")
    watched = Watched(beside_ms=times.beside_ns / 1e6, overlap_ms=times.overlap_ns / 1e6)
    measured = Measured(rank=0, ops=tuple(ops), gpu=GpuState(name="NVIDIA H200"), watched=watched)
    return simulate(job, InSituCosts(build_cost_model(cluster), cluster, [measured])).iteration_time_ns / 1e6


if __name__ == "__main__":
    main()
