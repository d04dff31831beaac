"""Schedules of a slice's iterations and the correction for the profiler."""

from __future__ import annotations

import pytest

from prism_plugins.gpu.timing import Schedule, host_ratio, make_schedule, scale_of, steady_ms


@pytest.mark.parametrize(
    ("iterations", "schedule"), [(16, (3, 7, 4, 2)), (6, (1, 2, 1, 2)), (5, (1, 1, 1, 2)), (1, (1, 1, 1, 2))]
)
def test_every_kind_of_iteration_has_its_share(iterations: int, schedule: tuple[int, int, int, int]) -> None:
    made = make_schedule(iterations)
    assert (made.warm_up, made.timed, made.watched, made.traced) == schedule
    alone = made.warm_up + made.timed
    count = alone + made.watched + 2
    assert [made.is_watched(i) for i in range(count)] == [False] * alone + [True] * made.watched + [False] * 2
    assert [made.is_traced(i) for i in range(count)] == [False] * (count - 2) + [True] * 2
    assert [i for i in range(count) if made.is_timed(i)] == list(range(made.warm_up, alone))


def test_a_replay_traces_nothing() -> None:
    made = make_schedule(16, traced=0)
    assert made == Schedule(warm_up=3, timed=13, traced=0)
    assert not any(made.is_traced(i) or made.is_watched(i) for i in range(16))


def test_gpu_bound_iterations_are_scaled_to_the_timed_ones() -> None:
    scale, remark = scale_of(102.0, span_ms=100.0, busy_ms=99.0)
    assert scale == pytest.approx(1.02)
    assert not remark


def test_a_profiler_that_holds_up_the_host_makes_no_kernel_faster() -> None:
    """An 8-layer job on an H200: without the factor simulated 570 ms, with 0.9898 564 ms, really 580 ms."""
    assert scale_of(580.4, span_ms=586.4, busy_ms=561.2) == (1.0, "")


def test_host_bound_iterations_keep_what_cupti_says() -> None:
    assert scale_of(60.0, span_ms=100.0, busy_ms=40.0) == (1.0, "")
    assert scale_of(0.0, span_ms=100.0, busy_ms=99.0) == (1.0, "")


def test_what_cannot_be_corrected_is_said() -> None:
    scale, remark = scale_of(80.0, span_ms=100.0, busy_ms=99.0)
    assert scale == 1.0
    assert "100.0 ms" in remark


def test_the_profilers_share_of_host_time_is_told_by_the_fastest_phases() -> None:
    plain = {"forward": [100, 60, 900], "backward": [150]}
    traced = {"forward": [300, 120], "backward": [300, 301], "optimizer": [7]}
    assert host_ratio(plain, traced) == pytest.approx((120 * 0.5 + 300 * 0.5) / 420)
    assert host_ratio({}, traced) == 1.0
    assert host_ratio({"forward": [500]}, {"forward": [100]}) == 1.0, "a profiler makes nothing faster"


def test_a_steady_iteration_is_the_median() -> None:
    assert steady_ms([3.0, 1.0, 2.0]) == 2.0
    assert steady_ms([]) == 0.0
