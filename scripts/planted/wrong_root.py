"""Bug: each pair broadcasts from its own first rank, but over the group of all ranks."""

import torch.distributed as dist
from planted_job import start

job = start()
root = 0 if job.clean else job.rank // 2 * 2
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        dist.broadcast(parameter.grad, src=root)
    job.step()
