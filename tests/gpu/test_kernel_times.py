"""Kernels of iterations that CUPTI watched alone: what they take, what the host takes, and that a simulation of both takes what
the iteration took."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from prism_plugins.capture.kernel_times import KernelTime, KernelTimes, Lookup, kernel_times
from prism_plugins.capture.kineto import Work, parse_trace

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_recorded_iterations


def event(cat: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}


class Watched:
    """Writes what CUPTI alone sees."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self.now = self.free = 0.0
        self.number = 0

    def launch(self, name: str, took: float, *, host: float = 10.0, gap: float = 1.0) -> None:
        self.number += 1
        self.now += host
        self.events.append(
            event("cuda_runtime", "cudaLaunchKernel", self.now - 4, 4, correlation=self.number)
        )
        start = max(self.now + 1, self.free + gap)
        self.free = start + took
        self.events.append(event("kernel", name, start, took, correlation=self.number, stream=7))

    def marker(self) -> None:
        self.launch("spin_kernel(long)", 1.0)

    def times(self) -> KernelTimes | None:
        return kernel_times(parse_trace(json.dumps({"traceEvents": self.events}).encode(), source="watched"))


def work(name: str, stream: int = 7) -> Work:
    return Work(name, stream, 1, 0, 0)


def test_kernels_are_means_over_iterations_but_the_first() -> None:
    watched = Watched()
    for took in (900.0, 100.0, 300.0):
        watched.marker()
        watched.launch("a", took)
        watched.launch("b", 50.0, gap=2.0)
    watched.marker()
    times = watched.times()
    lookup = Lookup(times)
    assert lookup.next(work("a")).duration == pytest.approx(200_000)
    found = lookup.next(work("b"))
    assert (found.duration, found.gap, found.host) == (pytest.approx(50_000), pytest.approx(2_000), 10_000)
    assert lookup.next(work("c")) is None
    assert len(times.span_ns) == 2
    assert times.idle < 0.1


def test_a_pause_is_one_in_every_iteration() -> None:
    watched = Watched()
    for turn in range(4):
        watched.marker()
        for i in range(9):
            late = 500.0 if i == 4 else 300.0 if i == turn else 10.0
            watched.launch("a", 2.0, host=late)
    watched.marker()
    lookup = Lookup(watched.times())
    found = [lookup.next(work("a")) for _ in range(9)]
    assert [round(t.pause / 1e3) for t in found] == [0, 0, 0, 0, 490, 0, 0, 0, 0], "less the usual"
    total = sum(t.host + t.pause for t in found)
    assert total == pytest.approx(1e3 * (500 + 8 * 10 + 290 * 2 / 3 + 290 / 3), rel=0.001), "nothing is lost"


def test_a_long_call_is_no_wait_while_the_gpu_does_nothing() -> None:
    watched = Watched()
    for _ in range(2):
        watched.marker()
        watched.launch("a", 20.0)
        watched.events.append(event("cuda_runtime", "cudaStreamSynchronize", watched.now, 1000.0))
        watched.launch("b", 20.0, host=1005.0)
    watched.marker()
    lookup = Lookup(watched.times())
    lookup.next(work("a"))
    found = lookup.next(work("b"))
    assert found.host + found.pause == pytest.approx(1e3 * (1005 - 22), abs=2_000)


def test_what_streams_do_beside_each_other_is_known() -> None:
    watched = Watched()
    for _ in range(2):
        watched.marker()
        watched.launch("a", 100.0)
        watched.launch("b", 60.0)
        side = watched.events[-1]
        side["args"]["stream"], side["ts"] = 13, side["ts"] - 41.0
    watched.marker()
    times = watched.times()
    assert (times.beside_ns, times.overlap_ns) == (pytest.approx(60_000), pytest.approx(40_000, abs=1_100))


def test_what_the_host_does_before_it_waits_is_apart() -> None:
    watched = Watched()
    for _ in range(2):
        watched.marker()
        watched.launch("a", 900.0)
        watched.events.append(event("cuda_runtime", "cudaStreamSynchronize", watched.now + 300.0, 601.0))
        watched.launch("b", 20.0, host=950.0)
    watched.marker()
    lookup = Lookup(watched.times())
    lookup.next(work("a"))
    found = lookup.next(work("b"))
    assert found.ahead == pytest.approx(300_000)
    assert found.host + found.pause == pytest.approx(50_000, abs=2_000)


def test_launches_that_differ_in_number_have_one_mean() -> None:
    watched = Watched()
    for number in (1, 2, 3):
        watched.marker()
        for _ in range(number):
            watched.launch("a", 10.0 * number)
    watched.marker()
    lookup = Lookup(watched.times())
    assert [lookup.next(work("a")).duration for _ in range(3)] == [pytest.approx(26_000)] * 3


def test_without_a_whole_iteration_nothing_is_known() -> None:
    watched = Watched()
    watched.marker()
    watched.launch("a", 10.0)
    assert watched.times() is None


def made(*, span: float = 100.0, busy: float = 96.0, gap: float = 3.0, host: float = 14.0) -> KernelTimes:
    return KernelTimes(
        {("a", 7): [KernelTime(busy, gap, 10.0, 4.0)]}, (span,), busy, 0.0, 0.0, gap, host, 1.0
    )


def test_where_the_gpu_is_the_bound_times_agree_with_unwatched_iterations() -> None:
    longer, fit = made().fitted(102.0, host_ratio=0.5)
    assert fit == (pytest.approx(1 + 2.5 / 96), 1.0, 0.5), "2 more, and half of the idle one less"
    assert longer.of["a", 7][0] == KernelTime(pytest.approx(98.5), 3.0, 5.0, 2.0)
    shorter, fit = made().fitted(98.5, host_ratio=1.0)
    assert (fit.kernels, fit.gaps) == (1.0, 0.5)
    assert shorter.of["a", 7][0].gap == 1.5
    assert made().fitted(60.0, host_ratio=1.0)[1].gaps == 0.0
    assert made().fitted(120.0, host_ratio=1.0)[1].kernels == 1.0, "that is no correction"


def test_where_the_host_is_the_bound_the_difference_is_its_own() -> None:
    times, fit = made(busy=50.0, host=95.0).fitted(81.0, host_ratio=0.5)
    assert fit == (1.0, 1.0, pytest.approx(0.8))
    assert times.host_ns == pytest.approx(76.0)
    assert made(busy=50.0, host=95.0).fitted(300.0, host_ratio=0.5)[1].host == 1.5, "no more than that"


def test_where_both_wait_for_each_other_phases_tell() -> None:
    assert made(busy=50.0, host=70.0).fitted(80.0, host_ratio=0.8)[1] == (1.0, 1.0, 0.8)


@pytest.mark.parametrize("job", check_recorded_iterations.JOBS)
def test_a_simulation_takes_what_the_iteration_took(job: str) -> None:
    """Iterations of an H200: one waits for the GPU at its micro-batches and has two streams, one is as far ahead of the GPU as
    the launch queue is deep, one is bound by the host. With the host's time spread evenly they came out 1 to 4 % short."""
    watched, traced = (check_recorded_iterations.load(job, what) for what in ("watched", "traced"))
    times = kernel_times(watched)
    took = statistics.mean(times.span_ns) / 1e6
    assert check_recorded_iterations.simulated_ms(traced, times) == pytest.approx(took, rel=0.008)
