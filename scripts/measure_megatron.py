#!/usr/bin/env python3
"""Measure real Megatron-LM jobs on the GPUs of this machine: the truth that predictions are compared with.

    python scripts/measure_megatron.py --megatron PATH/Megatron-LM --out truth.json [--only tp2,pp2] [--iters 12]

Each job is the unmodified ``pretrain_gpt.py`` under torchrun; a wrapper around it (``--worker``) only writes
torch's memory statistics and NVML's used memory when the process ends. Iteration times come from the
framework's own log. Run it from a machine with two GPUs; jobs that need more GPUs than there are are skipped.
``--parts`` also keeps the process's CPU time of every iteration and profiles the one before the last (CUDA activities
only): time on the device by kernel, time of the host in the CUDA runtime and driver by call.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path

BASE = (
    "--use-mcore-models --transformer-impl local --mock-data --tokenizer-type NullTokenizer --vocab-size 50303"
    " --make-vocab-size-divisible-by 128 --bf16 --log-interval 1 --eval-iters 0 --eval-interval 1000 --lr 1e-4"
    " --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2 --no-save-optim --timing-log-level 0"
    " --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
    " --position-embedding-type rope --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights"
    " --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --distributed-backend nccl --log-throughput"
    " --num-workers 1 --attention-backend unfused --no-rope-fusion --split 99,1,0"
)
LARGE = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --micro-batch-size 4"
    " --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048"
)
SMALL = (
    "--num-layers 12 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 2"
    " --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024"
)
TINY = (
    "--num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --micro-batch-size 1"
    " --global-batch-size 16 --seq-length 512 --max-position-embeddings 512"
)
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-token-dispatcher-type alltoall"
)
DIST_OPT = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

JOBS: dict[str, tuple[int, str]] = {
    "one-small": (1, SMALL),
    "one-tiny": (1, TINY),
    "one-recompute-full": (1, f"{LARGE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "one-recompute-selective": (1, f"{LARGE} --recompute-granularity selective --recompute-modules core_attn"),
    "tp2": (2, f"{LARGE} --tensor-model-parallel-size 2"),
    "tp2-small": (2, f"{SMALL} --tensor-model-parallel-size 2"),
    "tp2-tiny": (2, f"{TINY} --tensor-model-parallel-size 2"),
    "pp2-small": (2, f"{SMALL} --pipeline-model-parallel-size 2"),
    "pp2-vpp2": (2, f"{LARGE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"),
    "dp2-small-distopt": (2, f"{SMALL} {DIST_OPT}"),
    "dp2-tiny": (2, TINY),
    "ep2-small": (2, f"{SMALL} {MOE} --expert-model-parallel-size 2"),
    "pp2-uneven": (2, f"{LARGE} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"),
}  # fmt: skip
"""Name → (GPUs, arguments beside BASE)."""


def main() -> None:
    """Run the jobs, or one worker of a job."""
    if sys.argv[1:2] == ["--worker"]:
        return worker()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM (core_r0.16.0)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="comma-separated job names")
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--job-timeout-s", type=float, default=150)
    parser.add_argument("--parts", action="store_true", help="profile one iteration")
    args = parser.parse_args()
    import torch

    names = args.only.split(",") if args.only else list(JOBS)
    results = []
    for name in names:
        num_gpus, job_args = JOBS[name]
        if num_gpus > torch.cuda.device_count():
            print(f"{name}: skipped, needs {num_gpus} GPUs", flush=True)
            continue
        result = run_job(name, num_gpus=num_gpus, job_args=job_args, args=args)
        results.append(result)
        print(
            f"{name}: {result.get('median_ms')} ms, peak "
            f"{[m['allocated_bytes.all.peak'] for m in result['memory']]} ({result['seconds']:.0f} s)",
            flush=True,
        )
        header = {
            "gpu": torch.cuda.get_device_name(0),
            "num_gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "date": time.strftime("%Y-%m-%d"),
            "base_args": f"{BASE} --train-iters {args.iters}",
            "jobs": results,
        }
        args.out.write_text(json.dumps(header, indent=1))


def run_job(name: str, *, num_gpus: int, job_args: str, args: argparse.Namespace) -> dict:
    """Run one job; returns its iteration times (ms) and memory per rank."""
    stats = args.out.parent / f".{args.out.stem}-{name}"
    stats.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}",
        __file__, "--worker", str(args.megatron / "pretrain_gpt.py"),
        *BASE.split(), "--train-iters", str(args.iters), *job_args.split(),
    ]  # fmt: skip
    env = {
        **os.environ,
        "PRISM_MEASURE_DIR": str(stats),
        "PRISM_MEASURE_PARTS": str(args.iters - 2) if args.parts else "",
        "PYTHONPATH": f"{args.megatron}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "4",
    }
    began = time.time()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.job_timeout_s)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output = f"{(error.stdout or b'').decode()[-20000:]}\nTIMEOUT"
    times = [float(x) for x in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", output)]
    memory = [json.loads(path.read_text()) for path in sorted(stats.glob("rank*.json"))]
    result = {
        "name": name, "num_gpus": num_gpus, "args": job_args, "iteration_ms": times,
        "median_ms": statistics.median(times[4:]) if len(times) > 6 else None,
        "memory": memory, "seconds": time.time() - began,
        "parts": [json.loads(path.read_text()) for path in sorted(stats.glob("parts*.json"))],
    }  # fmt: skip
    if not times:
        result["error"] = output[-3000:]
        print(output[-3000:], flush=True)
    return result


def worker() -> None:
    """Run the script given on the command line unmodified; write memory statistics when it ends."""
    sys.argv = sys.argv[2:]
    rank = int(os.environ["RANK"])

    def write_memory() -> None:
        import torch

        stats = torch.cuda.memory_stats()
        keys = (
            "allocated_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.peak",
            "active_bytes.all.peak", "requested_bytes.all.peak", "num_alloc_retries",
        )  # fmt: skip
        free, total = torch.cuda.mem_get_info()
        record = {
            "rank": rank,
            **{k: stats[k] for k in keys},
            "used_bytes": total - free,
            "total_bytes": total,
        }
        path = Path(os.environ["PRISM_MEASURE_DIR"]) / f"rank{rank}.json"
        path.write_text(json.dumps(record))

    atexit.register(write_memory)
    if os.environ.get("PRISM_MEASURE_PARTS"):
        watch_iterations(rank, profiled=int(os.environ["PRISM_MEASURE_PARTS"]))
    prepare()
    runpy.run_path(sys.argv[0], run_name="__main__")


def prepare() -> None:
    """What an installed megatron-core 0.16 lacks where there is no Transformer Engine and no checkout of its own."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # megatron-core 0.16 leaves the name undefined without TE
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        from megatron.core.datasets import utils

        utils.compile_helpers = lambda: (
            None
        )  # an installed megatron-core brings them, and no Makefile that works


