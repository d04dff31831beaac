"""Bug: one rank gathers where the others reduce and scatter (a flag that differs between nodes)."""

import torch
import torch.distributed as dist
from planted_job import start

job = start()
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        part = torch.empty(parameter.numel() // job.world, device="cuda")
        if not job.clean and job.rank == 1:
            dist.all_gather_into_tensor(parameter.grad.view(-1), part)
        else:
            dist.reduce_scatter_tensor(part, parameter.grad.view(-1))
    job.step()
