"""What the memory of a DeepSpeed engine is for, in recorded programs."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from prism_plugins.program.model import EventKind, Program, category_of_flag
from tests.e2e.megatron_jobs import run_slice

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed and the virtual device, which needs a compiler",
)

SCRIPT = Path(__file__).parents[2] / "e2e" / "deepspeed_scripts" / "train.py"
NUM_PARAMETERS = (
    256 * 64 * 2 + 2 * 64 + 2 * (4 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 2 * 256 * 64 + 256 + 64)
)
BUCKET = 30_000


def recorded(folder: Path, zero: dict) -> Program:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": BUCKET, **zero},
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    result = run_slice(folder, SCRIPT, f"--deepspeed_config {path}", rank=0, world_size=4)
    assert result.program is not None, result.output
    return result.program


def live_at_start(program: Program) -> Counter[str]:
    """Bytes by category."""
    totals: Counter[str] = Counter()
    for allocation in program.initial:
        totals[allocation.category] += allocation.nbytes
    return totals


def made(program: Program) -> Counter[tuple[str | None, int]]:
    """How many allocations of each category and size an iteration makes."""
    rows = program.events[program.events["kind"] == EventKind.ALLOC]
    return Counter((category_of_flag(int(row["flags"])), int(row["value"])) for row in rows)


def test_zero_1(tmp_path: Path) -> None:
    program = recorded(tmp_path, {"stage": 1})
    live = live_at_start(program)
    assert live["parameters"] == 2 * NUM_PARAMETERS
    assert live["optimizer_state"] == 12 * NUM_PARAMETERS // 4
    of_iteration = made(program)
    assert of_iteration["communication_buffers", 2 * BUCKET] == 1
    gradients = sum(
        size * count for (category, size), count in of_iteration.items() if category == "gradients"
    )
    assert gradients >= 2 * NUM_PARAMETERS


def test_zero_3(tmp_path: Path) -> None:
    program = recorded(tmp_path, {"stage": 3, "stage3_param_persistence_threshold": 0})
    live = live_at_start(program)
    assert live["optimizer_state"] == 12 * NUM_PARAMETERS // 4
    assert live["gradients"] >= 2 * NUM_PARAMETERS // 4
    assert live["communication_buffers"] == 2 * BUCKET
    whole = {size for (category, size), _ in made(program).items() if category == "parameters"}
    assert 2 * 256 * 64 in whole  # a weight, gathered
