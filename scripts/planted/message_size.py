"""Bug: a pipeline stage expects a smaller message than the one before it sends."""

import torch
import torch.distributed as dist
from planted_job import BATCH, HIDDEN, start

job = start()
rows = BATCH if job.clean else BATCH // 2
for _ in range(6):
    if job.rank > 0:
        dist.recv(torch.empty(rows, HIDDEN, device="cuda"), job.rank - 1)
    job.backward()
    if job.rank + 1 < job.world:
        dist.send(torch.empty(BATCH, HIDDEN, device="cuda"), job.rank + 1)
    job.step()
