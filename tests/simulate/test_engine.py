"""The engine against the plain simulator, and laws any simulation obeys."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Builder, TableCosts, collective, message, one_class_per_rank, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference

from prism_plugins.costs.base import Interference
from prism_plugins.program.model import EventKind
from prism_plugins.simulate.engine import Simulation, op_times, simulate
from prism_plugins.simulate.timeline import COMM_LANE
from prism_plugins.world.layout import Layout

seeds = st.integers(min_value=0, max_value=2**32 - 1)


def some_programs(seed: int):
    rng = np.random.default_rng(seed)
    return random_programs(rng, num_ranks=int(rng.integers(2, 5)), num_actions=int(rng.integers(3, 80)))


@given(seeds)
@settings(max_examples=80, deadline=None)
def test_equals_the_reference_to_a_nanosecond(seed: int) -> None:
    programs = some_programs(seed)
    costs = TableCosts()
    reference = Reference(programs, costs)
    simulation = Simulation(one_class_per_rank(programs), costs)
    for i, rank in enumerate(programs):
        times = simulation.op_times(rank)
        assert simulation.timeline.class_time_ns[i] == pytest.approx(reference.finish[rank], abs=1)
        for event, (start, _, end) in reference.times[rank].items():
            assert times.start_ns[event] == pytest.approx(start, abs=1), (rank, event)
            assert times.end_ns[event] == pytest.approx(end, abs=1), (rank, event)


@given(seeds, st.sampled_from(["op_scale", "comm_scale", "host_scale"]), st.floats(1.0, 3.0))
@settings(max_examples=25, deadline=None)
def test_a_dearer_job_is_never_faster(seed: int, which: str, factor: float) -> None:
    job = one_class_per_rank(some_programs(seed))
    assert (
        simulate(job, TableCosts(**{which: factor})).iteration_time_ns
        >= simulate(job, TableCosts()).iteration_time_ns - 1e-6
    )


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_no_lane_can_be_faster_than_its_own_work(seed: int) -> None:
    programs = some_programs(seed)
    costs = TableCosts()
    total = simulate(one_class_per_rank(programs), costs).iteration_time_ns
    for program in programs.values():
        kind, ref, stream = (program.events[f] for f in ("kind", "ref", "stream"))
        kernels = kind == EventKind.KERNEL
        work = np.array([costs.price_op(s).duration_ns for s in program.signatures] or [0.0])[ref[kernels]]
        host = np.array([costs.price_op(s).host_ns for s in program.signatures] or [0.0])[ref[kernels]].sum()
        assert total >= host
        for s in np.unique(stream[kernels]):
            assert total >= work[stream[kernels] == s].sum()


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_the_breakdown_sums_to_the_iteration_and_has_no_negative_part(seed: int) -> None:
    timeline = simulate(one_class_per_rank(some_programs(seed)), TableCosts())
    for b in timeline.breakdown:
        parts = (b.compute, b.exposed_communication, b.bubble, b.host, b.optimizer)
        assert sum(parts) == pytest.approx(timeline.iteration_time_ns / 1e6, rel=1e-12)
        assert min(parts) > -1e-9


def two_ranks(make_first, make_second, layout: Layout | None = None) -> Simulation:
    builders = [Builder(0), Builder(1)]
    groups = [b.group((0, 1), "G") for b in builders]
    make_first(builders[0], groups[0])
    make_second(builders[1], groups[1])
    return Simulation(one_class_per_rank({b.rank: b.program() for b in builders}, layout), TableCosts())


def test_a_transfer_starts_when_the_last_member_arrives() -> None:
    def fast(b, g):
        b.kernel(1000, host=100)
        b.comm(collective(g, 100))

    def slow(b, g):
        b.kernel(9000, host=100)
        b.comm(collective(g, 100))

    times = two_ranks(fast, slow).op_times(0)
    # price: 700 + 2 * 100 + 400 bytes = 1300 ns
    assert times.start_ns[1] == 1100
    assert times.transfer_start_ns[1] == 9100
    assert times.end_ns[1] == 10400
    assert times.lane.tolist() == [0, COMM_LANE]


def test_an_asynchronous_collective_overlaps_until_it_is_waited_for() -> None:
    def program(b, g):
        work = b.comm(collective(g, 10_000), is_async=True)  # 700 + 200 + 40000 ns
        b.kernel(5000, host=100)
        b.wait(work)
        b.kernel(10, host=100)

    times = two_ranks(program, program).op_times(1)
    assert times.start_ns[1] == 400
    assert times.start_ns[3] == times.end_ns[0] == 41_200


def test_a_host_that_waits_for_the_device_waits_for_its_collectives() -> None:
    def program(b, g):
        b.comm(collective(g, 10_000), is_async=True)  # 700 + 200 + 40000 ns
        b.kernel(5000, host=100)
        b.device_sync()
        b.kernel(10, host=100)

    parts = two_ranks(program, program).timeline.breakdown[0]
    assert parts.compute * 1e6 == pytest.approx(5010)
    assert parts.exposed_communication * 1e6 == pytest.approx(40_900 - 5000 - 100, abs=200)
    assert parts.bubble == 0
    assert parts.host * 1e6 < 2500  # until the first launch, and from the wait to the last one


def test_a_batch_ends_with_its_last_part_and_does_not_deadlock_in_a_ring() -> None:
    builders = [Builder(r) for r in range(3)]
    for r, b in enumerate(builders):
        g = b.group((0, 1, 2), "RING")
        b.kernel(1000 * (r + 1), host=1)
        b.comm(message("send", g, (r + 1) % 3, 100), message("recv", g, (r - 1) % 3, 100))
    simulation = Simulation(one_class_per_rank({b.rank: b.program() for b in builders}), TableCosts())
    # arrivals 1001, 2001, 3001; each part takes 500 + 400; both rows of a batch carry the batch's times
    assert [simulation.op_times(r).end_ns[1] for r in range(3)] == [3901, 3901, 3901]
    assert simulation.op_times(0).end_ns[2] == 3901


def test_streams_that_issue_collectives_in_different_orders_do_not_hang() -> None:
    """The host does not block, so neither may the simulation."""

    def program(first: int):
        def build(b, g):
            other = b.group((0, 1), "H")
            calls = [(g, 0), (other, 1)]
            for group, stream in (calls[first], calls[1 - first]):
                b.comm(collective(group, 10), stream=stream)

        return build

    two_ranks(program(0), program(1))


def test_host_waits_delay_what_is_issued_later() -> None:
    b = Builder(0)
    b.kernel(50_000, host=100)
    b.sync()
    b.kernel(10, stream=1, host=100)
    times = Simulation(one_class_per_rank({0: b.program()}), TableCosts()).op_times(0)
    assert times.host_ns[2] == 50_100
    assert times.start_ns[2] == 50_200


@pytest.mark.parametrize("streams", [1, 2])
def test_the_host_waits_for_room_in_the_launch_queue(streams: int) -> None:
    """Long kernels, then short ones that the host cannot issue as fast as they run: as deep as the queue is, it is ahead."""
    b = Builder(0)
    for i in range(600):
        b.kernel(1_000 if i < 400 else 10, stream=i % streams, host=100)
    costs = TableCosts()
    job = one_class_per_rank({0: b.program()})
    free = Simulation(job, costs)
    costs.interference = Interference(num_sms=100, hbm_bytes_per_s=1e12, streams_share=False, launch_queue=64)
    held = Simulation(job, costs)
    times = held.op_times(0)
    ahead = np.arange(600) - np.searchsorted(np.sort(times.end_ns), times.host_ns, side="right")
    assert ahead[200:400].max() <= 64 + 32, "looked at in steps"
    assert ahead[200:400].min() >= 63 - 32 * streams
    assert free.op_times(0).host_ns[-1] == 599 * 100
    # 64 to 96 launches were issued when the last long kernel ended, and the others take the host 100 ns each.
    late = held.timeline.iteration_time_ns - free.timeline.iteration_time_ns
    assert (200 - 96) * 100 - 200 * 10 <= late <= 200 * 100


def test_unpriced_ops_are_counted_by_name() -> None:
    b = Builder(0)
    for _ in range(3):
        b.kernel(10, op="aten::mystery")
    assert simulate(one_class_per_rank({0: b.program()}), TableCosts()).unpriced == {"aten::mystery": 3}


def test_op_times_reuses_the_simulation_of_the_same_job() -> None:
    b = Builder(0)
    b.kernel(10)
    job, costs = one_class_per_rank({0: b.program()}), TableCosts()
    timeline = simulate(job, costs)
    before = Simulation.last
    assert op_times(job, costs, timeline, 0).end_ns[0] == timeline.iteration_time_ns
    assert Simulation.last is before


def test_optimizer_compute_and_bubble_are_told_apart() -> None:
    def first(b, g):
        b.kernel(10_000, host=1)
        b.comm(message("send", g, 1, 100))
        b.begin("optimizer")
        b.kernel(3000, host=1)
        b.end()

    def second(b, g):
        b.comm(message("recv", g, 0, 100))
        b.kernel(5000, host=1)

    timeline = two_ranks(first, second, Layout(world_size=2, pp=2)).timeline
    assert timeline.breakdown[0].optimizer == pytest.approx(0.003)
    assert timeline.breakdown[1].optimizer == 0
    assert timeline.breakdown[1].bubble == pytest.approx((10_001 + 900 - 300) / 1e6)
    assert timeline.breakdown[1].host == pytest.approx(0.0003)
    assert timeline.slowest_rank == 1


def test_waiting_for_another_stage_in_a_collective_is_bubble_and_its_transfer_is_communication() -> None:
    def program(ns):
        def build(b, g):
            b.kernel(ns, host=1)
            b.comm(collective(g, 100))  # 700 + 200 + 400 ns

        return build

    early = two_ranks(program(1000), program(9000), Layout(world_size=2, pp=2)).timeline.breakdown[0]
    assert early.bubble == pytest.approx(0.008)
    assert early.exposed_communication == pytest.approx(0.0013)
    peers = two_ranks(program(1000), program(9000), Layout(world_size=2, dp=2)).timeline.breakdown[0]
    assert peers.bubble == 0
    assert peers.exposed_communication == pytest.approx(0.0093)
