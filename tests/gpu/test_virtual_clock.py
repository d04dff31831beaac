"""The clock of a replay without a GPU, on a simulated program of four events."""

from __future__ import annotations

import _thread
import threading
import time

import numpy as np
import pytest

from prism_plugins.device import streams
from prism_plugins.errors import FileFormatError
from prism_plugins.program.model import EVENT_DTYPE, EventKind
from prism_plugins.program.replay import ClockPlan
from prism_plugins.replay.virtual_clock import READING_NS, VirtualClock

KINDS = (EventKind.KERNEL, EventKind.EVENT_RECORD, EventKind.COMM, EventKind.EVENT_RECORD)
PLAN = ClockPlan(
    rank=0,
    iteration_ns=9e6,
    kinds=bytes(KINDS),
    host_ns=np.array([1e6, 2e6, 3e6, 4e6]).tobytes(),
    record_ns=np.array([2.5e6, 8e6]).tobytes(),
)


class Job:
    """What is recorded, and the clock that follows it."""

    def __init__(self, plan: ClockPlan = PLAN) -> None:
        self.events: list[tuple[EventKind, int]] = []
        self.real_ns = 50
        self.clock = VirtualClock(
            plan, count=lambda: len(self.events), events=self.recorded, real=lambda: self.real_ns
        )

    def recorded(self) -> np.ndarray:
        return np.array([(kind, 0, 0, ref, 0) for kind, ref in self.events], EVENT_DTYPE)

    def now_ms(self) -> float:
        return self.clock.now_ns() / 1e6

    def iteration(self, kinds=KINDS, *, first_id: int = 1) -> tuple[list[float], bool]:
        """Readings after each event, and whether it was the simulated iteration."""
        self.events.clear()
        self.clock.begin()
        seen = [self.now_ms()]
        for number, kind in enumerate(kinds):
            self.events.append((kind, first_id + number))
            seen.append(self.now_ms())
        return seen, self.clock.end(self.recorded())


def test_it_is_the_real_one_before_training_and_drifts_never_after() -> None:
    job = Job()
    job.real_ns += 7_000_000
    assert job.now_ms() == 7
    for turn in range(5):
        seen, as_simulated = job.iteration(first_id=1 + 10 * turn)
        job.real_ns += 123_456_789
        assert as_simulated
        assert seen == pytest.approx([7 + 9 * turn + t for t in (1, 2, 3, 4, 9)], abs=0.001)
        assert job.now_ms() == pytest.approx(7 + 9 * (turn + 1), abs=0.001), "between iterations"


def test_what_the_garbage_collector_frees_moves_nothing() -> None:
    seen, as_simulated = Job().iteration(
        (EventKind.FREE, KINDS[0], EventKind.ALLOC, EventKind.HOST, *KINDS[1:])
    )
    assert as_simulated
    assert seen == pytest.approx([1, 1, 2, 2, 2, 3, 4, 9], abs=0.01)


def test_another_iteration_than_the_simulated_one_is_told() -> None:
    job = Job()
    assert not job.iteration((*KINDS, EventKind.KERNEL))[1]
    assert job.now_ms() == pytest.approx(9, abs=0.001)
    assert not job.iteration(KINDS[:2])[1], "cut short: an evaluation, the end"
    assert job.now_ms() == pytest.approx(9 + 3, abs=0.001)


def test_cuda_events_show_when_the_device_came_to_them() -> None:
    job = Job()
    job.iteration(first_id=1)
    job.iteration(first_id=11)
    assert job.clock.elapsed_ms(2, 4) == pytest.approx(5.5)
    assert job.clock.elapsed_ms(2, 14) == pytest.approx(9 + 5.5), "over iterations"
    assert job.clock.elapsed_ms(2, 99) is None
    job.clock.begin()
    job.events[:] = [(EventKind.KERNEL, 0), (EventKind.EVENT_RECORD, 21)]
    assert job.clock.elapsed_ms(4, 21) == pytest.approx(18 + 2.5 - 8), "within one that is not over"


def test_a_loop_that_waits_for_the_clock_ends_and_sleep_counts() -> None:
    job = Job()
    job.clock.begin()
    first = job.clock.now_ns()
    readings = [job.clock.now_ns() for _ in range(10)]
    assert readings == [first + READING_NS * (i + 1) for i in range(10)]
    job.clock.slept(0.5)
    assert job.now_ms() == pytest.approx(501, abs=0.01)
    readings = 0
    while job.now_ms() < 10_000:
        readings += 1
    assert readings < 50_000


def test_scripts_read_it_and_pythons_own_library_does_not(monkeypatch) -> None:
    job = Job()

    class Context:
        patch = staticmethod(lambda target, name, new, why: monkeypatch.setattr(target, name, new))

    monkeypatch.setattr(streams, "_event_clock", None)
    real = time.perf_counter_ns()
    job.clock.install(Context())
    job.clock.begin()
    began = time.time(), time.perf_counter(), time.monotonic_ns()
    job.clock.end(job.recorded()[:0])
    job.iteration()
    passed = time.time() - began[0], time.perf_counter() - began[1], (time.monotonic_ns() - began[2]) / 1e9
    assert passed == pytest.approx((0.009,) * 3, abs=2e-6)
    job.clock.slept(3600)
    own = eval("lambda: time.perf_counter_ns()", {"__name__": "threading", "time": time})
    assert 0 <= own() - real < 60e9
    seen: list[int] = []
    beside = threading.Thread(target=lambda: seen.append(time.perf_counter_ns()))
    beside.start()
    beside.join()
    assert 0 <= seen[0] - real < 60e9
    _thread.start_new_thread(
        lambda: seen.append(time.perf_counter_ns()), ()
    )  # as autograd's: Python does not know it
    while len(seen) < 2:
        pass
    assert seen[1] - real > 3600e9
    assert time.perf_counter_ns() - real > 3600e9
    assert streams._event_clock == job.clock.elapsed_ms


@pytest.mark.parametrize("change", [{"kinds": b"1"}, {"host_ns": b"12345"}, {"record_ns": b"1"}])
def test_a_plan_that_contradicts_itself_is_refused(change: dict) -> None:
    given = {name: getattr(PLAN, name) for name in PLAN.__struct_fields__} | change
    with pytest.raises(FileFormatError, match=r"plan\.json"):
        Job(ClockPlan(**given))
