"""Bug: the samples do not divide by the ranks, so some ranks have a batch more than others."""

import torch
import torch.distributed as dist
from planted_job import BATCH, HIDDEN, start
from torch.utils.data import DataLoader

job = start()
samples = torch.randn(BATCH * job.world * 6 - 1, HIDDEN)
if job.clean:
    samples = samples[: len(samples) // (job.world * BATCH) * job.world * BATCH]
for batch in DataLoader(samples[job.rank :: job.world], batch_size=BATCH, drop_last=True):
    job.backward(batch.cuda())
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
    job.step()
