#!/usr/bin/env python3
"""Compare predicted with measured memory: emulate the measured jobs through the real launch and print the errors.

    python scripts/check_memory.py --megatron PATH/Megatron-LM [--only pp2,dp2] [--out DIR]

Every job of the data files is launched with its own arguments under ``torchrun --nproc-per-node 1 …
--prism-emulate``. One line per rank: peak allocated, bytes live at the end, peak reserved and device memory in use,
each as predicted (GB), and its error. Exits 1 when peak allocated or live bytes are off by more than 0.1 %, or peak reserved
by more than 2 %.

The measured "live at the end" was read when training was over, so it may differ by a few small tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent.parent / "tests" / "data"
FILES = (DATA / "megatron_h200x2_dp_pp.json", DATA / "megatron_h200x2.json")
PEAK_LIMIT = 0.001
RESERVED_LIMIT = 0.02
LIVE_LIMIT = 0.001


@dataclass(frozen=True, kw_only=True)
class Job:
    """A measured job."""

    name: str
    num_gpus: int
    args: list[str]
    memory: dict[int, dict]
    """Measured statistics by rank."""


def load_jobs() -> list[Job]:
    """All measured jobs."""
    jobs = []
    for path in FILES:
        data = json.loads(path.read_text())
        for job in data["jobs"]:
            jobs.append(
                Job(
                    name=job["name"],
                    num_gpus=job["num_gpus"],
                    args=f"{data['base_args']} {job['args']}".split(),
                    memory={
                        m["rank"]: m | {"used_bytes": m["used_bytes"] - data.get("nvml_reserved_bytes", 0)}
                        for m in job["memory"]
                    },
                )
            )
    return jobs


def emulate(job: Job, *, megatron: Path, out: Path) -> dict:
    """Launch a job under emulation; returns its prediction.json."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
        *(str(megatron / "pretrain_gpt.py"), *job.args),
        *("--prism-emulate", "--prism-world-size", str(job.num_gpus), "--prism-cluster", "dgx-h200"),
        *("--prism-out", str(out)),
    ]
    # The measured jobs had no Transformer Engine; one that was set up here would be used by Megatron.
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PRISM_TE": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"{job.name}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return json.loads((out / "prediction.json").read_text())


def _last_words(stderr: str) -> str:
    """prism's own error lines, else the end of the output."""
    lines = stderr.splitlines()
    return "\n".join([line for line in lines if line.startswith("prism: error")] or lines[-30:])


def ranks_of(text: str) -> set[int]:
    """``0-3,8`` as a set."""
    ranks = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks


COLUMNS = (
    ("peak allocated", "peak_allocated_bytes", "allocated_bytes.all.peak", PEAK_LIMIT),
    ("live at the end", "allocated_bytes_end", "allocated_bytes.all.current", LIVE_LIMIT),
    ("peak reserved", "peak_reserved_bytes", "reserved_bytes.all.peak", RESERVED_LIMIT),
    ("device used", "device_used_bytes", "used_bytes", None),
)


def outside_torch(measured: dict, predicted: dict) -> str:
    """What the device holds beside the allocator's reserved memory, measured and predicted."""
    real = measured["used_bytes"] - measured["reserved_bytes.all.peak"]
    mine = sum(predicted["outside_torch"].values())
    return f"outside torch {real / 2**20:.0f} MiB {100 * (mine / real - 1):+.1f} %"


def check(job: Job, prediction: dict) -> bool:
    """Print a line per rank; whether all of them are within the limits."""
    good = True
    for rank, measured in sorted(job.memory.items()):
        predicted = next(m for m in prediction["memory"] if rank in ranks_of(m["ranks"]))
        predicted |= next((own for own in predicted["sliced"] if own["rank"] == rank), {})
        cells = []
        for _, key, truth, limit in COLUMNS:
            difference = predicted[key] - measured[truth]
            error = difference / measured[truth]
            good = good and (limit is None or abs(error) <= limit)
            cells.append(f"{predicted[key] / 1e9:8.3f} {100 * error:+8.4f} %")
        peak = predicted["peak_allocated_bytes"] - measured["allocated_bytes.all.peak"]
        print(
            f"{job.name:20} {rank:4}  {'  '.join(cells)}  {peak:+d} B at the peak  "
            f"{outside_torch(measured, predicted)}",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, default=os.environ.get("MEGATRON_LM"))
    parser.add_argument("--only", default="", help="comma-separated job names")
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    args = parser.parse_args()
    if args.megatron is None:
        parser.error("say where Megatron-LM is: --megatron or MEGATRON_LM")
    wanted = set(filter(None, args.only.split(",")))
    good = True
    print(f"{'job':20} rank  " + "  ".join(f"{title + ', GB':19}" for title, *_ in COLUMNS))
    with tempfile.TemporaryDirectory() as scratch:
        for job in load_jobs():
            if wanted and job.name not in wanted:
                continue
            out = (args.out or Path(scratch)) / job.name
            try:
                good = check(job, emulate(job, megatron=Path(args.megatron), out=out)) and good
            except RuntimeError as error:
                print(f"FAILED {error}", flush=True)
                good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
