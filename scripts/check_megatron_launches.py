#!/usr/bin/env python3
"""Launch the unmodified pretrain_gpt.py of Megatron-LM under emulation, in every layout the docs name.

    python scripts/check_megatron_launches.py --megatron PATH/Megatron-LM [--only 7b,175b] [--audit 4]

Prints one line a case: exit status, wall seconds, slices, the slowest slice's microseconds per device kernel and memory,
simulated seconds, audit, predicted iteration time. Exits 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

COMMON = (
    "--use-mcore-models --mock-data --tokenizer-type NullTokenizer --vocab-size 50303"
    " --make-vocab-size-divisible-by 128 --bf16 --train-iters 50 --log-interval 1 --eval-iters 1"
    " --eval-interval 1000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2"
    " --disable-bias-linear --attention-dropout 0 --hidden-dropout 0"
    " --untie-embeddings-and-output-weights --position-embedding-type rope --distributed-backend nccl"
    " --log-throughput --num-workers 2 --split 99,1,0 --micro-batch-size 1"
)
LOCAL = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
    " --no-rope-fusion --attention-backend unfused"
)
"""What Megatron's own layers need; without it Transformer Engine is used (`prism setup-te`)."""
SIZE_7B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu"
    " --seq-length 4096 --max-position-embeddings 4096"
)
SIZE_175B = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048"
SIZE_LLAMA3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu"
    " --group-query-attention --num-query-groups 8 --normalization RMSNorm --seq-length 8192 --max-position-embeddings 8192"
)
SIZE_8X7B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu"
    " --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096"
    " --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-token-dispatcher-type alltoall"
)
TP8_PP4 = "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch."""

    world_size: int
    args: str
    impl: str = LOCAL
    launcher: str = "torchrun --standalone --nproc-per-node 1"


CASES = {
    "7b": Case(world_size=64, args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 16"),
    "7b-all": Case(
        world_size=64,
        args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 16 --num-layers-per-virtual-pipeline-stage 2 {RECOMPUTE} {OVERLAP}",
    ),
    "175b": Case(
        world_size=1024,
        args=f"{SIZE_175B} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16"
        f" --global-batch-size 1536 {OVERLAP}",
    ),
    "175b-te": Case(
        world_size=1024,
        impl="",
        args=f"{SIZE_175B} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16"
        f" --global-batch-size 1536 {OVERLAP}",
    ),
    "llama3-8b-te": Case(
        world_size=1024,
        impl="",
        args=f"{SIZE_LLAMA3_8B} --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2"
        f" --global-batch-size 512 {OVERLAP}",
    ),
    "8x7b": Case(
        world_size=256,
        args=f"{SIZE_8X7B} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4"
        " --expert-model-parallel-size 8 --global-batch-size 256 --use-distributed-optimizer",
    ),
    "7b-1024": Case(world_size=1024, args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 256"),
    "7b-8192": Case(world_size=8192, args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 2048"),
    "7b-65536": Case(
        world_size=65536,
        args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 16384 --use-distributed-optimizer",
    ),
    "7b-uneven": Case(
        world_size=64,
        args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 16 --decoder-first-pipeline-num-layers 5",
    ),
    "7b-python": Case(world_size=64, args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 16", launcher="python"),
    "7b-nproc2": Case(
        world_size=64,
        args=f"{SIZE_7B} {TP8_PP4} --global-batch-size 16",
        launcher="torchrun --standalone --nproc-per-node 2",
    ),
}


def main() -> int:
    """Run the cases; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron", type=Path, default=os.environ.get("MEGATRON_LM"), help="Megatron-LM checkout"
    )
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("--audit", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="keep run directories under this directory")
    parser.add_argument(
        "--prism-args", default="", help="further arguments for every launch, e.g. '--prism-no-cache'"
    )
    args = parser.parse_args()
    if args.megatron is None:
        parser.error("--megatron or MEGATRON_LM is needed")
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only.split(",") if args.only else CASES:
            failures += not run_case(name, args=args, out_dir=(args.keep or Path(scratch)) / name)
    return 1 if failures else 0


def run_case(name: str, *, args: argparse.Namespace, out_dir: Path) -> bool:
    """Run one case and print its line; True when it finished and every audited rank matched."""
    case = CASES[name]
    bin_dir = Path(sys.executable).parent
    launcher = case.launcher.split()
    command = [
        str(bin_dir / launcher[0]), *launcher[1:], str(args.megatron / "pretrain_gpt.py"), *COMMON.split(), *case.impl.split(),
        *case.args.split(), "--prism-emulate", f"--prism-world-size={case.world_size}",
        f"--prism-audit={args.audit}", f"--prism-out={out_dir}", *args.prism_args.split(),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(args.megatron), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    log = out_dir.with_name(f"{name}.log")
    began = time.time()
    with log.open("w") as output:
        status = subprocess.run(command, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
    seconds = time.time() - began
    if status != 0 or not (out_dir / "prediction.json").exists():
        print(
            f"{name}: FAILED with status {status} after {seconds:.0f} s\n{log.read_text()[-3000:]}",
            flush=True,
        )
        return False
    prediction = json.loads((out_dir / "prediction.json").read_text())
    reports = [json.loads(p.read_text()) for p in (out_dir / "slices").glob("*/report.json")]
    us_per_op = max(
        1e6 * r["seconds_per_iteration"][-1] / max(r["num_ops"], 1)
        for r in reports
        if r["seconds_per_iteration"]
    )
    audit = prediction["audit"]
    print(
        f"{name}: ok in {seconds:.0f} s, {len(reports)} slices, {us_per_op:.1f} us a kernel, "
        f"{max(r['max_rss_bytes'] for r in reports) / 2**20:.0f} MiB, simulated in "
        f"{prediction['simulate_seconds']:.2f} s, audit {audit['matched']} of {len(audit['ranks'])}, "
        f"{prediction['iteration_time_ms']:.1f} ms an iteration",
        flush=True,
    )
    return audit["matched"] == len(audit["ranks"]) == args.audit


if __name__ == "__main__":
    sys.exit(main())
