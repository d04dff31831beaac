"""A mixture of experts as many model files have it: a list of experts, those called that got tokens; ZeRO-3."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, EXPERTS, TOPK, VOCAB, SEQUENCE = 64, 8, 2, 256, 256


class SparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        tokens = x.view(-1, HIDDEN)
        weights, chosen = torch.topk(self.gate(tokens).float().softmax(dim=1), TOPK, dim=-1)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(tokens)
        for expert in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            slot, token = torch.where(mask[expert])
            result = self.experts[expert](tokens[token]) * weights[token, slot, None]
            out.index_add_(0, token, result.to(out.dtype))
        return x + out.view(x.shape)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(SparseMoeBlock() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().view(-1, VOCAB), tokens.view(-1))


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--leaf", action="store_true")
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = Model()
if args.leaf:
    deepspeed.utils.set_z3_leaf_modules(model, [SparseMoeBlock])
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while engine.global_steps < 10:
    loss = engine(torch.randint(VOCAB, (2, SEQUENCE), device=engine.device))
    engine.backward(loss)
    engine.step()
