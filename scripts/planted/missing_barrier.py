"""Bug: rank 0 does not come to the barrier that all others wait in."""

import torch.distributed as dist
from planted_job import start

job = start()
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
    job.step()
    if job.clean or job.rank != 0:
        dist.barrier()
