"""What timers between CUDA events show on the predicted timeline."""

import pytest
from builders import Builder, TableCosts, collective, one_class_per_rank

from prism_plugins.simulate.clocks import event_times_ns, timer_spans_ms
from prism_plugins.simulate.engine import Simulation


def simulated(build):
    programs = {}
    for rank in range(2):
        builder = Builder(rank)
        build(builder)
        programs[rank] = builder.program()
    simulation = Simulation(one_class_per_rank(programs), TableCosts())
    return programs[0], simulation.op_times(0)


def test_a_span_holds_what_its_stream_waits_for():
    def build(b):
        b.record()  # 0
        b.kernel(50_000)
        b.record()  # 1: the kernel
        work = b.comm(collective(b.group((0, 1))), is_async=True)
        b.record()  # 2: nothing, the collective runs beside
        b.wait(work)
        b.record()  # 3: the collective
        b.comm(collective(b.group((0, 1))))
        b.record()  # 4: a collective the stream waits for
        b.kernel(90_000, stream=7)
        other = b.record(stream=7)  # 5
        b.wait_event(other)
        b.record()  # 6

    program, times = simulated(build)
    at = event_times_ns(program, times)
    duration = 700 + 2 * 100 + 4 * 100  # TableCosts' price of the collective
    assert at[1] - at[0] >= 50_000
    assert at[2] == pytest.approx(at[1], abs=10_000)
    assert at[3] - at[1] >= duration
    assert at[4] - at[3] >= duration
    assert at[6] == at[5] > at[4]
    ends = times.end_ns[program.events["kind"] == 0]
    assert (at[1], at[5]) == pytest.approx(tuple(ends))


def test_spans_by_name_in_order():
    def build(b):
        for ns in (30_000, 60_000):
            b.record()
            b.kernel(ns)
            b.record()

    program, times = simulated(build)
    spans = timer_spans_ms(program, times, [("fwd", 0, 1), ("fwd", 2, 3), ("all", 0, 3), ("gone", 2, 9)])
    assert spans["fwd"] == pytest.approx((0.03, 0.06), abs=0.002)
    assert spans["all"][0] == pytest.approx(sum(spans["fwd"]), abs=0.002)
    assert "gone" not in spans
    assert timer_spans_ms(program, times, []) == {}
