"""Bug: only the members make a group; new_group has to be called by every rank."""

import torch.distributed as dist
from planted_job import start

job = start()
members = list(range(job.world // 2))
group = dist.new_group(members) if job.clean or job.rank in members else None
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
        if job.rank in members:
            dist.all_reduce(parameter.grad, group=group)
    job.step()
