"""What the planted DeepSpeed scripts share: a small model, a configuration, the flag that leaves the bug out."""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from torch import nn

HIDDEN, BATCH = 64, 4


def is_clean() -> bool:
    """Parse ``--clean`` and join the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clean", action="store_true", help="without the bug")
    parser.add_argument("--local_rank", type=int, default=-1)
    clean = parser.parse_args().clean
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    torch.manual_seed(1)
    return clean


def config(stage: int, *, accumulation: int = 1) -> dict:
    """A DeepSpeed configuration of this ZeRO stage."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def mlp(layers: int = 2) -> nn.Sequential:
    """A few linear layers."""
    return nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)))


def initialize(model: nn.Module, stage: int, *, accumulation: int = 1):
    """The engine of a model."""
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, accumulation=accumulation)
    )[0]
