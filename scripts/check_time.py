#!/usr/bin/env python3
"""Compare predicted with measured iteration times: simulate emulated runs of the measured jobs again and print the errors.

    python scripts/check_memory.py --megatron PATH/Megatron-LM --out RUNS    # emulates the jobs, once
    python scripts/check_time.py RUNS [--cluster dgx-h200] [--cluster my.toml] [--calibration FILE|none]

RUNS holds one run directory per job, named like the job. One line per job: measured median, and for each cluster the
prediction, its error and where the time goes. Nothing is fitted per job. Host times are the slices' CPU times; a host
slower or faster than the machine that emulates shows in jobs of small kernels: give a cluster file with
``[host] slice_factor`` or ``op_us``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

from prism_plugins.cli_run import load_job
from prism_plugins.costs.calibration import Calibration
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model, host_of, load_calibration
from prism_plugins.errors import PrismError
from prism_plugins.host_speed import with_host_of_slices
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.slices import SliceReport
from prism_plugins.rundir import RunDir
from prism_plugins.simulate.engine import Simulation

DATA = Path(__file__).parent.parent / "tests" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--cluster", action="append", help="preset or file; may be given several times")
    parser.add_argument("--calibration", default="", help="as --prism-calibration")
    args = parser.parse_args()
    calibration = load_calibration(args.calibration)
    for name, measured_ms in measured().items():
        if not (args.runs / name).is_dir():
            continue
        try:
            job, reports, _ = load_job(RunDir(args.runs / name))
        except PrismError as error:
            print(f"{name:20} {error}")
            continue
        print(
            f"{name:20} measured {measured_ms:8.1f} ms",
            *(predict(job, reports, c, measured_ms, calibration) for c in args.cluster or ["dgx-h200"]),
        )


def measured() -> dict[str, float]:
    """Median iteration time of every measured job, ms."""
    files = (DATA / "megatron_h200x2_dp_pp.json", DATA / "megatron_h200x2.json")
    return {job["name"]: job["median_ms"] for path in files for job in json.loads(path.read_text())["jobs"]}


def predict(
    job: JobPrograms,
    reports: dict[int, SliceReport],
    cluster: str,
    measured_ms: float,
    calibration: Calibration | Literal["none"] | None,
) -> str:
    """``cluster: prediction (error) parts``."""
    described = load_cluster(cluster)
    described = with_host_of_slices(described, job, reports, host_of(calibration, described))
    timeline = Simulation(job, build_cost_model(described, calibration=calibration)).timeline
    ms = timeline.iteration_time_ns / 1e6
    b = timeline.breakdown[timeline.slowest_class]
    parts = f"compute {b.compute:.0f} exposed {b.exposed_communication:.0f} bubble {b.bubble:.0f} host {b.host:.0f} optimizer {b.optimizer:.0f}"
    return f"| {Path(cluster).stem} {ms:8.1f} ms ({ms / measured_ms - 1:+6.1%}) {parts}"


if __name__ == "__main__":
    main()
