"""A stage derived from another one equals the stage as it really runs, releases of memory included."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import compare_programs
from prism_plugins.program.derive import CapturedStage, derive_stage
from prism_plugins.program.instantiate import Instantiator
from prism_plugins.program.model import EVENT_DTYPE, EventKind
from prism_plugins.program.schedule import missing_for, parts_of
from prism_plugins.program.slices import StageInfo
from prism_plugins.world.classes import captured_stages
from prism_plugins.world.layout import Layout
from tests.program.pipeline_model import make_program, schedule_of
from tests.program.schedules import interleaved, one_f_one_b

KINDS = {
    "1f1b": {},
    "interleaved": {"num_chunks": 2},
    "interleaved, overlapped": {"num_chunks": 2, "overlap": True},
}


def all_stages(num_stages, num_microbatches, **kind):
    """Each stage counts ids from another start, as separate processes do."""
    return [
        make_program(
            stage=stage,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            first_id=100 + 7 * stage,
            **kind,
        )
        for stage in range(num_stages)
    ]


def difference(derived, real, num_stages):
    moved = Instantiator(derived, Layout(world_size=num_stages, pp=num_stages)).program_of(real.rank)
    return compare_programs(moved, real)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_stages", [4, 5, 8])
def test_all_middle_stages_come_from_one(kind, num_stages):
    programs = all_stages(num_stages, 2 * num_stages, **KINDS[kind])
    captured = CapturedStage(programs[1], schedule_of(programs[1]))
    for stage in range(1, num_stages - 1):
        derived = captured.derive(schedule_of(programs[stage])).program
        assert difference(derived, programs[stage], num_stages) is None
        assert derived.source == "derived"


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    num_stages=st.integers(3, 7),
    groups=st.integers(1, 4),
    extra=st.integers(0, 6),
    data=st.data(),
)
def test_what_is_derived_is_right_and_what_is_not_says_so(kind, num_stages, groups, extra, data):
    """For any pair of middle stages: equal to the real one, or CannotDeriveError; never something else."""
    if kind == "1f1b":
        num_microbatches = 1 + groups * extra
    else:
        num_microbatches = num_stages * groups
        assume(groups > 1)
    a, b = (data.draw(st.integers(1, num_stages - 2)) for _ in range(2))
    make = {"num_stages": num_stages, "num_microbatches": num_microbatches, **KINDS[kind]}
    source, real = (make_program(stage=stage, first_id=50 + stage, **make) for stage in (a, b))
    try:
        derived = derive_stage(source, captured=schedule_of(source), target=schedule_of(real))
    except CannotDeriveError:
        assert a != b
        return
    assert difference(derived, real, num_stages) is None


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(4, 8), (4, 9), (6, 8), (6, 12), (8, 64), (3, 1)]
)
def test_planned_stages_suffice(num_stages, num_microbatches):
    """Where there are enough micro-batches to fill the pipeline, a planned stage serves all it is planned for."""
    programs = all_stages(num_stages, num_microbatches)
    stages = tuple(StageInfo(fingerprint="same", schedule=schedule_of(p)) for p in programs)
    for stage, source in enumerate(captured_stages(stages)):
        if stage != source:
            derived = derive_stage(
                programs[source], captured=stages[source].schedule, target=stages[stage].schedule
            )
            assert difference(derived, programs[stage], num_stages) is None


def test_the_model_runs_the_published_schedules():
    for stage in range(4):
        program = make_program(stage=stage, num_stages=4, num_microbatches=8)
        assert schedule_of(program) == one_f_one_b(stage=stage, num_stages=4, num_microbatches=8)
        program = make_program(stage=stage, num_stages=4, num_microbatches=8, num_chunks=2)
        assert schedule_of(program) == interleaved(
            stage=stage, num_stages=4, num_microbatches=8, num_chunks=2
        )


def test_a_phase_that_was_not_captured_is_named():
    short, long = (schedule_of(make_program(stage=s, num_stages=8, num_microbatches=3)) for s in (1, 6))
    assert "send_forward_recv_backward" in missing_for(parts_of(short), parts_of(long))
    program = make_program(stage=1, num_stages=8, num_microbatches=3)
    with pytest.raises(CannotDeriveError, match="send_forward_recv_backward"):
        derive_stage(program, captured=short, target=long)


def test_a_slice_that_ran_another_schedule_is_refused():
    program = make_program(stage=1, num_stages=4, num_microbatches=8)
    other = schedule_of(make_program(stage=2, num_stages=4, num_microbatches=8))
    with pytest.raises(CannotDeriveError, match="did not run the schedule"):
        derive_stage(program, captured=other, target=other)


def test_a_leak_in_one_gap_is_not_multiplied():
    """An allocation that only one gap makes cannot be reproduced elsewhere: refused, not guessed."""
    program = make_program(stage=1, num_stages=5, num_microbatches=10)
    phases = list(program.iter_phases())
    steady = [end for phase, _, end in phases if phase.kind == "send_backward_recv_forward"]
    extra = np.array([(EventKind.ALLOC, 0, 0, 9999, 128)], dtype=EVENT_DTYPE)
    program.events = np.insert(program.events, steady[2] + 1, extra)
    target = schedule_of(make_program(stage=3, num_stages=5, num_microbatches=10))
    with pytest.raises(CannotDeriveError):
        derive_stage(program, captured=schedule_of(program), target=target)
