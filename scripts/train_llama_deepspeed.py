#!/usr/bin/env python3
"""A Llama-like model trained with DeepSpeed on random tokens; needs torch and deepspeed only.

    torchrun --nproc-per-node 1 scripts/train_llama_deepspeed.py --deepspeed_config ds.json

Prints the time of every step. With ``--memory-json`` it writes torch's memory statistics of the last steps.
"""

import argparse
import contextlib
import json
import time

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WARMUP_STEPS = 4


class Block(nn.Module):
    def __init__(self, hidden, intermediate, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x, cos, sin):
    """Rotary position embedding."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.checkpointing = args.checkpointing
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.blocks = nn.ModuleList(
            Block(args.hidden, args.intermediate, args.heads) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)
        angles = torch.outer(
            torch.arange(args.sequence), 10000 ** -torch.arange(0, 1, 2 * args.heads / args.hidden)
        )
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1))
        self.register_buffer("sin", torch.cat((angles.sin(), angles.sin()), -1))

    def forward(self, tokens):
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5504)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--zero-init", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--client-optimizer", action="store_true", help="a torch.optim.AdamW of the script's")
    parser.add_argument("--memory-json", help="write memory statistics to this file")
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    init = deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config) if args.zero_init else None
    with init or contextlib.nullcontext():
        model = Llama(args)
    if args.client_optimizer:
        own = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)}
    else:
        own = {"model_parameters": model.parameters()}
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, **own)
    for step in range(args.steps):
        if step == WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(
                args.vocab, (engine.train_micro_batch_size_per_gpu(), args.sequence), device=engine.device
            )
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        value = loss.item()  # Waits for the device.
        print(f"step {step} ms {1000 * (time.perf_counter() - began):.2f} loss {value:.4f}", flush=True)
    if args.memory_json:
        with open(args.memory_json, "w") as file:
            json.dump(memory(), file)


def memory():
    """Bytes, as torch's allocator and the driver count them."""
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    keys = (
        "allocated_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.peak",
        "active_bytes.all.peak", "requested_bytes.all.peak", "num_alloc_retries",
    )  # fmt: skip
    return {**{key: stats[key] for key in keys}, "used_bytes": total - free, "total_bytes": total}


if __name__ == "__main__":
    main()
