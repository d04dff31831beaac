"""A pipeline whose middle stages are equal layers that halve the sequence: each is sent another shape."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

VOCAB, SEQUENCE, HIDDEN = 64, 64, 32


class Halve(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, ::2].contiguous()


class Output(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean(1)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        tokens = torch.randint(VOCAB, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return tokens, tokens[0]


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
model = PipelineModule(
    layers=[
        LayerSpec(nn.Embedding, VOCAB, HIDDEN),
        LayerSpec(Halve, HIDDEN, HIDDEN),
        LayerSpec(Halve, HIDDEN, HIDDEN),
        LayerSpec(Output, HIDDEN, VOCAB),
    ],
    num_stages=4,
    loss_fn=nn.functional.cross_entropy,
    partition_method="uniform",
)
engine, *_ = deepspeed.initialize(args=args, model=model, training_data=Tokens())
for _ in range(10):
    engine.train_batch()
