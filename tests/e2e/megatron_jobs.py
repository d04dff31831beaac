"""Small Megatron jobs for the end-to-end tests: how to run one rank of them as a slice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.moe_load import BALANCED
from prism_plugins.program.model import Phase, Program
from prism_plugins.program.slices import JobFacts, SliceReport, SliceSpec
from prism_plugins.program.store import load_program
from prism_plugins.slice_env import slice_environment

ROOT = Path(__file__).parents[2]
CORE_SCRIPT = ROOT / "scripts" / "train_gpt_megatron.py"
MEGATRON_LM = Path(os.environ.get("MEGATRON_LM", "/nowhere"))
"""A checkout of Megatron-LM (core_r0.16.0); tests that need it are skipped without."""

CORE_SIZES = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --vocab-size 256"
    " --micro-batch-size 1"
)
TRAINING_SIZES = (
    "--use-mcore-models --transformer-impl local --mock-data --tokenizer-type NullTokenizer --vocab-size 1003"
    " --bf16 --train-iters 20 --log-interval 1 --eval-iters 1 --eval-interval 1000 --lr 1e-4 --lr-decay-style constant"
    " --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
    " --attention-backend unfused --disable-bias-linear --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --swiglu"
    " --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --log-throughput --split 99,1,0"
)


class SliceResult(msgspec.Struct, kw_only=True):
    """What one slice left behind."""

    report: SliceReport
    output: str
    program: Program | None

    @property
    def facts(self) -> JobFacts:
        """The facts it reported."""
        assert self.report.facts is not None, self.output
        return self.report.facts

    def phases(self) -> tuple[Phase, ...]:
        """The phases of the recorded iteration, in order."""
        assert self.program is not None, self.output
        return tuple(phase for phase, _, _ in self.program.iter_phases())


def run_slice(
    folder: Path,
    script: Path,
    arguments: str,
    *,
    rank: int,
    world_size: int,
    journals: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
    moe_load: str = BALANCED,
) -> SliceResult:
    """Run one rank in ``folder/<rank>`` and read what it wrote."""
    slice_dir = folder / str(rank)
    slice_dir.mkdir(parents=True)
    spec = SliceSpec(
        rank=rank,
        world_size=world_size,
        gpus_per_node=8,
        argv=(str(script), *arguments.split()),
        gpu=load_cluster("dgx-h100").gpu_facts(),
        slice_dir=str(slice_dir),
        journals=tuple(str(path) for path in journals),
        iterations=5,
        moe_load=moe_load,
    )
    path = slice_dir / "spec.json"
    path.write_bytes(msgspec.json.encode(spec))
    done = subprocess.run(
        [sys.executable, "-m", "prism_plugins.slice", str(path)],
        env={
            **slice_environment(spec),
            "PYTHONPATH": str(MEGATRON_LM),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    report = msgspec.json.decode((slice_dir / "report.json").read_bytes(), type=SliceReport)
    program = load_program(slice_dir / "program.npz") if report.status == "ok" else None
    output = f"{done.stdout[-2000:]}\n{report.traceback}"
    return SliceResult(report=report, output=output, program=program)
