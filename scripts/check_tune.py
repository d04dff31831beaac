#!/usr/bin/env python3
"""Check the layout search against full emulation of the layouts it composed.

    python scripts/check_tune.py [--out DIR]                     a small GPT on 64 H100, all of its 12 layouts emulated
    python scripts/check_tune.py --case 175b --megatron PATH     GPT-3 175B on 1024 H100, timed
    python scripts/check_tune.py --case moe --megatron PATH      8x7B experts on 256 H100
    python scripts/check_tune.py --case long --megatron PATH     8B with sequences of 32k on 64 H100, Transformer Engine
    python scripts/check_tune.py --case deepspeed                Llama 7B on 64 H100 with DeepSpeed

All but the first emulate the best --emulate layouts and the launch's own. Prints composed against emulated times and memory,
their rank correlation, and whether a bound was above an emulation. Exits 1 unless the best is the same, Spearman is at least
0.95, no bound is above, and of 175B at least 500 layouts were looked at. With --out an earlier start goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from check_megatron_launches import COMMON, LOCAL, OVERLAP, SIZE_8X7B, SIZE_175B, SIZE_LLAMA3_8B

from prism_plugins.cli_tune import parse_knobs, report, tune
from prism_plugins.options import parse_command
from prism_plugins.tune.result import TuneResult, describe
from prism_plugins.tune.settings import Settings

SMALL = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048"
    " --vocab-size 50304 --global-batch-size 64 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch of ``pretrain_gpt.py``, and the part of its space that is searched."""

    world_size: int
    args: str
    knobs: tuple[str, ...] = ()


CASES = {
    "175b": Case(
        world_size=1024,
        args=f"{LOCAL} {SIZE_175B} {OVERLAP} --global-batch-size 1536 --tensor-model-parallel-size 8"
        " --sequence-parallel --pipeline-model-parallel-size 16",
    ),
    "moe": Case(
        world_size=256,
        args=f"{LOCAL} {SIZE_8X7B} {OVERLAP} --global-batch-size 1024 --tensor-model-parallel-size 4"
        " --sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 8"
        " --expert-tensor-parallel-size 1",
        knobs=(
            "tp=1,2,4",
            "ep=4,8",
            "etp=1",
            "pp=1,2,4,8",
            "vpp=1,2",
            "micro_batch=1,2",
            "stages=even",
            "recompute=none",
            "optimizer=distributed+overlap",
            "order=dp-pp",
        ),
    ),
    "long": Case(
        world_size=64,
        args=f"{SIZE_LLAMA3_8B} {OVERLAP} --seq-length 32768 --max-position-embeddings 32768"
        " --global-batch-size 64 --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 2",
        knobs=(
            "tp=2,4,8",
            "cp=1,2,4",
            "pp=1,2,4",
            "vpp=1",
            "micro_batch=1",
            "stages=even",
            "recompute=none,full",
            "optimizer=distributed+overlap",
            "order=dp-pp",
        ),
    ),
}
SMALL_SPACE = ("tp=2,8", "pp=1,4", "vpp=1,2", "micro_batch=1,2", "optimizer=plain", "stages=even")
LLAMA_7B = "--layers 32 --hidden 4096 --ffn 11008 --heads 32 --seq 2048 --vocab 32000 --checkpointing"
DEEPSPEED_SPACE = ("bucket=500000000", "micro_batch=1,2,4", "overlap=true")
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
    parser.add_argument("--case", choices=("small", *CASES, "deepspeed"), default="small")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds; 0: none, 300 for 175b")
    parser.add_argument(
        "--emulate",
        type=int,
        default=1,
        help="layouts to emulate in full besides the own one (not small: all)",
    )
    parser.add_argument("--knob", action="append", default=None, help="another small space, as of prism tune")
    parser.add_argument("--out", default="", help="directory of the search")
    args = parser.parse_args()
    case = CASES.get(args.case)
    if case is not None and args.megatron is None:
        parser.error(f"--megatron or MEGATRON_LM is needed for --case {args.case}")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(args.out or Path(scratch) / "tune")
        if case is not None:
            os.environ["PYTHONPATH"] = str(args.megatron)
            launch = [str(args.megatron / "pretrain_gpt.py"), *COMMON.split(), *case.args.split()]
        elif args.case == "deepspeed":
            config = out.with_name(f"{out.name}-ds.json")
            config.write_text(json.dumps(DEEPSPEED_CONFIG))
            script = Path(__file__).parent / "deepspeed" / "train_llama.py"
            launch = [str(script), "--deepspeed_config", str(config), *LLAMA_7B.split()]
        else:
            launch = [str(Path(__file__).with_name("train_gpt_megatron.py")), *SMALL.split()]
        world = case.world_size if case is not None else 64
        job = parse_command([f"--prism-world-size={world}", "--prism-emulate", *launch])
        assert job is not None
        given = {"small": SMALL_SPACE, "deepspeed": DEEPSPEED_SPACE}.get(
            args.case, case.knobs if case else ()
        )
        settings = Settings(
            budget_s=args.budget or (300.0 if args.case == "175b" else float("inf")),
            chosen=parse_knobs(args.knob or given),
            emulations=args.emulate,
            everything=args.case == "small",
            out=str(out),
        )
        result, directory = tune(job, settings)
        report(result, directory)
    wrong = compare(result, least=3 if args.case == "small" else 1)
    return max(wrong, check_considered(result)) if args.case == "175b" else wrong


def check_considered(result: TuneResult) -> int:
    """At least 500 legal layouts considered inside the budget, none left."""
    legal, left = result.counts.legal, result.counts.left
    print(
        f"{legal} legal layouts, {left} not looked at, {result.seconds:.0f} s, {result.cpu_seconds:.0f} s of CPU"
    )
    return int(legal - left < 500)


def compare(result: TuneResult, *, least: int) -> int:
    """Composed against emulated."""
    found = [*result.candidates, *([result.own] if result.own else [])]
    both = list({describe(c.knobs): c for c in found if c.emulated and c.composed}.values())
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
    if len(both) < least:
        print("too few layouts were emulated")
        return 1
    composed = np.array([c.composed.iteration_ms for c in both if c.composed])
    emulated = np.array([c.emulated.iteration_ms for c in both if c.emulated])
    rank = spearman(composed, emulated) if len(both) > 2 else 1.0
    best = int(composed.argmin()) == int(emulated.argmin())
    errors = np.abs(composed / emulated - 1)
    print(
        f"{len(both)} layouts: Spearman {f'{rank:.3f}' if len(both) > 2 else 'of too few'}, best {'the same' if best else 'ANOTHER'}, time off by {errors.mean():.1%} "
        f"(mean), {errors.max():.1%} (most), {above} bounds above"
    )
    return int(rank < 0.95 or not best or above > 0)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties by their order."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    sys.exit(main())
