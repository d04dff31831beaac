"""A small language model trained with DeepSpeed, as users write it: data-parallel, any ZeRO stage."""

import argparse
import contextlib

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, SEQUENCE = 256, 32


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float() / 8  # A fresh model's loss is close to log(VOCAB).
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--zero-init", action="store_true")
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
torch.manual_seed(1)
init = deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config) if args.zero_init else None
with init or contextlib.nullcontext():
    model = Model(args.hidden, args.layers)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = torch.Generator().manual_seed(deepspeed.comm.get_rank())
while engine.global_steps < args.steps:
    tokens, labels = torch.randint(
        VOCAB, (2, engine.train_micro_batch_size_per_gpu(), SEQUENCE), generator=data
    ).to(engine.device)
    loss = engine(tokens, labels)
    engine.backward(loss)
    engine.step()
