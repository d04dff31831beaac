"""DeepSpeed's own gating functions under the load policy, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.moe import sharded_moe
from deepspeed.moe import utils as moe_utils
from deepspeed.moe.layer import MoE

from prism_plugins.errors import PrismError
from prism_plugins.integrations.deepspeed import moe
from prism_plugins.moe_load import expert_counts
from prism_plugins.slice_env import HASH_SEED_CHOSEN

TOKENS, EXPERTS = 48, 8
LOADS = ("balanced", "zipf:1", "tokens:9,0,0,1,1,1,1,1")


class FakeContext:
    def __init__(self, load: str = "balanced") -> None:
        self.spec = SimpleNamespace(moe_load=load, real_ranks=())
        self.assumptions: list[str] = []

    def assume(self, text: str) -> None:
        self.assumptions.append(text)


def gate(topk: int, load: str, **options):
    """(result of the hooked gating function, context) for random logits."""
    name = {1: "top1gating", 2: "top2gating"}.get(topk, "topkgating")
    hook = next(h for h in moe.HOOKS if h.attribute == name)
    session = SimpleNamespace(context=FakeContext(load))
    wrapped = hook.wrap(session, getattr(sharded_moe, name), sharded_moe)
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(topk))
    first = (logits,) if topk <= 2 else (logits, topk)
    return wrapped(*first, 1.0, 4, **options), session.context


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_capacity_without_dropping_is_the_largest_load(topk, load):
    (_, capacity, num_experts, experts, places, _, counts), context = gate(
        topk, load, drop_tokens=False, sparse_routes=True
    )
    expected = expert_counts(load, TOKENS, EXPERTS, topk)
    assert num_experts == EXPERTS
    assert counts.tolist() == expected.tolist()
    assert int(capacity) == expected.max()
    assert np.bincount(experts.numpy().ravel(), minlength=EXPERTS).tolist() == expected.tolist()
    # Every token has a place of its own in its expert's buffer.
    assert len(set(zip(experts.ravel().tolist(), places.ravel().tolist(), strict=True))) == TOKENS * topk
    assert int(places.max()) < int(capacity)
    assert any("experts are" in line for line in context.assumptions)


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_the_dense_form_has_the_same_counts(topk):
    (_, weights, mask, counts), _ = gate(topk, "zipf:1", drop_tokens=False)
    expected = expert_counts("zipf:1", TOKENS, EXPERTS, topk)
    assert counts.tolist() == expected.tolist()
    assert weights.shape == mask.shape == (TOKENS, EXPERTS, expected.max())
    assert mask.sum(dim=(0, 2)).tolist() == expected.tolist()


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_capacity_with_dropping_is_deepspeeds_own(topk):
    (_, capacity, _, experts, _, _, counts), _ = gate(topk, "zipf:2", sparse_routes=True)
    assert int(capacity) == TOKENS * topk // EXPERTS
    assert counts.tolist() == expert_counts("zipf:2", TOKENS, EXPERTS, topk).tolist()
    kept = np.bincount(experts[experts >= 0].numpy(), minlength=EXPERTS)
    assert kept.tolist() == np.minimum(counts.numpy(), int(capacity)).tolist()


def test_a_histogram_of_another_number_of_experts_is_refused():
    with pytest.raises(PrismError, match="the histogram has 3 experts, a layer of the model has 8"):
        gate(1, "tokens:1,2,3")


def test_a_gate_that_counts_otherwise_is_refused():
    hook = next(h for h in moe.HOOKS if h.attribute == "top1gating")

    def top1gating(logits, k=1):
        return logits.argmax(dim=1).bincount()

    session = SimpleNamespace(context=FakeContext())
    with pytest.raises(PrismError, match="counts the tokens of experts in a way prism does not know"):
        hook.wrap(session, top1gating, sharded_moe)(torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("sizes", "world_size", "chosen", "found"),
    [
        ((2, 4), 8, True, True),
        ((2, 4), 8, False, False),
        ((2, 4), 4, True, False),  # nobody shares experts of groups as large as the world
        ((4,), 8, True, False),
    ],
)
def test_groups_of_several_sizes_have_an_order_only_with_a_hash_seed(
    monkeypatch, sizes, world_size, chosen, found
):
    monkeypatch.delenv(HASH_SEED_CHOSEN, raising=False)
    if chosen:
        monkeypatch.setenv(HASH_SEED_CHOSEN, "1")
    layers = [MoE(4, torch.nn.Linear(4, 4), num_experts=4, ep_size=size) for size in sizes]
    params = [param for layer in layers for param in layer.parameters()]
    hook = next(h for h in moe.HOOKS if h.module == "deepspeed.moe.utils")
    findings = []
    spec = SimpleNamespace(world_size=world_size)
    session = SimpleNamespace(context=SimpleNamespace(finding=findings.append, spec=spec))
    split = hook.wrap(session, getattr(moe_utils, hook.attribute), moe_utils)
    assert len(split({"params": params, "name": "all"})) == 1 + len(sizes)
    assert [f.severity for f in findings] == ["error"] * found
    assert all("groups ep_size_2, ep_size_4 are in the order" in f.message for f in findings)


def test_tutel():
    hook = next(h for h in moe.HOOKS if h.attribute == "MOELayer.__init__")
    session = SimpleNamespace(context=FakeContext())
    given = []

    def init(self, *args, use_tutel=False):
        given.append(use_tutel)

    hook.wrap(session, init, SimpleNamespace(TUTEL_INSTALLED=False))(None, use_tutel=True)
    assert given == [True]
    assert session.context.assumptions == [moe.NO_TUTEL]
    with pytest.raises(PrismError, match="use_tutel is not emulated"):
        hook.wrap(session, init, SimpleNamespace(TUTEL_INSTALLED=True))(None, use_tutel=True)


def test_auto_ep_is_refused():
    from deepspeed.module_inject import auto_ep_config

    hook = next(h for h in moe.HOOKS if h.attribute == "parse_autoep_config")
    session = SimpleNamespace(context=FakeContext())
    parse = hook.wrap(session, auto_ep_config.parse_autoep_config, auto_ep_config)
    assert not parse({"enabled": False}).enabled
    with pytest.raises(PrismError, match=r"expert_parallel \(AutoEP\) is not emulated"):
        parse({"enabled": True, "autoep_size": 2})
