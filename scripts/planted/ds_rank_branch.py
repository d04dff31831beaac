"""Bug: under ZeRO-3 one rank leaves out a layer (a branch on the rank, as for an adapter that only some ranks use), and with it
the gathers of its parameters."""

import torch
import torch.distributed as dist
from planted_deepspeed import BATCH, HIDDEN, initialize, is_clean, mlp
from torch import nn


class Model(nn.Module):
    def __init__(self, skip: bool):
        super().__init__()
        self.trunk, self.adapter, self.head = mlp(), mlp(1), nn.Linear(HIDDEN, 1)
        self.skip = skip

    def forward(self, x):
        x = self.trunk(x)
        if not self.skip:
            x = x + self.adapter(x)
        return self.head(x).float().pow(2).mean()


clean = is_clean()
engine = initialize(Model(skip=not clean and dist.get_rank() == 2), stage=3)
while engine.global_steps < 12:
    loss = engine(torch.randn(BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step()
