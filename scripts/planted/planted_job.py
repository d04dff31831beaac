"""What the planted scripts share: a small model on every rank of a plain torch.distributed job."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

HIDDEN, BATCH = 256, 16


@dataclass
class PlantedJob:
    rank: int
    world: int
    clean: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self, batch: torch.Tensor | None = None) -> None:
        """One forward and backward pass."""
        if batch is None:
            batch = torch.randn(BATCH, HIDDEN, device="cuda")
        self.model(batch).pow(2).mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def start() -> PlantedJob:
    """Parse ``--clean``, join the job, build model and optimizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clean", action="store_true", help="without the bug")
    clean = parser.parse_args().clean
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    return PlantedJob(dist.get_rank(), dist.get_world_size(), clean, model, optimizer)
