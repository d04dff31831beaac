"""Layouts from DeepSpeed's own topologies and groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed.utils import groups
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_plugins.integrations.deepspeed.layout import make_layout
from prism_plugins.program.instantiate import Instantiator, fit_group
from prism_plugins.program.model import GroupInfo, Program
from tests.world.programs import program_with_groups


def engine(topology=None, *, tp=1):
    grid = None if topology is None else SimpleNamespace(_topo=topology)
    return SimpleNamespace(grid=grid, autotp_size=lambda: tp, gradient_accumulation_steps=lambda: 4)


@pytest.fixture
def job(monkeypatch):
    """Set up the groups that a job has."""

    def set_up(*, sp: int = 1, mp: int = 1, experts=()):
        monkeypatch.setattr(groups, "_get_sequence_parallel_world_size", lambda: sp)
        monkeypatch.setattr(groups, "_get_model_parallel_world_size", lambda: mp)
        monkeypatch.setattr(
            groups, "_EXPERT_PARALLEL_GROUP_RANKS", {f"ep_size_{len(ranks)}": ranks for ranks in experts}
        )

    return set_up


def sizes(layout):
    return {
        name: getattr(layout, name)
        for name in ("tp", "cp", "ep", "etp", "pp", "dp")
        if getattr(layout, name) > 1
    }


def is_group(layout, ranks) -> bool:
    """Whether whole axes of the layout make up a group of rank 0."""
    fit = fit_group(layout, GroupInfo(name="g", ranks=tuple(ranks), backend="nccl", desc=""), 0)
    return fit is not None and fit.whole


def test_data_parallel(job):
    job()
    layout = make_layout(64, engine())
    layout.validate()
    assert sizes(layout) == {"dp": 64}
    assert layout.num_microbatches == 4


def test_sequence_parallel_ranks_are_neighbours(job):
    job(sp=8)
    layout = make_layout(64, engine())
    assert sizes(layout) == {"cp": 8, "dp": 8}
    assert is_group(layout, range(8))
    assert is_group(layout, range(0, 64, 8))


@pytest.mark.parametrize("how", ["AutoTP", "the user's mpu"])
def test_tensor_parallel_ranks_are_neighbours(job, how):
    job(mp=4 if how == "the user's mpu" else 1)
    layout = make_layout(64, engine(tp=4 if how == "AutoTP" else 1))
    assert sizes(layout) == {"tp": 4, "dp": 16}
    assert is_group(layout, range(4))


def test_pipelines(job):
    job()
    layout = make_layout(16, engine(PipeDataParallelTopology(num_pp=4, num_dp=4)))
    assert sizes(layout) == {"pp": 4, "dp": 4}
    assert is_group(layout, range(4))
    layout = make_layout(16, engine(PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=2)))
    assert sizes(layout) == {"tp": 2, "pp": 4, "dp": 2}
    assert is_group(layout, range(2))
    assert is_group(layout, (0, 2))


def test_experts_of_several_sizes(job):
    job(experts=[range(2), range(8)])
    layout = make_layout(64, engine())
    layout.validate()
    assert sizes(layout) == {"ep": 8, "dp": 64}
    assert is_group(layout, range(8))
    assert is_group(layout, range(0, 64, 8))


def test_experts_across_data_parallel_blocks(job):
    # use_data_before_expert_parallel: expert-parallel ranks are far apart.
    job(experts=[range(0, 64, 8)])
    layout = make_layout(64, engine())
    layout.validate()
    assert sizes(layout) == {"ep": 8, "dp": 64}
    assert is_group(layout, range(0, 64, 8))
    assert is_group(layout, range(8))


def test_experts_beside_tensor_parallel_ranks(job):
    job(mp=2, experts=[range(0, 8, 2)])
    layout = make_layout(16, engine())
    layout.validate()
    assert sizes(layout) == {"tp": 2, "ep": 4, "etp": 2, "dp": 8}
    assert is_group(layout, range(0, 8, 2))


def test_experts_in_a_pipeline(job):
    job(experts=[range(4)])
    layout = make_layout(32, engine(PipeDataParallelTopology(num_pp=2, num_dp=16)))
    layout.validate()
    assert sizes(layout) == {"pp": 2, "ep": 4, "dp": 16}
    assert is_group(layout, range(4))
    assert is_group(layout, range(0, 16, 4))


# --- groups of any rank, inferred from another's, are those that DeepSpeed itself makes ---


def program_on(rank: int, ranks_of_groups) -> Program:
    groups = [GroupInfo(ranks=tuple(ranks), name=f"g{i}") for i, ranks in enumerate(ranks_of_groups)]
    return program_with_groups(rank, groups)


def own(lists, rank: int) -> list[tuple[int, ...]]:
    return [tuple(ranks) for ranks in lists if rank in ranks]


@settings(max_examples=60, deadline=None)
@given(
    dims=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)),
    axes=st.permutations(["pipe", "data", "model"]),
    data=st.data(),
)
def test_groups_of_a_pipeline_are_those_of_the_topology(dims, axes, data):
    size = dict(zip(("pipe", "data", "model"), dims, strict=True))
    topology = ProcessTopology(axes=axes, dims=[size[axis] for axis in axes])
    world = topology.world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_get_sequence_parallel_world_size", lambda: 1)
        patch.setattr(groups, "_EXPERT_PARALLEL_GROUP_RANKS", {})
        layout = make_layout(world, engine(topology))
    layout.validate()
    source, target = (data.draw(st.integers(0, world - 1)) for _ in range(2))
    lists = [topology.get_axis_comm_lists(axis) for axis in axes]
    # The ranks of one replica (the grid's model-parallel group), and of one stage.
    lists += [[topology.get_axis_list(a, i) for i in range(size[a])] for a in ("data", "pipe")]
    groups_of = [(own(each, source), own(each, target)) for each in lists]
    made = Instantiator(
        program_on(source, [ranks for mine, _ in groups_of for ranks in mine]), layout
    ).program_of(target)
    assert [group.ranks for group in made.groups] == [ranks for _, its in groups_of for ranks in its]


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 3]),
    ep=st.sampled_from([1, 2, 4]),
    edp=st.integers(1, 4),
    pp=st.sampled_from([1, 2]),
    data_first=st.booleans(),
    data=st.data(),
)
def test_groups_of_experts_are_those_deepspeed_makes(tp, ep, edp, pp, data_first, data):
    world = tp * ep * edp * pp
    expert, expert_data = groups._get_expert_parallel_ranks(world, tp, ep, pp, data_first)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=ep * edp) if pp > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_get_sequence_parallel_world_size", lambda: 1)
        patch.setattr(groups, "_get_model_parallel_world_size", lambda: tp)
        patch.setattr(groups, "_EXPERT_PARALLEL_GROUP_RANKS", {f"ep_size_{ep}": own(expert, 0)[0]})
        layout = make_layout(world, engine(topology))
    layout.validate()
    source, target = (data.draw(st.integers(0, world - 1)) for _ in range(2))
    mine = [*own(expert, source), *own(expert_data, source)]
    made = Instantiator(program_on(source, mine), layout).program_of(target)
    assert [group.ranks for group in made.groups] == [*own(expert, target), *own(expert_data, target)]
