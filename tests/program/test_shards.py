"""The optimizer phase issued again for another rank's fragments equals the one that rank really runs."""

import msgspec
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import compare_programs
from prism_plugins.program.model import EventKind
from prism_plugins.program.shards import ShardedProgram, ShardIndex, fragment_lists, is_readable, readability
from prism_plugins.program.slices import OptimizerShard
from prism_plugins.world.layout import Layout
from tests.program.optimizer_model import cut_into_shards, step_program

LAYER = [(8192, True, 0, False), (4096, True, 0, False), (64, False, 1, False), (64, False, 1, False)]


def programs_of(shards, *, tp_first=True):
    return [
        step_program((s,), rank=s.index, tp_first=tp_first, num_ranks=len(shards), first_id=1000 * s.index)
        for s in shards
    ]


@pytest.mark.parametrize("tp_first", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_comes_from_one(tp_first, num_ranks):
    shards = cut_into_shards(LAYER * 6, num_ranks=num_ranks, num_groups=2)
    real = programs_of(shards, tp_first=tp_first)
    sharded = ShardedProgram(real[0], (shards[0],), tp_first=tp_first)
    for shard, program in zip(shards, real, strict=True):
        derived = sharded.program_for((shard,), tp_first=tp_first)
        assert compare_programs(derived, program) is None


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    layers=st.lists(
        st.tuples(
            st.integers(1, 40).map(lambda n: 8 * n),
            st.booleans(),
            st.integers(0, 1),
            st.sampled_from([False] * 4 + [True]),
        ),
        min_size=4,
        max_size=24,
    ),
    num_ranks=st.integers(2, 6),
    tp_first=st.booleans(),
    data=st.data(),
)
def test_right_or_refused(layers, num_ranks, tp_first, data):
    shards = cut_into_shards(layers, num_ranks=num_ranks, num_groups=2)
    assume(all(s.fragments for s in shards))
    source, target = (data.draw(st.integers(0, num_ranks - 1)) for _ in range(2))
    real = programs_of(shards, tp_first=tp_first)
    try:
        sharded = ShardedProgram(real[source], (shards[source],), tp_first=tp_first)
        derived = sharded.program_for((shards[target],), tp_first=tp_first)
    except CannotDeriveError:
        return
    if is_readable((shards[source],), tp_first):
        assert compare_programs(derived, real[target]) is None


def test_one_fragment_is_read_with_the_help_of_another_slice():
    """A large data-parallel size leaves many ranks with a piece of one parameter: no loop can be seen there."""
    shards = cut_into_shards(LAYER * 4, num_ranks=8, num_groups=2)
    real = programs_of(shards)
    short = next(i for i, s in enumerate(shards) if len(s.fragments) == 1)
    long = max(range(8), key=lambda i: readability((shards[i],), True))
    pattern = ShardedProgram(real[long], (shards[long],), tp_first=True)
    sharded = ShardedProgram(real[short], (shards[short],), tp_first=True, pattern=pattern.pattern)
    for shard, program in zip(shards, real, strict=True):
        assert compare_programs(sharded.program_for((shard,), tp_first=True), program) is None


def test_a_slice_that_does_not_follow_the_pattern_is_refused():
    shards = cut_into_shards(LAYER * 4, num_ranks=4, num_groups=2)
    real = programs_of(shards)
    pattern = ShardedProgram(real[0], (shards[0],), tp_first=True)
    other = real[1]
    kernels = other.events["kind"] == EventKind.KERNEL
    other.events["kind"][kernels.nonzero()[0][-1]] = EventKind.STREAM_SYNC
    with pytest.raises(CannotDeriveError):
        ShardedProgram(other, (shards[1],), tp_first=True, pattern=pattern.pattern)


def test_two_optimizers_have_lists_of_their_own_and_common_ones():
    dense = cut_into_shards(LAYER * 3, num_ranks=2, num_groups=2)
    experts = [
        msgspec.structs.replace(s, optimizer=1, expert=True)
        for s in cut_into_shards(
            [(512, True, 0, False), (320, True, 0, False)] * 4, num_ranks=2, num_groups=1
        )
    ]
    owned = [(d, e) for d, e in zip(dense, experts, strict=True)]
    real = [
        step_program(shards, rank=i, tp_first=True, num_ranks=2, first_id=700 * i)
        for i, shards in enumerate(owned)
    ]
    lists = fragment_lists(owned[0], tp_first=True)
    assert lists["all", -1] == lists["all", 0] + lists["all", 1]
    sharded = ShardedProgram(real[0], owned[0], tp_first=True)
    assert compare_programs(sharded.program_for(owned[1], tp_first=True), real[1]) is None


def test_a_rank_that_owns_nothing_is_refused():
    shards = cut_into_shards(LAYER * 2, num_ranks=2, num_groups=2)
    sharded = ShardedProgram(programs_of(shards)[0], (shards[0],), tp_first=True)
    empty = OptimizerShard(index=1, fragments=(), group_sizes=(0, 0))
    with pytest.raises(CannotDeriveError, match="owns nothing"):
        sharded.program_for((empty,), tp_first=True)


def test_ranks_with_equal_fragments_share_their_work():
    layout = Layout(world_size=16, tp=2, cp=2, dp=2, pp=2, ep=2, order="tp-cp-ep-dp-pp")
    shards = [OptimizerShard(index=i, fragments=((8, True), (4, False))) for i in range(3)]
    shards.append(OptimizerShard(index=3, fragments=((12, True),)))
    index = ShardIndex(layout, shards)
    works = [index.work(rank) for rank in range(16)]
    # position = dp * 2 + cp, tp does not matter
    assert works == [works[0]] * 6 + [works[6]] * 2 + [works[0]] * 6 + [works[6]] * 2
    assert works[0] != works[6]
    assert index.of(6)[0].index == 3


def test_expert_shards_follow_the_expert_axis():
    layout = Layout(world_size=8, tp=1, dp=8, ep=4, etp=1)
    shards = [OptimizerShard(index=i, fragments=((i + 1, True),), expert=True) for i in range(2)]
    index = ShardIndex(layout, shards)
    assert [index.of(rank)[0].index for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_optimizer_instances_repeat_their_shards():
    layout = Layout(world_size=8, dp=8)
    shards = [OptimizerShard(index=i, fragments=((i + 1, True),)) for i in range(4)]
    index = ShardIndex(layout, shards)
    assert [index.of(rank)[0].index for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
