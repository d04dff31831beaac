"""Bug: samples are dealt out by hand without drop_last, so the last batch exists on some ranks only; ZeRO-3 hangs there."""

import torch
import torch.distributed as dist
from planted_deepspeed import BATCH, HIDDEN, initialize, is_clean, mlp
from torch.utils.data import DataLoader

clean = is_clean()
engine = initialize(mlp(), stage=3)
rank, world = dist.get_rank(), dist.get_world_size()
samples = torch.randn(BATCH * world * 12 + 1, HIDDEN, dtype=torch.bfloat16)
if clean:
    samples = samples[: len(samples) // (world * BATCH) * world * BATCH]
for batch in DataLoader(samples[rank::world], batch_size=BATCH):
    loss = engine(batch.to(engine.device)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
