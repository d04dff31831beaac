#!/usr/bin/env python3
"""Real jobs beside their emulation on a real GPU: simulation from measured slices, and replay, in one call.

    python scripts/bench_one_gpu.py --megatron PATH/Megatron-LM --out DIR [--only pp2,tp2] [--physical 2]

Jobs are those of ``measure_megatron.py`` (and of ``measure_deepspeed.py``, named ``ds-z1`` and so on, on one GPU). The
truth is the job itself where this machine has the GPUs for it, run first on the same ones; otherwise what was recorded on
other H200s (``tests/data``), which differ among each other by 2 %. Emulated jobs run on one GPU, or their slices on
``--physical`` ones side by side; replays show the script's own log. Nothing is fitted per job. Writes ``DIR/table.txt``
and ``DIR/results.json``, after every job.
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
from typing import Any

import measure_deepspeed
import measure_megatron

DATA = Path(__file__).parents[1] / "tests" / "data"
_LARGE = measure_megatron.LARGE
_SHORT = _LARGE.replace("--global-batch-size 32", "--global-batch-size 8")
DIST_OPT = measure_megatron.DIST_OPT
JOBS: dict[str, tuple[int, str]] = {
    **measure_megatron.JOBS,
    "one4": (1, _LARGE),
    "one1": (1, _SHORT),
    "recompute1": (
        1,
        f"{_SHORT} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "pp2": (2, f"{_LARGE} --pipeline-model-parallel-size 2"),
    "dp2": (2, f"{_LARGE} {DIST_OPT}"),
    "dp2no": (2, _LARGE),
    "175b-stage": (
        1024,
        "--num-layers 96 --hidden-size 12288 --ffn-hidden-size 32768 --num-attention-heads 96 --seq-length 2048"
        " --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 192 --tensor-model-parallel-size 8"
        " --sequence-parallel --pipeline-model-parallel-size 16",
    ),
}
"""Megatron jobs: name → (GPUs, arguments beside BASE). ``175b-stage``: GPT-3's size with SwiGLU, 24 micro-batches."""
WARM_UP = 4


def main() -> None:
    """Run every job and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM (core_r0.16.0)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="one-small,tp2,pp2,dp2", help="comma-separated job names")
    parser.add_argument("--iterations", type=int, default=20, help="of slices and replays")
    parser.add_argument("--real-iterations", type=int, default=16)
    parser.add_argument("--physical", type=int, default=1, help="GPUs that share the slices")
    parser.add_argument("--cluster", default="h200x2", help="describes the machine of the truth")
    parser.add_argument("--no-replay", action="store_true", help="only the simulation")
    parser.add_argument("--timeout-s", type=float, default=300)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in args.only.split(","):
        began = time.monotonic()
        result = bench(name, args)
        result["seconds"] = round(time.monotonic() - began, 1)
        results.append(result)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        table = table_of(results)
        (args.out / "table.txt").write_text(table)
        print(table.splitlines()[-1], flush=True)
    print(table_of(results))


def bench(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job: its truth, and its emulation."""
    import torch

    deepspeed = name.startswith("ds-")
    num_gpus = 1 if deepspeed else JOBS[name][0]
    truth = recorded(name)
    if torch.cuda.device_count() >= num_gpus:
        truth = measure(name, args) or truth
        (args.out / f"truth-{name}.json").write_text(json.dumps(truth, indent=1))
    run = args.out / f"run-{name}"
    command, env = emulation(name, num_gpus, run, args)
    log = args.out / f"{name}.log"
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    result: dict[str, Any] = {"name": name, "truth": truth, "exit": code}
    if code:
        result["error"] = log.read_text(errors="replace")[-1500:]
        return result
    prediction = json.loads((run / "prediction.json").read_text())
    result |= {
        "simulated_ms": prediction["iteration_time_ms"],
        "breakdown_ms": prediction["breakdown_ms"],
        "replay": prediction["replay"],
        "replay_log_ms": [
            log_ms(run / one["log"]) or one["iteration_time_ms"] for one in prediction["replay"]
        ],
        "findings": [finding["message"] for finding in prediction["findings"]],
        "slices": {},
    }
    for folder in sorted((run / "slices").iterdir(), key=lambda p: int(p.name)):
        report = json.loads((folder / "report.json").read_text())
        measured = json.loads((folder / "measured.json").read_text())
        measured.pop("ops")
        result["slices"][folder.name] = measured | {
            key: report[key]
            for key in (
                "peak_allocated_bytes",
                "peak_requested_bytes",
                "peak_reserved_bytes",
                "seconds",
                "num_ops",
            )
        }
    result["used_bytes"] = {m["ranks"]: m["device_used_bytes"] for m in prediction["memory"]}
    return result


