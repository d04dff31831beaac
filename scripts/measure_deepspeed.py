#!/usr/bin/env python3
"""Measure real DeepSpeed jobs on one GPU: the truth that predictions are compared with.

    python scripts/measure_deepspeed.py --out tests/data/deepspeed_h200.json [--only z1,z3] [--steps 12]

Each job is ``train_llama_deepspeed.py`` (about 1.3 billion parameters) under torchrun. Every job runs twice: once for
step times and memory, once with ``wall_clock_breakdown``, whose timers wait for the device, for the times of forward,
backward and step. No job needs a compiled extension. ``check_deepspeed.py`` emulates the same jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_llama_deepspeed.py")
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1,
    "gradient_clipping": 1.0,
    "optimizer": TORCH_ADAM,
    "bf16": {"enabled": True},
}
OVERLAPPED = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}

JOBS: dict[str, tuple[str, dict]] = {
    "z0": ("", {"zero_optimization": {"stage": 0}}),
    "z1": ("", {"zero_optimization": {"stage": 1}}),
    "z2": ("", {"zero_optimization": OVERLAPPED}),
    "z3": ("", {"zero_optimization": {"stage": 3}}),
    "z3-init-checkpointing": ("--zero-init --checkpointing", {"zero_optimization": {"stage": 3}}),
    "z1-client": ("--client-optimizer", {"optimizer": None, "zero_optimization": {"stage": 1}}),
    "z1-fp16": (
        "",
        {
            "bf16": None,
            "fp16": {"enabled": True, "initial_scale_power": 8},
            "zero_optimization": {"stage": 1},
        },
    ),
}
"""Name → (arguments, what the configuration has beside or instead of BASE)."""


def config_of(name: str) -> dict:
    """The DeepSpeed configuration of a job."""
    config = {**BASE, **JOBS[name][1]}
    return {key: value for key, value in config.items() if value is not None}


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="comma-separated job names")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--job-timeout-s", type=float, default=240)
    args = parser.parse_args()
    import deepspeed
    import torch

    results = []
    for name in args.only.split(",") if args.only else JOBS:
        result = measure(name, args)
        results.append(result)
        peak = (result["memory"] or {}).get("allocated_bytes.all.peak")
        print(
            f"{name}: {result['median_ms']} ms {result['breakdown_ms']}, peak {peak} ({result['seconds']:.0f} s)",
            flush=True,
        )
        header = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "steps": args.steps,
            "jobs": results,
        }
        args.out.write_text(json.dumps(header, indent=1))


def measure(name: str, args: argparse.Namespace) -> dict:
    """Run one job; returns step times (ms), memory (bytes) and the means of DeepSpeed's timers (ms)."""
    folder = args.out.resolve().parent / f".{args.out.stem}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    memory = folder / "memory.json"
    memory.unlink(missing_ok=True)
    began = time.time()
    output = launch(name, folder, args, {}, "--memory-json", str(memory))
    times = [float(x) for x in re.findall(r"^step \d+ ms ([0-9.]+)", output, re.MULTILINE)]
    timed = launch(name, folder, args, {"wall_clock_breakdown": True})
    result = {
        "name": name,
        "args": JOBS[name][0],
        "config": config_of(name),
        "iteration_ms": times,
        "median_ms": statistics.median(times[4:]) if len(times) > 6 else None,
        "breakdown_ms": breakdown(timed),
        "memory": json.loads(memory.read_text()) if memory.exists() else None,
        "seconds": time.time() - began,
    }
    if not times or result["memory"] is None:
        result["error"] = output[-3000:]
        print(output[-3000:], flush=True)
    return result


def launch(name: str, folder: Path, args: argparse.Namespace, change: dict, *more: str) -> str:
    """Run the script once; returns what it printed."""
    config = folder / "ds_config.json"
    config.write_text(json.dumps({**config_of(name), **change}))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(SCRIPT),
        *JOBS[name][0].split(), "--steps", str(args.steps), "--deepspeed_config", str(config), *more,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "8"},
            capture_output=True,
            text=True,
            timeout=args.job_timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode()[-20000:]}\nTIMEOUT"
    return done.stdout + done.stderr


def breakdown(output: str) -> dict[str, float]:
    """Median over steps of each of DeepSpeed's timers, ms per step (``fwd``, ``bwd``, ``step`` and their parts)."""
    seen: dict[str, list[float]] = {}
    for line in output.splitlines():
        if "time (ms) |" in line:
            for timer, value in re.findall(r"(\w+): ([0-9.]+)", line.partition("time (ms) |")[2]):
                seen.setdefault(timer, []).append(float(value))
    return {timer: statistics.median(values) for timer, values in seen.items()}


if __name__ == "__main__":
    main()
