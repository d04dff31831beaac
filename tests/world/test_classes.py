import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.classes import (
    captured_stages,
    dependencies,
    plan_representatives,
    plan_roles,
    ranks_of_role,
)
from prism_plugins.world.layout import Layout
from tests.program.schedules import interleaved, one_f_one_b


def facts(*, tp=1, pp=1, dp=1, cp=1, num_microbatches=8, fingerprints=None, vpp=1, order="tp-cp-ep-dp-pp"):
    layout = Layout(
        world_size=tp * pp * dp * cp,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        vpp=vpp,
        num_microbatches=num_microbatches,
        order=order,
    )
    if fingerprints is None:
        fingerprints = ["first", *["middle"] * (pp - 2), "last"] if pp > 1 else ["all"]
    stages = []
    for stage in range(pp):
        if vpp > 1:
            schedule = interleaved(
                stage=stage, num_stages=pp, num_microbatches=num_microbatches, num_chunks=vpp
            )
        else:
            schedule = one_f_one_b(stage=stage, num_stages=pp, num_microbatches=num_microbatches)
        stages.append(StageInfo(fingerprint=fingerprints[stage], schedule=schedule))
    return JobFacts(framework="test", layout=layout, stages=tuple(stages))


def test_tp8_pp4_dp2_needs_six_slices():
    representatives = plan_representatives(facts(tp=8, pp=4, dp=2))
    assert {r.rank: r.depends_on for r in representatives} == {
        0: (),
        1: (0,),
        16: (0,),
        17: (0, 16),
        48: (0,),
        63: (0, 48),
    }
    assert representatives[0].rank == 0


def test_where_stages_exchange_headers_each_waits_for_the_one_before():
    told = msgspec.structs.replace(
        facts(pp=5, dp=2, fingerprints=["f", "a", "b", "a", "l"]), stage_headers=True
    )
    assert {r.rank: r.depends_on for r in plan_representatives(told)} == {
        0: (),
        2: (0,),
        4: (0, 2),
        9: (0, 2),
    }
    assert dependencies(told, 6) == (0, 4)  # stage 3, derived from stage 1
    with_tp = msgspec.structs.replace(facts(tp=2, pp=3), stage_headers=True)
    assert {r.rank: r.depends_on for r in plan_representatives(with_tp)} == {
        0: (),
        1: (0,),
        2: (0,),
        3: (0, 1, 2),
        4: (0, 2),
        5: (0, 3, 4),
    }


def test_without_tp_only_stages_matter():
    assert [r.rank for r in plan_representatives(facts(pp=4, dp=2))] == [0, 2, 7]
    assert [r.rank for r in plan_representatives(facts(dp=8))] == [0, 7]
    assert [r.rank for r in plan_representatives(facts())] == [0]
    assert [r.rank for r in plan_representatives(facts(tp=4))] == [0, 3]


def test_different_middle_stages_are_sliced_each():
    info = facts(pp=5, fingerprints=["f", "a", "b", "a", "l"])
    assert captured_stages(info.stages) == [0, 1, 2, 1, 4]


def test_equal_fingerprints_do_not_join_first_and_last():
    info = facts(pp=4, fingerprints=["x"] * 4)
    assert captured_stages(info.stages) == [0, 1, 1, 3]


def test_stages_without_steady_state_need_more_slices():
    """With fewer micro-batches than stages, early stages never alternate forward and backward."""
    info = facts(pp=8, num_microbatches=3)
    captured = captured_stages(info.stages)
    assert captured[0] == 0
    assert captured[7] == 7
    assert len(set(captured)) > 3
    assert captured[1] == captured[2] == captured[3] == captured[4]


def test_many_microbatches_need_one_middle_slice():
    assert set(captured_stages(facts(pp=16, num_microbatches=192).stages)) == {0, 1, 15}


def test_interleaved_middle_stages():
    captured = captured_stages(facts(pp=8, vpp=3, num_microbatches=24).stages)
    assert len(set(captured[1:-1])) == 1


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 5),
    dp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2]),
    order=st.sampled_from(["tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp", "dp-tp-cp-ep-pp", "pp-dp-cp-ep-tp"]),
    by_context=st.booleans(),
)
def test_roles_partition_the_world(tp, pp, dp, cp, order, by_context):
    info = facts(tp=tp, pp=pp, dp=dp, cp=cp, order=order)
    info = msgspec.structs.replace(info, context_ranks_differ=by_context)
    roles = plan_roles(info)
    ranks = np.concatenate([ranks_of_role(info.layout, role) for role in roles])
    assert sorted(ranks.tolist()) == list(range(info.layout.world_size))
    for role in roles:
        members = ranks_of_role(info.layout, role)
        assert {info.layout.coords(int(r))["pp"] for r in members} == {role.stage}
        assert {info.layout.coords(int(r))["tp"] == 0 for r in members} == {role.tp_first}
        assert role.cp is None or {info.layout.coords(int(r))["cp"] for r in members} == {role.cp}
        if role.sliced:
            assert role.representative in members
    assert len(roles) == pp * min(tp, 2) * (cp if by_context else 1)
    representatives = plan_representatives(info)
    planned = [r.rank for r in representatives]
    assert planned[0] == 0
    assert info.layout.world_size - 1 in planned
    assert {role.representative for role in roles} <= set(planned)
    for i, r in enumerate(representatives):
        assert set(r.depends_on) <= set(planned[:i])


@pytest.mark.parametrize("world", [8192])
def test_large_worlds_are_planned_at_once(world):
    info = facts(tp=8, pp=16, dp=world // 128, num_microbatches=64)
    assert len(plan_representatives(info)) == 6
