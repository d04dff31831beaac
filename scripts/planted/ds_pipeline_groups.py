"""Bug: an option that differs between nodes orders the axes of the topology, so half of the ranks build the groups of a PipelineModule
in another order than the rest."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from planted_deepspeed import BATCH, HIDDEN, config, is_clean
from torch import nn

clean = is_clean()
data_first = not clean and dist.get_rank() >= 2
topology = ProcessTopology(axes=["data", "pipe"] if data_first else ["pipe", "data"], dims=[2, 2])
model = PipelineModule(
    layers=[LayerSpec(nn.Linear, HIDDEN, HIDDEN) for _ in range(4)],
    topology=topology,
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
