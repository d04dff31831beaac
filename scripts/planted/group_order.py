"""Bug: odd ranks make the same groups in another order; new_group matches them by order."""

import torch.distributed as dist
from planted_job import start

job = start()
pairs = [[i, i + 1] for i in range(0, job.world, 2)]
if not job.clean and job.rank % 2:
    pairs.reverse()
groups = {tuple(ranks): dist.new_group(ranks) for ranks in pairs}
mine = groups[job.rank // 2 * 2, job.rank // 2 * 2 + 1]
for _ in range(6):
    job.backward()
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad, group=mine)
    job.step()
