"""The layout's grids against Megatron's own rank generator."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prism_plugins.errors import CannotDeriveError, PrismError
from prism_plugins.program.instantiate import Instantiator, fit_group
from prism_plugins.program.model import CommSignature, GroupInfo
from prism_plugins.world.layout import Layout
from tests.world.programs import program_with_groups

parallel_state = pytest.importorskip("megatron.core.parallel_state")

AXES = ("tp", "cp", "ep", "dp", "pp")


@st.composite
def layouts(draw, smallest_pp=1):
    tp, cp, dp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    pp = draw(st.integers(smallest_pp, 4))
    world = tp * cp * dp * pp
    order = "-".join(draw(st.permutations(AXES)))
    divisors = [(etp, ep) for etp in (1, 2, 4) for ep in (1, 2, 3, 4, 8) if world % (etp * ep * pp) == 0]
    if pp > 1 and not order.endswith("pp"):  # Megatron refuses what its two generators do not agree on
        divisors = [(etp, ep) for etp, ep in divisors if etp * ep == tp * cp] or [(tp, cp)]
    etp, ep = draw(st.sampled_from(divisors))
    layout = Layout(world_size=world, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)
    dense, expert = generators(layout)
    assume(dense.get_ranks("pp") == expert.get_ranks("pp"))
    return layout


def generators(layout):
    dense = parallel_state.RankGenerator(
        tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=layout.order
    )
    expert = parallel_state.RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=layout.order
    )
    return dense, expert


def all_groups(layout):
    """(name, list of groups) of everything Megatron builds from its generators."""
    dense, expert = generators(layout)
    for prefix, generator, names in (
        ("", dense, ("tp", "cp", "dp", "pp")),
        ("EXPERT ", expert, ("tp", "ep", "dp", "pp")),
    ):
        for count in range(1, 5):
            for combination in itertools.combinations(names, count):
                token = "-".join(combination)
                yield prefix + token, generator.get_ranks(token)
    pp_groups = dense.get_ranks("pp")
    yield "embedding", [sorted({g[0], g[-1]}) for g in pp_groups]
    yield "position embedding", [[g[0]] for g in pp_groups]
    if layout.dp % 2 == 0:
        halves = []
        for group in dense.get_ranks("dp-cp"):
            halves += [group[: len(group) // 2], group[len(group) // 2 :]]
        if layout.order.index("cp") < layout.order.index("dp"):
            yield "half of dp-cp", halves


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_coordinates_are_those_of_the_generator(layout):
    for expert, generator in zip((False, True), generators(layout), strict=True):
        grid = layout.grid(expert=expert)
        assert grid.size == layout.world_size
        for axis in AXES:
            if axis in ("ep",) and not expert:
                continue
            for group in generator.get_ranks(axis):
                coords = [layout.coords(rank, expert=expert) for rank in group]
                assert [c[axis] for c in coords] == list(range(len(group)))
                others = [{k: v for k, v in c.items() if k != axis} for c in coords]
                assert all(o == others[0] for o in others)
                for rank, c in zip(group, coords, strict=True):
                    assert layout.rank_of(c, expert=expert) == rank


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), data=st.data())
def test_groups_of_any_rank_are_those_megatron_would_build(layout, data):
    source, target = (data.draw(st.integers(0, layout.world_size - 1)) for _ in range(2))
    stage = layout.coords(target)["pp"]
    mine, expected = [], []
    for name, groups in all_groups(layout):
        own = [g for g in groups if source in g]
        its = [g for g in groups if target in g]
        if "embedding" in name and layout.coords(source)["pp"] != stage:
            continue
        if own:
            mine.append(GroupInfo(ranks=tuple(own[0]), name=name, desc=name))
            expected.append(tuple(its[0]))
    made = Instantiator(program_with_groups(source, mine), layout).program_of(target)
    for group, ranks in zip(made.groups, expected, strict=True):
        assert group.ranks == ranks, group.name
    assert made.source == ("inferred" if source != target else "sliced")


@settings(max_examples=60, deadline=None)
@given(layout=layouts(smallest_pp=2), data=st.data(), world=st.booleans(), delta=st.sampled_from([-1, 1]))
def test_p2p_peers_are_neighbours_of_the_target(layout, data, world, delta):
    source, target = (data.draw(st.integers(0, layout.world_size - 1)) for _ in range(2))
    dense, _ = generators(layout)
    group_of = {rank: g for g in dense.get_ranks("pp") for rank in g}

    def neighbour(rank):
        return group_of[rank][(group_of[rank].index(rank) + delta) % layout.pp]

    ranks = tuple(range(layout.world_size)) if world else tuple(group_of[source])
    program = program_with_groups(source, [GroupInfo(ranks=ranks, name="p2p")])
    program.comms = [
        CommSignature(kind="send", group=0, dtype="bfloat16", in_numel=4, peer=ranks.index(neighbour(source)))
    ]
    made = Instantiator(program, layout).program_of(target)
    assert made.groups[0].ranks[made.comms[0].peer] == neighbour(target)


def test_a_group_outside_the_grids_cannot_be_derived():
    layout = Layout(world_size=16, tp=4, dp=2, pp=2)
    with pytest.raises(CannotDeriveError, match="product set"):
        Instantiator(program_with_groups(0, [GroupInfo(ranks=(0, 6, 9), name="odd")]), layout)


def test_a_subset_of_stages_does_not_move():
    layout = Layout(world_size=8, tp=2, pp=4)
    embedding = GroupInfo(ranks=(0, 6), name="embedding")
    instantiator = Instantiator(program_with_groups(0, [embedding]), layout)
    assert instantiator.program_of(1).groups[0].ranks == (1, 7)
    assert instantiator.program_of(7).groups[0].ranks == (1, 7)
    with pytest.raises(CannotDeriveError, match="no group like"):
        instantiator.program_of(2)


def test_unused_groups_do_not_matter():
    layout = Layout(world_size=8, tp=2, pp=4)
    program = program_with_groups(0, [GroupInfo(ranks=(0, 3, 5), name="odd")])
    program.comms = []
    assert Instantiator(program, layout).program_of(5).groups[0].ranks == (0, 3, 5)


def test_groups_without_the_rank_do_not_fit():
    layout = Layout(world_size=8, tp=2, pp=4)
    assert fit_group(layout, GroupInfo(ranks=(0, 1), name="tp"), 2) is None


def test_instantiation_is_cheap():
    """All 8192 ranks of a world in well under a millisecond each, sharing what does not depend on the rank."""
    layout = Layout(world_size=8192, tp=8, pp=16, dp=64)
    grid = layout.grid().reshape(16, 64, 8)
    groups = [
        GroupInfo(ranks=tuple(range(8192)), name="world"),
        GroupInfo(ranks=tuple(range(8)), name="tp"),
        GroupInfo(ranks=tuple(grid[0, :, 0].tolist()), name="dp"),
        GroupInfo(ranks=tuple(grid[:, 0, 0].tolist()), name="pp"),
    ]
    source = program_with_groups(0, groups)
    instantiator = Instantiator(source, layout)
    import time

    begin = time.perf_counter()
    made = [instantiator.program_of(rank) for rank in range(0, 8192, 8)]
    seconds = time.perf_counter() - begin
    assert all(p.comms is source.comms and p.groups[0] is groups[0] for p in made)
    assert seconds / len(made) < 1e-3


def test_layout_refuses_sizes_that_do_not_cover_the_world():
    with pytest.raises(PrismError, match="covers 8 ranks"):
        Layout(world_size=12, tp=2, pp=4).validate()
    with pytest.raises(PrismError, match="expert layout"):
        Layout(world_size=8, tp=2, pp=4, ep=3).validate()
    with pytest.raises(PrismError, match="tp=-2; every size is at least 1"):
        Layout(world_size=8, tp=-2, pp=-4).validate()
    for order, said in (
        ("tp-x-dp", "must name each"),
        ("tp-tp-dp-pp", "must name each"),
        ("tp-dp", "lacks pp"),
    ):
        with pytest.raises(PrismError, match=said):
            Layout(world_size=8, tp=2, pp=4, order=order).validate()
    Layout(world_size=8, tp=2, pp=4, order="tp-dp-pp").validate()
