"""Bug: a rank stops training on a condition that only it sees."""

import torch.distributed as dist
from planted_job import start

job = start()
for step in range(12):
    job.backward()
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
    job.step()
    if not job.clean and job.rank == 1 and step == 2:
        break
