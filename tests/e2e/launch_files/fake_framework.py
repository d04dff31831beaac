"""A training framework in a nutshell: tensor-parallel and pipeline ranks, a step, a log line."""

import os

import torch
import torch.distributed as dist


def setup(tp, pp):
    """Make the tensor-parallel group of this rank and return it."""
    dist.init_process_group("nccl")
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = None
    for first in range(0, world, tp):
        group = dist.new_group(range(first, first + tp))
        if rank in range(first, first + tp):
            mine = group
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return mine


def train_step(model, optimizer, batch, group):
    """One iteration; returns the loss."""
    loss = forward(model, batch, group)
    loss.backward()
    step(optimizer)
    return loss.detach()


def forward(model, batch, group):
    """Forward pass with a tensor-parallel all_reduce."""
    out = model(batch)
    dist.all_reduce(out.detach(), group=group)
    return out.float().square().mean()


def step(optimizer):
    """Optimizer step."""
    optimizer.step()
    optimizer.zero_grad()


def log(iteration, loss):
    """Print the training log line."""
    print(f" iteration {iteration} | loss {loss.item():.3f}", flush=True)
