"""Mixture-of-experts blocks of the model's own, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

from prism_plugins.integrations.deepspeed.routed_blocks import find_blocks, route_blocks
from prism_plugins.moe_load import expert_counts

HIDDEN, EXPERTS, TOPK, TOKENS = 8, 4, 2, 24


class Expert(nn.Linear):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.given: list[int] = []

    def forward(self, x):
        self.given.append(len(x))
        return super().forward(x)


class SparseMoeBlock(nn.Module):
    """As in transformers before version 5; ``every``: experts without tokens are called as well."""

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.every = every
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def choose(self, x):
        return torch.topk(self.gate(x).softmax(dim=1), TOPK, dim=-1)

    def forward(self, x):
        weights, chosen = self.choose(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        hit = range(EXPERTS) if self.every else mask.sum(dim=(-1, -2)).nonzero().flatten().tolist()
        out = torch.zeros_like(x)
        for expert in hit:
            slot, token = torch.where(mask[expert])
            out.index_add_(0, token, self.experts[expert](x[token]) * weights[token, slot, None])
        return out


class MethodBlock(SparseMoeBlock):
    def choose(self, x):
        return self.gate(x).softmax(dim=1).topk(TOPK, dim=1)


class SigmoidBlock(SparseMoeBlock):
    """Chooses in a way that is not known."""

    def choose(self, x):
        order = self.gate(x).sigmoid().sort(dim=1, descending=True)
        return order.values[:, :TOPK], order.indices[:, :TOPK]


def job(block, *, load: str = "balanced", zero3: bool = False):
    """(model, findings, assumptions) of an engine that trains the block."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), block)
    if zero3:
        for param in model.parameters():
            param.ds_tensor = param.data
    findings, assumptions = [], []
    context = SimpleNamespace(
        spec=SimpleNamespace(device="cpu", moe_load=load), finding=findings.append, assume=assumptions.append
    )
    engine = SimpleNamespace(module=model, zero_optimization_partition_weights=lambda: zero3)
    route_blocks(SimpleNamespace(context=context), engine)
    return model, findings, assumptions


@pytest.mark.parametrize("load", ["balanced", "zipf:1.5", "tokens:1,1,0,0"])
@pytest.mark.parametrize("block", [SparseMoeBlock, MethodBlock])
def test_experts_get_what_the_policy_says(block, load):
    model, findings, assumptions = job(block(), load=load)
    model(torch.randn(TOKENS, HIDDEN)).sum().backward()
    given = [sum(expert.given) for expert in model[1].experts]
    assert given == expert_counts(load, TOKENS, EXPERTS, TOPK).tolist()
    assert findings == []
    assert any("experts are" in line for line in assumptions)


def test_an_unknown_router_is_said():
    model, _, assumptions = job(SigmoidBlock(), zero3=True)
    model(torch.randn(TOKENS, HIDDEN))
    assert assumptions == [
        "1 chooses among 4 experts in a way that is not known: what they are given follows synthesized values"
    ]


def test_gathering_only_the_experts_with_tokens_is_found_under_zero3():
    model, findings, _ = job(SparseMoeBlock(), zero3=True)
    for _ in range(2):
        model(torch.randn(TOKENS, HIDDEN))
    (finding,) = findings
    assert (finding.kind, finding.severity) == ("hang", "error")
    assert finding.message.startswith("1 (SparseMoeBlock) calls only the experts that got tokens")
    assert "set_z3_leaf_modules(model, [SparseMoeBlock])" in finding.message
    # Only the first call was a trial.
    assert model[1].experts[-1].given == [TOKENS * TOPK // EXPERTS]


@pytest.mark.parametrize("why", ["a leaf module", "a leaf around it", "every expert is called", "ZeRO-2"])
def test_blocks_that_gather_alike_are_not_found(why):
    block = SparseMoeBlock(every=why == "every expert is called")
    if why == "a leaf module":
        set_z3_leaf_modules(block, [SparseMoeBlock])
    model, findings, _ = job(block, zero3=why != "ZeRO-2")
    if why == "a leaf around it":
        model, findings, _ = job_with_leaf_model()
    model(torch.randn(TOKENS, HIDDEN))
    assert findings == []


def job_with_leaf_model():
    outer = nn.Sequential(SparseMoeBlock())
    set_z3_leaf_modules(outer, [nn.Sequential])
    return job(outer, zero3=True)


def test_which_modules_are_blocks():
    one_module = nn.Module()
    one_module.experts = nn.Linear(HIDDEN, HIDDEN)
    one_module.experts.num_experts = 8
    plain = nn.Module()
    plain.experts = nn.Linear(HIDDEN, HIDDEN)
    model = nn.ModuleDict(
        {
            "listed": SparseMoeBlock(),
            "one_module": one_module,
            "plain": plain,
            "deepspeeds": MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_experts=4),
        }
    )
    assert [(name, number) for name, _, number in find_blocks(model)] == [("listed", 4), ("one_module", 8)]
