"""Bug: ranks use the groups of their neighbours in an order that closes a ring of waits."""

import torch.distributed as dist
from planted_job import start

job = start()
pairs = [tuple(sorted((i, (i + 1) % job.world))) for i in range(job.world)]
groups = [dist.new_group(list(pair)) for pair in pairs]
mine = [i for i, pair in enumerate(pairs) if job.rank in pair]
if not job.clean:  # the pair with the next rank first, on every rank
    mine.sort(key=lambda i: i != job.rank)
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        for i in mine:
            dist.all_reduce(parameter.grad, group=groups[i])
    job.step()
