"""A training script that knows nothing of prism."""

import argparse
import os
import sys
import time

import fake_framework as framework
import torch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--crash-rank", type=int, default=-1)
    parser.add_argument("--crash-at", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--sleep-rank", type=int, default=-1)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} argv {sys.argv[1:]} path {sys.path[0]} name {__name__}")
    print("a warning of the script", file=sys.stderr)
    group = framework.setup(args.tp, args.pp)
    model = torch.nn.Linear(args.width, args.width, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for iteration in range(args.steps):
        if rank == args.crash_rank and iteration == args.crash_at:
            raise ValueError("a deliberate crash")
        if args.sleep_rank in (-1, rank):
            time.sleep(args.sleep)
        loss = framework.train_step(model, optimizer, torch.randn(8, args.width, device="cuda"), group)
        framework.log(iteration, loss)


if __name__ == "__main__":
    main()
