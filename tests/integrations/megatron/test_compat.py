"""What a script does around its iterations, emulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig, torch_norm

from prism_plugins.integrations.megatron import compat, moe
from prism_plugins.integrations.megatron.session import Session
from prism_plugins.world.layout import Layout
from tests.integrations.megatron.test_hooks import FakeContext


def make_config(**options) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **options)


def norm_of(config: TransformerConfig, context: FakeContext):
    new = compat._torch_norm(Session(context), torch_norm.WrappedTorchNorm.__new__, torch_norm)
    return new(torch_norm.WrappedTorchNorm, config, 8)


def test_torch_norms_are_marked_for_sequence_parallelism():
    context = FakeContext()
    norm = norm_of(make_config(tensor_model_parallel_size=2, sequence_parallel=True), context)
    assert isinstance(norm, torch.nn.LayerNorm)
    assert all(p.sequence_parallel for p in norm.parameters())
    assert context.assumptions == [
        "Apex is not installed: LayerNorm with sequence_parallel is emulated by torch's kernels"
    ]


def test_plain_torch_norms_are_megatrons_own():
    context = FakeContext()
    norm = norm_of(make_config(normalization="RMSNorm"), context)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert not context.assumptions


def test_a_slice_draws_the_samples_it_needs():
    settings = SimpleNamespace(global_batch_size=1536)
    module = SimpleNamespace(get_args=lambda: settings)
    session = Session(FakeContext())
    capped = compat._num_samples(session, lambda: (768_000_000, 5000, 1000), module)
    assert capped() == (5 * 1536, 1536, 1000)
    assert compat._num_samples(session, lambda: (100, None, 0), module)() == (100, None, 0)


def test_checkpoints_and_evaluation_are_skipped_and_said():
    context = FakeContext()
    session = Session(context)

    def never(*args, **kwargs):
        raise RuntimeError("the real one ran")

    assert compat._save_checkpoint(session, never, None)(1, None) is None
    assert compat._load_checkpoint(session, never, None)(None, None, None) == (0, 0)
    assert compat._evaluate(session, never, None)("prefix") is None
    assert len(context.assumptions) == 3


def test_indices_are_built_in_memory_and_the_configuration_stays():
    seen = []

    def build(self):
        seen.append((self.config.mock, self.config.path_to_cache, self.config.defer_npy_index_mmap))
        return "indices"

    config = SimpleNamespace(mock=False, path_to_cache="/cache", defer_npy_index_mmap=True)
    dataset = SimpleNamespace(config=config)
    assert compat._build_indices(None, build, None)(dataset) == "indices"
    assert seen == [(True, None, False)]
    assert dataset.config is config
    assert vars(config) == {"mock": False, "path_to_cache": "/cache", "defer_npy_index_mmap": True}


UNEVEN = "tokens:3,3,1,1,0,0,0,0"


@pytest.mark.parametrize(
    ("load", "sizes", "loads", "kinds"),
    [
        ("balanced", {"dp": 8, "ep": 4}, (), ()),
        ("zipf:1", {"dp": 8}, (), ()),
        (UNEVEN, {"dp": 8, "ep": 4}, (750_000, 250_000, 0, 0), (0, 1, 2, 3, 0, 1, 2, 3)),
        (
            UNEVEN,
            {"dp": 4, "cp": 2, "ep": 2, "tp": 2, "etp": 2},
            (1_000_000, 0),
            (0, 1, 0, 1, 0, 1, 0, 1),
        ),
    ],
)
def test_ranks_with_other_experts_are_of_another_kind_where_experts_are_loaded_unevenly(
    load, sizes, loads, kinds
):
    layout = Layout(world_size=8 * sizes.get("tp", 1), **sizes)
    session = Session(FakeContext())
    session.context.spec.moe_load = load
    config = SimpleNamespace(num_moe_experts=8, moe_router_topk=1)
    told = moe.expert_kinds(session, layout, config)
    assert told == (tuple((size,) for size in loads), kinds)
    assert session.context.assumptions == []


@pytest.mark.parametrize("load", ["balanced", "zipf:1.5"])
def test_experts_keep_tokens_up_to_their_capacity(load):
    wanted = moe._routing_map(load, 64, 8, 2)
    kept = moe._map_within_capacity(load, 64, 8, 2, 12, padded=False)
    assert not (kept & ~wanted).any()
    assert kept.sum(0).tolist() == wanted.sum(0).clamp(max=12).tolist()
    padded = moe._map_within_capacity(load, 64, 8, 2, 12, padded=True)
    assert padded.sum(0).tolist() == [12] * 8
    assert (padded & wanted).equal(kept)
    # A capacity of more than all tokens: every expert takes them all.
    assert moe._map_within_capacity(load, 64, 8, 2, 65, padded=True).all()


def test_sinkhorn_takes_the_rounds_it_is_told():
    from megatron.core.transformer.moe.moe_utils import sinkhorn

    cost = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
    rounds = moe._Rounds(1e-4)
    assert sinkhorn(cost, rounds).equal(sinkhorn(cost))
    assert rounds.count > 1
    # Of values that say nothing (all alike), as on a virtual device, there would be one change only.
    alike = moe._Rounds(1e-4)
    sinkhorn(torch.zeros(64, 4), alike)
    context = FakeContext()
    seen = []

    def told(cost, tol):
        seen.append(tol)
        return sinkhorn(cost, tol)

    told_hook = moe._sinkhorn(Session(context), told, None)
    told_hook(torch.zeros(64, 4))
    assert seen[-1].count == moe.sinkhorn_rounds(sinkhorn, 64, 4, 1e-4) > alike.count
    assert context.assumptions == [moe.SINKHORN]
