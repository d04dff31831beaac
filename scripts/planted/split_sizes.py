"""Bug: an all_to_all whose receiver expects other shares than the sender gives."""

import torch
import torch.distributed as dist
from planted_job import HIDDEN, start

job = start()
send = [8 + (job.rank == 0) * (peer == 1) for peer in range(job.world)]
recv = [8 + (job.rank == 1) * (peer == 0) for peer in range(job.world)]
if not job.clean and job.rank == 1:
    recv[0], recv[2] = recv[2], recv[0]
for _ in range(6):
    job.backward()
    source, target = (torch.empty(sum(rows), HIDDEN, device="cuda") for rows in (send, recv))
    dist.all_to_all_single(target, source, recv, send)
    job.step()
