"""Bug: a skip connection across the stages of a PipelineModule is sent by hand, and the last stage expects only half of it."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from planted_deepspeed import BATCH, HIDDEN, config, is_clean
from torch import nn

clean = is_clean()
half = dist.get_world_size() // 2
# A communicator of their own: between two ranks messages meet in the order in which they are sent, and the pipeline sends too.
pairs = [dist.new_group([rank, rank + half]) for rank in range(half)]
skips = pairs[dist.get_rank() % half]


class First(nn.Linear):
    """The first layer; sends what it was given to the last stage."""

    def forward(self, x):
        self.sent = dist.isend(x, dst=dist.get_rank() + half, group=skips)
        return super().forward(x)


class Last(nn.Linear):
    """The last layer; adds what the first one was given."""

    def forward(self, x):
        skipped = torch.empty_like(x if clean else x[: BATCH // 2])
        dist.recv(skipped, src=dist.get_rank() - half, group=skips)
        y = super().forward(x)
        return y if len(skipped) < len(y) else y + skipped


model = PipelineModule(
    layers=[
        LayerSpec(First, HIDDEN, HIDDEN),
        *(LayerSpec(nn.Linear, HIDDEN, HIDDEN) for _ in range(2)),
        LayerSpec(Last, HIDDEN, HIDDEN),
    ],
    num_stages=2,
    loss_fn=nn.MSELoss(),
    partition_method="uniform",
)
engine = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config(1, accumulation=2)
)[0]
sample = torch.randn(BATCH, HIDDEN, dtype=torch.bfloat16)
batches = iter(lambda: (sample.cuda(), sample.cuda()), None)
for _ in range(12):
    engine.train_batch(data_iter=batches)
