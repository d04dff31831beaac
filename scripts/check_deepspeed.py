#!/usr/bin/env python3
"""Compare predicted with measured memory and time of DeepSpeed jobs: emulate the measured jobs and print the errors.

    python scripts/check_deepspeed.py tests/data/deepspeed_h200.json [--only z1,z3] [--out DIRECTORY]

The measurements come from ``measure_deepspeed.py``. One line per job: peak allocated, bytes live at the end, peak
reserved and device memory in use, each as predicted (GB), and its error; the predicted and measured time of a step.
Exits 1 when a peak is off by more than 2 % or live bytes by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_llama_deepspeed.py")
COLUMNS = (
    ("peak allocated", "peak_allocated_bytes", "allocated_bytes.all.peak", 0.02),
    ("live at the end", "allocated_bytes_end", "allocated_bytes.all.current", 0.001),
    ("peak reserved", "peak_reserved_bytes", "reserved_bytes.all.peak", None),
    ("device used", "device_used_bytes", "used_bytes", None),
)


def main() -> int:
    """Check the jobs; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="JSON file of measure_deepspeed.py")
    parser.add_argument("--cluster", default="dgx-h200")
    parser.add_argument("--only", default="", help="comma-separated job names")
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    good = True
    titles = "".join(f"{title + ', GB':>22}" for title, *_ in COLUMNS)
    print(f"{'job':22}{titles}   step, ms")
    with tempfile.TemporaryDirectory() as scratch:
        for job in measured["jobs"]:
            if job["memory"] is None or (args.only and job["name"] not in args.only.split(",")):
                continue
            out = (args.out or Path(scratch)).resolve() / job["name"]
            good = check(job, emulate(job, args.cluster, out)) and good
    return 0 if good else 1


def emulate(job: dict, cluster: str, out: Path) -> dict:
    """Launch a job under emulation; returns its prediction.json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    config = out.parent / f"{job['name']}.ds_config.json"
    config.write_text(json.dumps(job["config"]))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
        *(str(SCRIPT), *job["args"].split(), "--deepspeed_config", str(config)),
        *("--prism-emulate", "--prism-world-size", "1", "--prism-cluster", cluster, "--prism-out", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{job['name']}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return json.loads((out / "prediction.json").read_text())


def check(job: dict, prediction: dict) -> bool:
    """Print a job's line; whether it is within the limits."""
    good = True
    predicted, cells = prediction["memory"][0], []
    for _, key, truth, limit in COLUMNS:
        measured = job["memory"][truth]
        error = predicted[key] / measured - 1
        good = good and (limit is None or abs(error) <= limit)
        cells.append(f"{predicted[key] / 1e9:10.3f} {100 * error:+8.3f} %")
    time_ms, measured_ms = prediction["iteration_time_ms"], job["median_ms"]
    difference = predicted["peak_allocated_bytes"] - job["memory"]["allocated_bytes.all.peak"]
    print(
        f"{job['name']:22}{' '.join(cells)}   {time_ms:.1f} of {measured_ms:.1f} "
        f"({100 * (time_ms / measured_ms - 1):+.1f} %)   {difference:+d} B at the peak",
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(main())
