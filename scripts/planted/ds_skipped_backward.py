"""Bug: a rank whose second micro-batch has no valid token skips its backward pass "because the gradient is zero"; under ZeRO-3 the
others wait for it in the gathers and reductions of theirs."""

import torch
import torch.distributed as dist
from planted_deepspeed import BATCH, HIDDEN, initialize, is_clean, mlp

clean = is_clean()
engine = initialize(mlp(3), stage=3, accumulation=2)
for number in range(24):
    loss = engine(torch.randn(BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean()
    if clean or dist.get_rank() != 1 or number % 2 == 0:
        engine.backward(loss)
    engine.step()