def emulation(
    name: str, num_gpus: int, run: Path, args: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """The launch of a job with prism's flag, and its environment."""
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={min(args.physical, num_gpus)}",
    ]  # fmt: skip
    prism = [
        "--prism-emulate", "--prism-world-size", str(num_gpus), "--prism-device", "cuda",
        "--prism-cluster", args.cluster if num_gpus < 8 else "dgx-h200",
        "--prism-iterations", str(args.iterations),
        "--prism-out", str(run), "--prism-no-cache",
        *(["--prism-replay", "0"] if args.physical > 1 and not args.no_replay else []),  # on the GPU that sliced it
        *(["--prism-replay", "none"] if args.no_replay else []),
    ]  # fmt: skip
    if name.startswith("ds-"):
        env = {**os.environ, "OMP_NUM_THREADS": "8"}  # as measure_deepspeed has it
        job = name.removeprefix("ds-")
        config = args.out / f"{job}.json"
        config.write_text(json.dumps(measure_deepspeed.config_of(job)))
        script = [str(measure_deepspeed.SCRIPT), "--deepspeed_config", str(config), "--steps", "100"]
        return [*launcher, *script, *measure_deepspeed.JOBS[job][0].split(), *prism], env
    env = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": f"{args.megatron}:{os.environ.get('PYTHONPATH', '')}",
    }
    script = [
        str(args.megatron / "pretrain_gpt.py"), *measure_megatron.BASE.split(), "--train-iters", "100",
        *JOBS[name][1].split(),
    ]  # fmt: skip
    return [*launcher, *script, *prism], env


def measure(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Run the job itself on this machine; None if it failed."""
    if name.startswith("ds-"):
        return measure_with_deepspeed(name.removeprefix("ds-"), args)
    num_gpus, job_args = JOBS[name]
    settings = argparse.Namespace(
        megatron=args.megatron,
        out=args.out / "truth.json",
        iters=args.real_iterations,
        job_timeout_s=args.timeout_s,
        parts=False,
    )
    found = measure_megatron.run_job(name, num_gpus=num_gpus, job_args=job_args, args=settings)
    steady = found["iteration_ms"][WARM_UP:]
    if not steady or not found["memory"]:
        return None
    return {
        "ms": statistics.median(steady),
        "spread": (max(steady) - min(steady)) / statistics.median(steady),
        "source": "this call",
        "steady_ms": steady,
        "peak_allocated": [m["allocated_bytes.all.peak"] for m in found["memory"]],
        "peak_requested": [m["requested_bytes.all.peak"] for m in found["memory"]],
        "peak_reserved": [m["reserved_bytes.all.peak"] for m in found["memory"]],
        "used": [m["used_bytes"] for m in found["memory"]],
    }


def measure_with_deepspeed(job: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Run a DeepSpeed job of one GPU itself; None if it failed."""
    folder = args.out.resolve() / f"truth-{job}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = argparse.Namespace(steps=args.real_iterations, job_timeout_s=args.timeout_s)
    path = folder / "memory.json"
    output = measure_deepspeed.launch(job, folder, settings, {}, "--memory-json", str(path))
    times = [float(x) for x in re.findall(r"^step \d+ ms ([0-9.]+)", output, re.MULTILINE)]
    steady = times[WARM_UP:]
    if not steady or not path.exists():
        print(output[-3000:], flush=True)
        return None
    memory = json.loads(path.read_text())
    return {
        "ms": statistics.median(steady),
        "spread": (max(steady) - min(steady)) / statistics.median(steady),
        "source": "this call",
        "steady_ms": steady,
        "peak_allocated": [memory["allocated_bytes.all.peak"]],
        "peak_requested": [memory["requested_bytes.all.peak"]],
        "peak_reserved": [memory["reserved_bytes.all.peak"]],
        "used": [memory["used_bytes"]],
    }


def recorded(name: str) -> dict[str, Any] | None:
    """What other H200s measured; None where nothing is recorded."""
    file = "deepspeed_h200.json" if name.startswith("ds-") else "megatron_h200x2*.json"
    for path in sorted(DATA.glob(file)):
        for job in json.loads(path.read_text())["jobs"]:
            if job["name"] in (name.removeprefix("ds-"), f"one-{name}") and job.get("median_ms"):
                memory = job.get("memory") or []
                keys = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "used_bytes")
                peaks = (
                    [[m[k] for m in memory if k in m] for k in keys] if isinstance(memory, list) else [[]] * 3
                )
                return {
                    "ms": job["median_ms"], "source": f"recorded on other GPUs ({path.name})",
                    "peak_allocated": peaks[0], "peak_reserved": peaks[1], "used": peaks[2],
                }  # fmt: skip
    return None


