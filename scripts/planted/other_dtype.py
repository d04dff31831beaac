"""Bug: one rank reduces its gradients in another precision."""

import torch
import torch.distributed as dist
from planted_job import start

job = start()
dtype = torch.bfloat16 if not job.clean and job.rank == 3 else torch.float32
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad.to(dtype))
    job.step()
