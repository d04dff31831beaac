"""Arithmetic on measured iterations: which are warm-up, timed, watched or traced, and what profilers did to the figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

TRACED = 2
WATCHED = 4
"""The first of several does not count: starting CUPTI makes the GPU wait."""
WARM_UP = 3
"""Allocator, cuBLAS, compiled kernels and optimizer state settle in the first iterations, clocks in the next."""
DEFAULT_ITERATIONS = 16
_BUSY = 0.95
"""From here on an iteration is bound by the GPU: its time is that of its kernels."""
_MOST = 0.08
"""A correction beyond this is no correction."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What the iterations of a slice are for: warm-up, then timed without a profiler, then watched by CUPTI alone, then
    traced."""

    warm_up: int
    timed: int
    watched: int = 0
    traced: int = TRACED

    def is_timed(self, index: int) -> bool:
        """Whether nothing but the time of iteration ``index`` is taken."""
        return 0 <= index - self.warm_up < self.timed

    def is_watched(self, index: int) -> bool:
        """Whether only the kernels of iteration ``index`` are recorded."""
        return 0 <= index - self.warm_up - self.timed < self.watched

    def is_traced(self, index: int) -> bool:
        """Whether iteration ``index`` runs under the profiler."""
        return index >= self.warm_up + self.timed + self.watched


def make_schedule(iterations: int, *, traced: int = TRACED) -> Schedule:
    """The schedule of a slice that may run so many iterations; at least one of each kind is kept. Where none are traced
    none are watched."""
    rest = max(3 if traced else 2, iterations - traced)
    warm_up = max(1, min(WARM_UP, rest // 3))
    watched = max(1, min(WATCHED, rest // 3)) if traced else 0
    return Schedule(warm_up=warm_up, timed=max(1, rest - warm_up - watched), watched=watched, traced=traced)


def scale_of(timed_ms: float, *, span_ms: float, busy_ms: float) -> tuple[float, str]:
    """By what to multiply traced durations, and a remark where the two disagree too much to be corrected.

    Where the GPU is the bound, a traced iteration is shorter than a timed one if the pauses around it cooled the GPU. A longer
    one was held up by the profiler's work on the host: kernels take what CUPTI says, there and wherever the host is the bound.
    """
    if min(timed_ms, span_ms, busy_ms) <= 0 or busy_ms / span_ms < _BUSY:
        return 1.0, ""
    scale = timed_ms / span_ms
    if abs(scale - 1) > _MOST:
        return 1.0, (
            f"a traced iteration takes {span_ms:.1f} ms, one without the profiler {timed_ms:.1f} ms: kernel times are the "
            "profiler's"
        )
    return max(1.0, scale), ""


def host_ratio(plain: Mapping[str, Sequence[int]], traced: Mapping[str, Sequence[int]]) -> float:
    """How much of the host time under the profiler remains without it, by the fastest phase of each kind.

    ``plain`` and ``traced``: kind of phase → host time of its occurrences, ns. A phase may wait for the GPU, so the
    fastest one counts: it found room in the launch queue.
    """
    ratios = []
    for kind, times in traced.items():
        others = plain.get(kind)
        if others and min(times) > 0:
            ratios.append((min(times), min(others) / min(times)))
    if not ratios:
        return 1.0
    total = sum(weight for weight, _ in ratios)
    return min(1.0, max(0.2, sum(weight * ratio for weight, ratio in ratios) / total))


def steady_ms(iterations: Sequence[float]) -> float:
    """The time of a steady iteration: the median; 0 of none."""
    return statistics.median(iterations) if iterations else 0.0
