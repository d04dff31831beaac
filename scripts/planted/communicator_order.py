"""Bug: two asynchronous reductions on different communicators, started in another order on some ranks."""

import torch.distributed as dist
from planted_job import start

job = start()
other = dist.new_group(list(range(job.world)))
order = [None, other] if job.clean or job.rank % 2 else [other, None]
for _ in range(6):
    job.backward()
    weight, *_ = job.model.parameters()
    works = [dist.all_reduce(weight.grad.clone(), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    job.step()
