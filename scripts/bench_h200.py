#!/usr/bin/env python3
"""Real jobs on H200s against their predictions: iteration time, parts of it, peak memory.

    python scripts/bench_h200.py --megatron PATH/Megatron-LM --out RUNS [--only small] [--calibration FILE]
    python scripts/bench_h200.py --measure --megatron PATH/Megatron-LM --out RUNS       # where there are H200s

Without ``--measure`` the truth is what ``tests/data`` holds: Megatron-LM on one and two GPUs, DeepSpeed on one. The jobs
are emulated without a GPU, each once: a finished run directory under RUNS is priced again. Where a file holds the host
benchmark of the machine that measured, the prediction is for that host; else for that of another such machine (preset h200x2).
``--measure`` runs the jobs that this machine has GPUs for, measures its host (``prism calibrate --host``), and compares
with that. Nothing is fitted per job. ``device`` is the time of kernels and copies on the GPU, NCCL apart, in files that
were measured with ``--parts``; ``gap`` is the rest of the iteration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Literal

import check_deepspeed
import check_memory
import msgspec
import numpy as np

from prism_plugins.cli_run import load_job
from prism_plugins.costs.calibration import Calibration, HostCosts
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model, host_of, load_calibration
from prism_plugins.errors import PrismError
from prism_plugins.host_speed import with_host_of_slices
from prism_plugins.program.infer import program_of
from prism_plugins.program.model import EventKind
from prism_plugins.rundir import RunDir
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.prices import Pricer

DATA = Path(__file__).parent.parent / "tests" / "data"
MEGATRON = (
    "megatron_h200x2_dp_pp.json",
    "megatron_h200x2.json",
    "megatron_h200x2_host.json",
    "megatron_h200_host.json",
)
DEEPSPEED = ("deepspeed_h200.json", "deepspeed_h200_host.json")
CLUSTER = "h200x2"
"""The machines that measured: one or two H200s of a node, with the host of such a machine."""
HOST_BOUND = 0.1
"""Jobs in whose prediction the slowest rank waits for its host for more than this share are listed as host-bound."""


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM (core_r0.16.0)")
    parser.add_argument("--out", type=Path, required=True, help="run directories, one per job")
    parser.add_argument("--only", default="", help="comma-separated parts of job names")
    parser.add_argument("--calibration", default="", help="as --prism-calibration")
    parser.add_argument(
        "--measure", action="store_true", help="run the real jobs first, on this machine's GPUs"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    megatron = [DATA / name for name in MEGATRON]
    deepspeed = [DATA / name for name in DEEPSPEED]
    if args.measure:
        megatron, deepspeed = [measure("measure_megatron.py", args)], [measure("measure_deepspeed.py", args)]
    calibration = load_calibration(args.calibration)
    errors: dict[str, list[float]] = {}
    print(
        f"{'job':24}{'real ms':>9}{'predicted':>10}{'error':>8}   device real/predicted   gap real/predicted   peak error"
    )
    for path in (*megatron, *deepspeed):
        data = json.loads(path.read_text())
        print(f"-- {path.stem}: {data['gpu']}, {data.get('date') or 'no date'}")
        for job in data["jobs"]:
            wanted = not args.only or any(part in job["name"] for part in args.only.split(","))
            if wanted and job.get("median_ms"):
                emulate = emulate_megatron if path in megatron else emulate_deepspeed
                run = emulate(job, data, args)
                kind, error = compare(job, data.get("host"), run, calibration)
                errors.setdefault(kind, []).append(error)
    for kind, values in errors.items():
        sizes = sorted(map(abs, values))
        print(
            f"{kind}: {len(values)} jobs, mean |error| {statistics.mean(sizes):.1%}, worst {sizes[-1]:.1%}, "
            f"mean signed {statistics.mean(values):+.1%}"
        )
    return 0


def measure(script: str, args: argparse.Namespace) -> Path:
    """Run the real jobs and the host benchmark; returns the file of measurements."""
    out = args.out / f"{Path(script).stem}.json"
    host = args.out / "host.json"
    command = [sys.executable, str(Path(__file__).with_name(script)), "--out", str(out)]
    if script == "measure_megatron.py":
        command += ["--megatron", str(args.megatron), "--parts"]
    subprocess.run(
        [sys.executable, "-m", "prism_plugins.cli", "calibrate", "--host", "--out", str(host)], check=True
    )
    subprocess.run(command, check=True)
    data = json.loads(out.read_text())
    out.write_text(json.dumps(data | {"host": json.loads(host.read_text())["host"]}))
    return out


def emulate_megatron(job: dict, data: dict, args: argparse.Namespace) -> Path:
    """The run directory of a job, made where it is not there."""
    out = args.out / job["name"]
    if not (out / "prediction.json").exists():
        known = check_memory.Job(
            name=job["name"],
            num_gpus=job["num_gpus"],
            args=f"{data['base_args']} {job['args']}".split(),
            memory={},
        )
        check_memory.emulate(known, megatron=args.megatron, out=out)
    return out


def emulate_deepspeed(job: dict, data: dict, args: argparse.Namespace) -> Path:
    """The run directory of a job, made where it is not there."""
    del data
    out = (args.out / f"deepspeed-{job['name']}").resolve()
    if not (out / "prediction.json").exists():
        check_deepspeed.emulate(job, CLUSTER, out)
    return out


def compare(
    job: dict, host: dict | None, run: Path, calibration: Calibration | Literal["none"] | None
) -> tuple[str, float]:
    """Print a job's line; returns its list and the error of its time."""
    programs, reports, _ = load_job(RunDir(run))
    described = load_cluster(CLUSTER)
    target = msgspec.convert(host, HostCosts) if host else host_of(calibration, described)
    cluster = with_host_of_slices(described, programs, reports, target)
    costs = build_cost_model(cluster, calibration=calibration)
    timeline = Simulation(programs, costs).timeline
    ms = timeline.iteration_time_ns / 1e6
    program = program_of(programs, 0)
    prices, events = Pricer(costs).price(program), program.events
    device = float(prices.op_ns[events["ref"][events["kind"] == EventKind.KERNEL]].sum()) / 1e6
    real, error = job["median_ms"], ms / job["median_ms"] - 1
    real_device = device_ms(job)
    parts = f"{real_device:8.0f} /{device:6.0f} ms" if real_device else f"{'-':>8} /{device:6.0f} ms"
    gap = (
        f"{real - real_device:8.0f} /{ms - device:6.0f} ms"
        if real_device
        else f"{'-':>8} /{ms - device:6.0f} ms"
    )
    host_ms = timeline.breakdown[timeline.slowest_class].host
    kind = "host-bound" if host_ms > HOST_BOUND * ms else "device-bound"
    print(
        f"{job['name']:24}{real:>9.1f}{ms:>10.1f}{error:>+8.1%}   {parts:22}{gap:24}{peak_error(job, run):>10}  {kind}",
        flush=True,
    )
    return kind, error


def device_ms(job: dict) -> float:
    """Kernels and copies of rank 0 but NCCL's, ms; 0 where that was not measured."""
    part = next((p for p in job.get("parts", ()) if p["rank"] == 0), {})
    names = [item for kind in ("kernel", "gpu_memcpy", "gpu_memset") for item in part.get(kind, {}).items()]
    return float(np.sum([ms for name, (_, ms) in names if "nccl" not in name]))


def peak_error(job: dict, run: Path) -> str:
    """Of the bytes that torch allocated at most, the worst of the measured ranks."""
    memory = job.get("memory") or []
    memory = memory if isinstance(memory, list) else [memory]
    predicted = json.loads((run / "prediction.json").read_text())["memory"]
    errors = []
    for measured in memory:
        rank = measured.get("rank", 0)
        mine = [m for m in predicted if rank in ranks_in(m["ranks"])]
        if mine:
            errors.append(mine[0]["peak_allocated_bytes"] / measured["allocated_bytes.all.peak"] - 1)
    return f"{max(errors, key=abs):+.3%}" if errors else "-"


def ranks_in(text: str) -> set[int]:
    """The ranks of ``0-3,8``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrismError as problem:
        sys.exit(f"prism: error: {problem}")
