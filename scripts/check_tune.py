#!/usr/bin/env python3
"""Check the layout search against full emulation of every layout of a small space.

    python scripts/check_tune.py [--out DIR]                            a small GPT on 64 GPUs, all layouts emulated
    python scripts/check_tune.py --megatron PATH/Megatron-LM --large    GPT-3 175B on 1024 H100, timed
    python scripts/check_tune.py --deepspeed [--emulate 5]              Llama 7B on 64 H100 with DeepSpeed, --emulate best

Prints composed against emulated times and memory, their rank correlation, and whether a bound was above an emulation.
Exits 1 unless the best is the same, Spearman is at least 0.95 and no bound is above. With --out an earlier start goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from check_megatron_launches import COMMON, LOCAL, SIZE_175B

from prism_plugins.cli_tune import parse_knobs, report, tune
from prism_plugins.options import parse_command
from prism_plugins.tune.result import TuneResult, describe
from prism_plugins.tune.settings import Settings

SMALL = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048"
    " --vocab-size 50304 --global-batch-size 64 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
)
SMALL_SPACE = ("tp=2,8", "pp=1,4", "vpp=1,2", "micro_batch=1,2", "optimizer=plain", "stages=even")
LARGE = (
    f"{SIZE_175B} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16"
    " --global-batch-size 1536 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)
LLAMA_7B = "--layers 32 --hidden 4096 --ffn 11008 --heads 32 --seq 2048 --vocab 32000 --checkpointing"
DEEPSPEED_SPACE = ("bucket=500000000", "micro_batch=1,2,4,8")
DEEPSPEED_CONFIG = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
}
_GIB = 2**30


def main() -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron", type=Path, default=os.environ.get("MEGATRON_LM"), help="Megatron-LM checkout"
    )
    parser.add_argument("--large", action="store_true", help="the 175B search instead")
    parser.add_argument("--deepspeed", action="store_true", help="the DeepSpeed search instead")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, with --large or --deepspeed")
    parser.add_argument("--emulate", type=int, default=1, help="layouts to emulate in full, likewise")
    parser.add_argument("--knob", action="append", default=None, help="another small space, as of prism tune")
    parser.add_argument("--out", default="", help="directory of the search")
    args = parser.parse_args()
    if args.large and args.megatron is None:
        parser.error("--megatron or MEGATRON_LM is needed with --large")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(args.out or Path(scratch) / "tune")
        if args.large:
            os.environ["PYTHONPATH"] = str(args.megatron)
            launch = [
                str(args.megatron / "pretrain_gpt.py"), *COMMON.split(), *LOCAL.split(), *LARGE.split()
            ]  # fmt: skip
        elif args.deepspeed:
            config = out.with_name(f"{out.name}-ds.json")
            config.write_text(json.dumps(DEEPSPEED_CONFIG))
            script = Path(__file__).parent / "deepspeed" / "train_llama.py"
            launch = [str(script), "--deepspeed_config", str(config), *LLAMA_7B.split()]
        else:
            launch = [str(Path(__file__).with_name("train_gpt_megatron.py")), *SMALL.split()]
        job = parse_command([f"--prism-world-size={1024 if args.large else 64}", "--prism-emulate", *launch])
        assert job is not None
        given = () if args.large else DEEPSPEED_SPACE if args.deepspeed else SMALL_SPACE
        some = args.large or args.deepspeed
        settings = Settings(
            budget_s=args.budget if some else float("inf"),
            chosen=parse_knobs(args.knob or given),
            emulations=args.emulate,
            everything=not some,
            out=str(out),
        )
        result, directory = tune(job, settings)
        report(result, directory)
    return check_large(result) if args.large else check_small(result)


def check_large(result: TuneResult) -> int:
    """At least 500 legal layouts considered inside the budget, none left."""
    legal, left = result.counts.legal, result.counts.left
    print(
        f"{legal} legal layouts, {left} not looked at, {result.seconds:.0f} s, {result.cpu_seconds:.0f} s of CPU"
    )
    return int(legal - left < 500)


def check_small(result: TuneResult) -> int:
    """Composed against emulated."""
    both = [c for c in result.candidates if c.emulated and c.composed]
    print("composed ms  emulated ms  error   composed GiB  emulated GiB  error   bound ms  bound GiB  layout")
    above = 0
    for c in both:
        old, new = c.composed, c.emulated
        assert old is not None
        assert new is not None
        wrong = c.bound_ms > new.iteration_ms or c.bound_bytes > new.memory_bytes
        above += wrong
        print(
            f"{old.iteration_ms:11,.1f}  {new.iteration_ms:11,.1f}  {old.iteration_ms / new.iteration_ms - 1:+6.1%}  "
            f"{old.memory_bytes / _GIB:12.2f}  {new.memory_bytes / _GIB:12.2f}  {old.memory_bytes / new.memory_bytes - 1:+6.1%}  "
            f"{c.bound_ms:8,.1f}  {c.bound_bytes / _GIB:9.2f}  {describe(c.knobs)}"
            + ("  BOUND ABOVE" if wrong else "")
        )
    if len(both) < 3:
        print("too few layouts were emulated")
        return 1
    composed = np.array([c.composed.iteration_ms for c in both if c.composed])
    emulated = np.array([c.emulated.iteration_ms for c in both if c.emulated])
    rank = spearman(composed, emulated)
    best = int(composed.argmin()) == int(emulated.argmin())
    errors = np.abs(composed / emulated - 1)
    print(
        f"{len(both)} layouts: Spearman {rank:.3f}, best {'the same' if best else 'ANOTHER'}, time off by {errors.mean():.1%} "
        f"(mean), {errors.max():.1%} (most), {above} bounds above"
    )
    return int(rank < 0.95 or not best or above > 0)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties by their order."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    sys.exit(main())
