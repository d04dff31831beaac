"""Bug: one rank leaves out the gradients of the biases (a branch on the rank, as for frozen or unused parameters)."""

import torch.distributed as dist
from planted_job import start

job = start()
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        if not job.clean and job.rank == 2 and parameter.ndim == 1:
            continue
        dist.all_reduce(parameter.grad)
    job.step()
