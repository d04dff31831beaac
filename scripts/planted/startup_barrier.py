"""Bug: rank 0 prepares the data and forgets the barrier behind it, before training begins."""

import torch.distributed as dist
from planted_job import start

job = start()
if job.clean or job.rank != 0:
    dist.barrier()
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
    job.step()
