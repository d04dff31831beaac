"""Collectives and compute beside each other: what each loses, and what must not change."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import Builder, TableCosts, collective, one_class_per_rank

from prism_plugins.costs.base import Interference, Price
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model
from prism_plugins.simulate.disturbance import Disturbance
from prism_plugins.simulate.engine import Simulation

SMS = 100


class SharingCosts(TableCosts):
    """Arithmetic-bound ops ("aten::mm") and memory-bound ones, collectives of 20 channels and 1000 bytes/ns."""

    interference = Interference(num_sms=SMS, hbm_bytes_per_s=4000e9)

    def __init__(self, *, channels: int = 20, memory_rate: float = 3000.0, comm_rate: float = 500.0) -> None:
        super().__init__()
        self.channels, self.memory_rate, self.comm_rate = channels, memory_rate, comm_rate

    def price_op(self, signature) -> Price:
        price = super().price_op(signature)
        if signature.op == "aten::mm":
            return msgspec.structs.replace(price, flops=1e15, bytes=1.0)
        return msgspec.structs.replace(price, bytes=self.memory_rate * price.duration_ns)

    def price_comm(self, comm, ranks, rank) -> Price:
        price = super().price_comm(comm, ranks, rank)
        wire = self.comm_rate * price.duration_ns
        return msgspec.structs.replace(price, channels=self.channels, bytes=wire)


def overlapped(costs, *, op: str = "aten::mm", kernels: int = 10, is_async: bool = True):
    builders = [Builder(r) for r in range(2)]
    for b in builders:
        g = b.group((0, 1), "DP")
        b.kernel(1000, host=1, op=op)
        work = b.comm(collective(g, 10_000), is_async=is_async)  # lasts 40,900 ns
        for _ in range(kernels):
            b.kernel(10_000, host=1, op=op)
        if is_async:
            b.wait(work)
    return Simulation(one_class_per_rank({b.rank: b.program() for b in builders}), costs)


def test_arithmetic_loses_the_sms_that_channels_hold() -> None:
    alone = overlapped(TableCosts()).timeline.iteration_time_ns
    beside = overlapped(SharingCosts()).timeline
    assert beside.iteration_time_ns - alone == pytest.approx(0.20 * 40_900, rel=0.02)
    assert beside.slowdown_ns == pytest.approx(0.20 * 40_900, rel=0.02)


def test_memory_bound_kernels_and_the_transfer_share_hbm() -> None:
    costs = SharingCosts(
        memory_rate=3500.0
    )  # an all_reduce makes three accesses for each byte: 1500 + 3500 of 4000
    beside = overlapped(costs, op="aten::add")
    alone = overlapped(TableCosts(), op="aten::add")
    share = 1 - 4000 / 5000
    extra = beside.timeline.iteration_time_ns - alone.timeline.iteration_time_ns
    assert extra == pytest.approx(share * 40_900, rel=0.03)
    transfer = beside.op_times(0).end_ns[1] - beside.op_times(0).transfer_start_ns[1]
    assert transfer == pytest.approx(40_900 * (1 + share), rel=0.03)
    assert overlapped(SharingCosts(memory_rate=1000.0), op="aten::add").timeline.slowdown_ns == 0


def test_nothing_overlaps_nothing_changes() -> None:
    plain, sharing = (overlapped(c, is_async=False).timeline for c in (TableCosts(), SharingCosts()))
    assert sharing.iteration_time_ns == plain.iteration_time_ns
    assert sharing.slowdown_ns == 0


def test_a_long_collective_only_slows_what_there_is() -> None:
    timeline = overlapped(SharingCosts(), kernels=1).timeline
    assert timeline.slowdown_ns == pytest.approx(0.20 * 10_000, rel=0.02)
    assert timeline.iteration_time_ns == overlapped(TableCosts(), kernels=1).timeline.iteration_time_ns


def test_kernels_of_the_expanded_rank_are_stretched_and_the_breakdown_sums_up() -> None:
    simulation = overlapped(SharingCosts())
    times, timeline = simulation.op_times(1), simulation.timeline
    assert times.end_ns.max() == pytest.approx(timeline.iteration_time_ns)
    kernels = (times.end_ns - times.start_ns)[[0, *range(2, 12)]]
    assert kernels.sum() == pytest.approx(1000 + 100_000 + timeline.slowdown_ns, rel=1e-6)
    parts = msgspec.structs.astuple(timeline.breakdown[0])
    assert sum(parts) == pytest.approx(timeline.iteration_time_ns * 1e-6)


def test_two_collectives_on_one_link_share_it() -> None:
    def two(share: float, link: str = "gpu") -> Simulation:
        class Costs(SharingCosts):
            def price_comm(self, comm, ranks, rank):
                price = super().price_comm(comm, ranks, rank)
                first = comm.group == 0
                return msgspec.structs.replace(
                    price, link="gpu" if first else link, link_share=share, bytes=0.0
                )

        builders = [Builder(r) for r in range(2)]
        for b in builders:
            works = [
                b.comm(collective(b.group((0, 1), name), 10_000), is_async=True) for name in ("DP", "EP")
            ]
            for work in works:
                b.wait(work)
        return Simulation(one_class_per_rank({b.rank: b.program() for b in builders}), Costs(channels=0))

    alone, shared = two(0.4).timeline, two(1.0).timeline
    assert alone.crowding_ns == 0
    assert shared.iteration_time_ns == pytest.approx(2 * alone.iteration_time_ns, rel=0.03)
    assert two(0.75).timeline.iteration_time_ns == pytest.approx(1.5 * alone.iteration_time_ns, rel=0.03)
    assert two(1.0, link="nic").timeline.crowding_ns == 0


def test_channels_never_hold_more_than_half_of_the_gpu() -> None:
    assert overlapped(SharingCosts(channels=500)).timeline.slowdown_ns == pytest.approx(
        0.5 * 40_900, rel=0.02
    )


def test_the_models_say_what_is_shared() -> None:
    costs = build_cost_model(load_cluster("dgx-h200"))
    assert costs.interference.num_sms == 132
    price = costs.price_comm(collective(0, 1 << 26), tuple(range(8)), 0)
    assert price.channels == 16  # NVLS
    assert costs.price_comm(collective(0, 1 << 26), (0, 1), 0).channels == 24


def test_kernels_of_two_streams_take_turns() -> None:
    b = Builder(0)
    b.kernel(100_000, host=1)
    b.kernel(40_000, host=1, stream=1)
    b.kernel(10_000, host=1)
    job = one_class_per_rank({0: b.program()})
    alone, beside = Simulation(job, TableCosts()), Simulation(job, SharingCosts())
    assert alone.timeline.iteration_time_ns == pytest.approx(110_000, rel=0.001)
    assert beside.timeline.iteration_time_ns == pytest.approx(150_000, rel=0.001)
    assert beside.timeline.slowdown_ns == pytest.approx(80_000, rel=0.001)
    for simulation in (alone, beside):  # each lasts as priced
        times = simulation.op_times(0)
        assert times.end_ns - times.transfer_start_ns == pytest.approx([100_000, 40_000, 10_000])
    late = beside.op_times(0).end_ns - alone.op_times(0).end_ns
    assert late[1:] == pytest.approx([40_000, 40_000], rel=0.001)  # and waits for the others
    assert beside.timeline.breakdown[0].compute == pytest.approx(0.150, rel=0.001)


def test_a_slow_gpu_takes_its_turns_slowly() -> None:
    b = Builder(0)
    b.kernel(100_000, host=1)
    b.kernel(40_000, host=1, stream=1)
    job = one_class_per_rank({0: b.program()})
    slow = Simulation(job, SharingCosts(), Disturbance(slow_ranks={0: 1.5}))
    assert slow.timeline.iteration_time_ns == pytest.approx(1.5 * 140_000, rel=0.001)
    times = slow.op_times(0)
    assert times.end_ns - times.transfer_start_ns == pytest.approx([150_000, 60_000])
    plain = Simulation(job, SharingCosts())
    vector = plain.vector_machine((1.0, 1.5))
    assert vector.run(np.array([1.5])).finish_ns.max() == pytest.approx(slow.timeline.iteration_time_ns)


def test_kernels_that_follow_each_other_on_two_streams_lose_nothing() -> None:
    b = Builder(0)
    b.kernel(100_000, host=1)
    b.wait_event(b.record(), stream=1)
    b.kernel(40_000, host=1, stream=1)
    job = one_class_per_rank({0: b.program()})
    assert Simulation(job, SharingCosts()).timeline.iteration_time_ns == pytest.approx(140_000, rel=0.001)