def log_ms(path: Path) -> float | None:
    """Median iteration time that the script's own log shows (Megatron's, or the DeepSpeed script's)."""
    text = path.read_text(errors="replace")
    times = [float(x) for x in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)]
    times = times or [float(x) for x in re.findall(r"step \d+ ms ([0-9.]+)", text)]
    return statistics.median(times[WARM_UP:]) if len(times) > WARM_UP else None


def table_of(results: list[dict[str, Any]]) -> str:
    """Real, simulated and replayed side by side; memory in bytes of difference."""
    rows = [
        f"{'job':20} {'real ms':>9} {'slice':>9} {'':>8} {'simulated':>10} {'':>8} {'replay log':>10} {'':>8} {'host ms':>8} {'GPU busy':>8}  "
        "peak allocated, slice - real (bytes)   in use   truth"
    ]
    for r in results:
        truth = r["truth"] or {}
        if r["exit"]:
            rows.append(f"{r['name']:20} {truth.get('ms', 0):9.1f} failed ({r['exit']})")
            continue
        real = truth.get("ms")
        replay = r["replay_log_ms"][0] if r["replay_log_ms"] else None
        slices = r["slices"]
        peaks = truth.get("peak_allocated", [])
        asked = truth.get("peak_requested", [])
        memory = ", ".join(
            f"{rank}: {s['peak_allocated_bytes'] - peaks[int(rank)]:+d}"
            + (
                f" (asked {s['peak_requested_bytes'] - asked[int(rank)]:+d})"
                if int(rank) < len(asked)
                else ""
            )
            for rank, s in slices.items()
            if int(rank) < len(peaks)
        )
        used = _error(next(iter(r["used_bytes"].values()), None), next(iter(truth.get("used", [])), None))
        timed = statistics.median(next(iter(slices.values()))["iteration_ms"])
        busiest = max(slices.values(), key=lambda s: s["busy_ms"])
        rows.append(
            f"{r['name']:20} {real or 0:9.1f} {timed:9.1f} {_error(timed, real):>8} {r['simulated_ms']:10.1f} {_error(r['simulated_ms'], real):>8} "
            f"{replay or 0:10.1f} {_error(replay, real):>8} {max(s['host_ms'] for s in slices.values()):8.1f} "
            f"{busiest['busy_ms']:8.1f}  {memory:38} {used:>8} {truth.get('source', 'none')}"
        )
    return "\n".join(rows) + "\n"


def _error(value: float | None, real: float | None) -> str:
    return f"{100 * (value / real - 1):+.2f} %" if value and real else ""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
