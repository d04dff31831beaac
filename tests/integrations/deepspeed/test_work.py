"""Tokens and model FLOPs of an iteration."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

from prism_plugins.integrations.deepspeed.work import flops_per_token, tokens_of_batch, tokens_of_iteration
from prism_plugins.world.layout import Layout

TOKENS = torch.zeros(2, 16, dtype=torch.int64)
MASK = torch.ones(2, 1, 16, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ([{"input_ids": TOKENS, "labels": TOKENS}, ()], 32),
        ([{"attention_mask": MASK, "input_ids": TOKENS}, ()], 32),
        ([{}, ({"attention_mask": MASK, "input_ids": TOKENS},)], 32),
        ([{}, (torch.zeros(2, 3, 8, 8), TOKENS[:, :4])], 8),
        ([{}, ((TOKENS, MASK),)], 32),
        ([{}, (torch.zeros(2, 3, 8, 8),)], 0),
        ([{}, ()], 0),
    ],
)
def test_tokens_of_a_batch(inputs, tokens):
    assert tokens_of_batch(inputs) == tokens


def test_tokens_of_the_job():
    # Two sequences of 16 tokens on each of 8 ranks; where 2 ranks share a sequence, each has 16 tokens of its own.
    assert tokens_of_iteration(Layout(world_size=8, dp=8, num_microbatches=3), 32) == 8 * 3 * 32
    assert tokens_of_iteration(Layout(world_size=8, dp=4, cp=2, num_microbatches=3), 32) == 8 * 3 * 32
    assert tokens_of_iteration(Layout(world_size=8, dp=4, tp=2, num_microbatches=3), 32) == 4 * 3 * 32


class Model(nn.Module):
    """64 embeddings, an MLP of 8·32 + 32·8, a head of 8·64."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.head = nn.Linear(8, 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_that_multiplies_counts_once(tied):
    assert flops_per_token(Model(tied=tied)) == 6 * (2 * 8 * 32 + 8 * 64)


def test_an_embedding_that_is_the_output_of_a_pipeline_stage_counts():
    def logits(embedding, x):
        return nn.functional.linear(x, embedding.weight)

    stage = nn.Module()
    stage.tied_modules = nn.ModuleDict({"word": nn.Embedding(64, 8)})
    stage.tied_weight_attrs = {"word": ["weight"]}
    stage.forward_funcs = [stage.tied_modules["word"]]
    assert flops_per_token(stage) == 0
    stage.forward_funcs = [functools.partial(logits, stage.tied_modules["word"])]
    assert flops_per_token(stage) == 6 * 8 * 64


def test_what_is_not_trained_costs_less():
    model = Model()
    model.up.weight.requires_grad = False
    assert flops_per_token(model) == 6 * (8 * 32 + 8 * 64) + 4 * 8 * 32


def test_shards_count_as_a_whole():
    model = Model()
    model.up.weight.ds_numel = 8 * 32  # ZeRO-3 keeps the size when it takes the values
    model.up.weight.data = torch.empty(0)
    assert flops_per_token(model) == 6 * (2 * 8 * 32 + 8 * 64)
    model = Model()
    model.down.weight.tensor_model_parallel = True
    assert flops_per_token(model, tp=4) == 6 * (8 * 32 + 4 * 32 * 8 + 8 * 64)


@pytest.mark.parametrize(("ep", "topk"), [(1, 1), (4, 2)])
def test_a_token_meets_topk_experts_wherever_they_are(ep, topk):
    layer = MoE(8, nn.Linear(8, 8, bias=False), num_experts=8, ep_size=ep, k=topk)
    gate = 8 * 8
    assert flops_per_token(layer) == 6 * (gate + topk * 8 * 8)


def test_experts_of_the_models_own():
    block = nn.Module()
    block.gate = nn.Linear(8, 4, bias=False)
    block.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    model = nn.Sequential(block)
    assert flops_per_token(model) == 0
    model.config = SimpleNamespace(num_experts_per_tok=2)
    assert flops_per_token(model) == 6 * (8 * 4 + 2 * 8 * 8)
    block.top_k = 1
    assert flops_per_token(model) == 6 * (8 * 4 + 8 * 8)
