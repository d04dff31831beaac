"""Symmetric classes give the times that every rank on its own would have."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import TableCosts
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from symmetric import every_rank_alone, random_job

from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EventKind, Program
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout

LAYOUTS = [
    Layout(world_size=8, tp=2, pp=2, dp=2),
    Layout(world_size=12, tp=3, pp=2, dp=2),
    Layout(world_size=8, tp=1, pp=4, dp=2),
    Layout(world_size=6, tp=2, pp=1, dp=3),
]
seeds = st.integers(min_value=0, max_value=2**32 - 1)


def assert_equal_times(job: JobPrograms, alone: JobPrograms, costs: TableCosts) -> None:
    quotient, full = Simulation(job, costs), Simulation(alone, costs)
    assert quotient.timeline.iteration_time_ns == pytest.approx(full.timeline.iteration_time_ns, abs=1)
    for rank in range(job.layout.world_size):
        ours, theirs = quotient.op_times(rank), full.op_times(rank)
        for field in ("host_ns", "start_ns", "end_ns", "transfer_start_ns"):
            np.testing.assert_allclose(
                getattr(ours, field), getattr(theirs, field), atol=1, err_msg=f"{rank} {field}"
            )


@given(seeds, st.sampled_from(LAYOUTS), st.booleans())
@settings(max_examples=20, deadline=None)
def test_classes_and_single_ranks_agree(seed: int, layout: Layout, shards: bool) -> None:
    job = random_job(np.random.default_rng(seed), layout=layout, shards=shards)
    assert_equal_times(job, every_rank_alone(job), TableCosts())


@given(seeds, st.booleans())
@settings(max_examples=6, deadline=None)
def test_a_symmetric_world_equals_the_reference(seed: int, shards: bool) -> None:
    layout = LAYOUTS[0]
    job = random_job(np.random.default_rng(seed), layout=layout, num_actions=12, shards=shards)
    costs = TableCosts()
    reference = Reference({r: program_of(job, r) for r in range(layout.world_size)}, costs)
    simulation = Simulation(job, costs)
    for rank in range(layout.world_size):
        times = simulation.op_times(rank)
        for event, (start, _, end) in reference.times[rank].items():
            assert (times.start_ns[event], times.end_ns[event]) == pytest.approx((start, end), abs=1)


def test_perfect_symmetry_keeps_one_cell_per_class() -> None:
    job = random_job(np.random.default_rng(1), layout=LAYOUTS[0])
    assert len(Simulation(job, TableCosts())._quotient.cells) == len(job.classes) == 4


def test_a_larger_world_has_no_more_cells() -> None:
    layout = Layout(world_size=256, tp=2, pp=2, dp=64)
    simulation = Simulation(random_job(np.random.default_rng(2), layout=layout, num_actions=8), TableCosts())
    assert len(simulation._quotient.cells) == 4


def test_a_class_whose_members_meet_different_peers_is_split() -> None:
    """One dp replica of stage 1 is slow: the other stages' replicas are no longer alike."""
    layout = Layout(world_size=8, tp=2, pp=2, dp=2)
    job = random_job(np.random.default_rng(3), layout=layout)
    alone = every_rank_alone(job)
    slow = 6  # stage 1, dp 1, tp 0
    program = alone.classes[slow].exemplar
    signatures = [
        msgspec.structs.replace(s, attrs={**s.attrs, "ns": s.attrs["ns"] * 5}) for s in program.signatures
    ]
    slowed = msgspec.structs.replace(program, signatures=signatures)
    classes = []
    for cls in job.classes:
        rest = cls.ranks[cls.ranks != slow]
        if len(rest):
            exemplar = program_of(job, int(rest[0]))
            classes.append(
                RankClass(name=cls.name, ranks=rest, representative=int(rest[0]), exemplar=exemplar)
            )
    classes.append(RankClass(name="slow", ranks=np.array([slow]), representative=slow, exemplar=slowed))
    straggler = JobPrograms(layout=layout, classes=tuple(classes))
    alone.classes[slow].exemplar = slowed
    assert len(Simulation(straggler, TableCosts())._quotient.cells) > len(classes)
    assert_equal_times(straggler, alone, TableCosts())


def test_placement_splits_a_class_when_it_changes_prices() -> None:
    """Six ranks on nodes of four: the first tp pair of a class is inside a node, another one is not."""

    class ByNode(TableCosts):
        def price_comm(self, comm, ranks, rank):
            price = super().price_comm(comm, ranks, rank)
            across = len({r // 3 for r in ranks}) > 1
            return msgspec.structs.replace(price, duration_ns=price.duration_ns * (10 if across else 1))

    layout = Layout(world_size=6, tp=2, pp=1, dp=3)
    job = random_job(np.random.default_rng(5), layout=layout)
    assert_equal_times(job, every_rank_alone(job), ByNode())


@pytest.mark.parametrize("seed", range(4))
def test_a_class_may_part_before_its_first_call(seed: int) -> None:
    """Ranks sliced one by one number their allocations differently: their programs differ from the first event on."""
    job = random_job(np.random.default_rng(seed), layout=LAYOUTS[0], num_actions=12, shards=True)
    cls = job.classes[1]
    first = int(cls.ranks[0])
    variants = {key: _later(program, 5 + key) for key, program in cls.variants.items()}
    variants[first] = _later(cls.exemplar, 3)
    apart = RankClass(
        name=cls.name,
        ranks=cls.ranks,
        representative=cls.representative,
        exemplar=cls.exemplar,
        variants=variants,
        variant_of={**cls.variant_of, first: first},
    )
    job = JobPrograms(layout=job.layout, classes=(job.classes[0], apart, *job.classes[2:]))
    assert_equal_times(job, every_rank_alone(job), TableCosts())


def _later(program: Program, host_ns: int) -> Program:
    """The program behind some more host work."""
    events = np.zeros(1 + len(program.events), dtype=program.events.dtype)
    events[1:] = program.events
    events["kind"][0], events["value"][0] = EventKind.HOST, host_ns
    return msgspec.structs.replace(program, events=events)
