#!/usr/bin/env python3
"""What it costs to infer and simulate a finished run again from its stored slices.

    python benchmarks/from_slices.py prism_out/RUN [--equal-shards]

Prints seconds of wall and CPU for each step and the peak memory of the process. With ``--equal-shards`` data-parallel ranks are
taken as equal, as ``prism what-if`` does.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prism_plugins import stages
from prism_plugins.cli_run import load_job
from prism_plugins.costs.base import CostModel
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import load_calibration
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import EventKind
from prism_plugins.rundir import RunDir
from prism_plugins.simulate.prices import Pricer


def main() -> int:
    """Time the steps; 1 when the job would not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of a finished run")
    parser.add_argument("--equal-shards", action="store_true")
    args = parser.parse_args()
    gc.disable()
    rundir = RunDir(args.run)
    job, reports, info = timed("load and infer", lambda: load_job(rundir, with_shards=not args.equal_shards))
    options = info.job.options
    _, costs = timed(
        "prepare prices",
        lambda: stages.price(
            info.cluster or load_cluster(options.cluster), job, reports, rundir, device=options.device,
            nccl=parse_settings(info.nccl_variables), calibration=load_calibration(options.calibration),
        ),
    )  # fmt: skip
    began = time.process_time()
    occurrences = price(job, costs)
    each = (time.process_time() - began) / occurrences
    print(f"price {occurrences:,} ops and calls of all classes: CPU {1e6 * each:.3f} us each")
    timeline, faults = timed("simulate", lambda: stages.simulate(job, costs))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    variants = sum(len(cls.variants) for cls in job.classes)
    print(
        f"{job.layout.world_size:,} ranks, {len(reports)} slices, {len(job.classes)} classes, {variants} variants: peak RSS {peak:.2f} GiB"
    )
    if timeline is None:
        print(faults[0].message)
        return 1
    print(f"iteration {timeline.iteration_time_ns / 1e6:.1f} ms")
    return 0


def price(job: JobPrograms, costs: CostModel) -> int:
    """Price everything that a simulation prices; how many ops and calls the programs of the classes hold."""
    costs.settle(job)
    pricer, count = Pricer(costs), 0
    for cls in job.classes:
        pricer.price(cls.exemplar)
        count += int((cls.exemplar.events["kind"] <= EventKind.COMM).sum())
    return count


def timed(name: str, step: Callable[[], Any]) -> Any:
    """Run a step and print what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = step()
    print(f"{name}: {time.perf_counter() - wall:.1f} s, CPU {time.process_time() - cpu:.1f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
