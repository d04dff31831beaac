"""Bug: ZeRO-3 gathers an expert when it is called, and each rank calls only the experts its own tokens go to."""

import deepspeed
import torch
from planted_deepspeed import BATCH, HIDDEN, initialize, is_clean
from torch import nn
from torch.nn import functional as F


class SparseMoe(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(experts))

    def forward(self, x):
        weights, chosen = torch.topk(self.gate(x).float().softmax(dim=-1), 1, dim=-1)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            slot, token = torch.where(mask[expert])
            result = self.experts[expert](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, result.to(out.dtype))
        return x + out


clean = is_clean()
model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), SparseMoe(), nn.Linear(HIDDEN, 1))
if clean:
    deepspeed.utils.set_z3_leaf_modules(model, [SparseMoe])
engine = initialize(model, stage=3)
while engine.global_steps < 12:
    loss = engine(torch.randn(64 * BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)).float().mean()
    engine.backward(loss)
    engine.step()
