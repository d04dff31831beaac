"""A small data-parallel job with a broadcast, run for real over gloo, where it leaves its flight recorder's dumps, or emulated.

Usage: torchrun --nproc-per-node 2 real_job.py FOLDER [--more]      (--more: calls that nobody would predict)
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS, HIDDEN = 6, 64


def main(folder, more=False):
    real = not torch.cuda.is_available()
    dist.init_process_group("gloo" if real else "nccl")
    device = torch.device("cpu" if real else "cuda")
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1, bias=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        batch = torch.ones(4, HIDDEN, device=device)
        dist.broadcast(batch, 0)
        model(batch).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if more and parameter.ndim == 1:
                dist.broadcast(parameter.grad, 1)
        optimizer.step()
        optimizer.zero_grad()
    if real:
        dump = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
        with open(os.path.join(folder, f"trace_rank_{dist.get_rank()}"), "wb") as file:
            file.write(dump)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], "--more" in sys.argv)
