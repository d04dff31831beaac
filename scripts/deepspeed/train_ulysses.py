"""Train a GPT with Ulysses sequence parallelism (``deepspeed.sequence``): a plain script as a user writes it.

torchrun --nproc-per-node 8 scripts/deepspeed/train_ulysses.py --deepspeed_config scripts/deepspeed/configs/ulysses_z3.json
"""

from __future__ import annotations

import argparse

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512, help="whole sequence, before it is split")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--sp", type=int, default=8, help="ranks that share a sequence")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of some heads over the whole sequence; batch, sequence, heads, head size."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, sequence_group: dist.ProcessGroup) -> None:
        super().__init__()
        hidden = args.hidden
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.attention = DistributedAttention(attention, sequence_group, scatter_idx=2, gather_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).unbind(2)
        attended = self.attention(q.contiguous(), k.contiguous(), v.contiguous(), 0)
        x = x + self.out(attended.reshape(batch, seq, hidden))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace, sequence_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        self.blocks = nn.ModuleList(Block(args, sequence_group) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)
        self.apply(initialize)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def initialize(module: nn.Module) -> None:
    """Weights as in GPT-2."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1234)
    shape = (dist.get_world_size() // args.sp, args.sp)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data_parallel", "sequence_parallel"))
    group = mesh["sequence_parallel"].get_group()
    model = GPT(args, group)
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), mesh_param=shape
    )
    part = args.seq // args.sp
    begin = mesh["sequence_parallel"].get_local_rank() * part
    for step in range(args.steps):
        # The ranks of a sequence draw the same tokens and keep a part each.
        generator = torch.Generator().manual_seed(step * shape[0] + mesh["data_parallel"].get_local_rank())
        size = (engine.train_micro_batch_size_per_gpu(), args.seq + 1)
        tokens = torch.randint(args.vocab, size, generator=generator).to(engine.device)
        loss = engine(tokens[:, begin : begin + part], tokens[:, begin + 1 : begin + part + 1])
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