def watch_iterations(rank: int, *, profiled: int) -> None:
    """Wrap ``train_step``: CPU seconds of every iteration, a profile of one; written when the process ends."""
    import megatron.training.training as training

    original, cpu_ms, parts = training.train_step, [], {}

    def train_step(*args, **kwargs):
        began = time.process_time()
        if len(cpu_ms) == profiled and not rank:
            result = profile(lambda: original(*args, **kwargs), parts)
        else:
            result = original(*args, **kwargs)
        cpu_ms.append(round((time.process_time() - began) * 1e3, 1))
        return result

    def write_parts() -> None:
        path = Path(os.environ["PRISM_MEASURE_DIR"]) / f"parts{rank}.json"
        path.write_text(json.dumps({"rank": rank, "cpu_ms": cpu_ms, **parts}))

    training.train_step = train_step
    atexit.register(write_parts)


def profile(call, parts: dict):
    """Call under the profiler; ``parts`` gets [count, ms] by name of what ran on the device and in the CUDA API."""
    import tempfile

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as trace:
        result = call()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        category = event.get("cat", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"):
            entry = parts.setdefault(category, {}).setdefault(event["name"][:120], [0, 0.0])
            entry[0] += 1
            entry[1] = round(entry[1] + event.get("dur", 0.0) / 1e3, 4)
    return result


if __name__ == "__main__":
    main()
