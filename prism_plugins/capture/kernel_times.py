"""What kernels take in a running job, from iterations that CUPTI watched alone (no operators, shapes or memory).

Such iterations follow each other without a pause and the host is hardly held up, so the GPU keeps the clocks, power and
queue of the job; under the whole profiler it idles in between, cools, and kernels are 1 to 5 % faster. A kernel of a
traced iteration is the one of the same name, stream and turn in these.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from prism_plugins.capture.kineto import Span, Trace, Work

MARKER = "spin_kernel"
"""In the name of the kernel that is launched between iterations (``torch.cuda._sleep``)."""
_MAX_GAP_NS = 3_000
"""Between kernels that are queued the GPU needs about a microsecond; a longer gap has another cause."""
_BLOCKING = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
_HOST_SLACK = 3.0
"""A runtime call that takes so many times what its quickest tenth takes waits for the GPU (a full launch queue, where all
but the first launches of an iteration may wait; a copy to pageable memory)."""
_PAUSE_NS = 20_000
"""What the host takes beyond this before a launch, more than before others of its kind, is a pause of the script."""
_FEW_IDLE = 0.05
"""Up to this share of idle time an iteration is bound by the GPU."""
_HOST_BOUND = 0.9
"""From this share of an iteration on that the host needs to issue it, the host is the bound."""
_MOST_HOST = 1.5
_MOST = 0.08
"""A correction of kernel times beyond this is no correction."""


class KernelTime(NamedTuple):
    """One kernel, by means over the iterations, ns."""

    duration: float
    gap: float
    """Before it, on a GPU that had it in its queue already."""
    host: float
    """Of the host since the launch before, without waiting; a pause is apart."""
    pause: float


class Fit(NamedTuple):
    """What times were multiplied by."""

    kernels: float
    gaps: float
    host: float


class KernelTimes(NamedTuple):
    """Kernels of watched iterations, each an iteration's length from begin to begin."""

    of: Mapping[tuple[str, int], Sequence[KernelTime]]
    """(name, CUPTI's stream) → its launches in order; a single one where their number differs among iterations."""
    span_ns: tuple[float, ...]
    busy_ns: float
    """Time in which the GPU did something."""
    gap_ns: float
    """Sum of gaps before kernels that were queued."""
    host_ns: float
    """Time of the host to issue an iteration, without waiting."""
    tail_ns: float
    """From the end of the last kernel to the begin of the next iteration: the script goes on, logs and loads meanwhile."""

    @property
    def idle(self) -> float:
        """Share of an iteration in which the GPU had nothing to do."""
        span = statistics.fmean(self.span_ns)
        return max(0.0, 1 - (self.busy_ns + self.gap_ns) / span) if span else 1.0

    def fitted(self, timed_ns: float, *, host_ratio: float) -> tuple[KernelTimes, Fit]:
        """As in iterations that nobody watches, which take ``timed_ns``. ``host_ratio``: what remains of host time
        without CUPTI, by the phases.

        Where the GPU is the bound, what an iteration is longer is the kernels', and what it is shorter the gaps', which
        CUPTI makes longer. Where the host is the bound, both are the host's. In between only ``host_ratio`` is applied.
        """
        span = statistics.median(self.span_ns)
        surplus = timed_ns - span
        kernels = gaps = 1.0
        if min(span, timed_ns) <= 0:
            pass
        elif self.idle <= _FEW_IDLE:
            if surplus > 0:
                kernels = 1 + surplus / max(self.busy_ns, 1.0)
                kernels = kernels if kernels <= 1 + _MOST else 1.0
            elif self.gap_ns:
                gaps = max(0.0, 1 + surplus / self.gap_ns)
        elif self.host_ns >= _HOST_BOUND * span:
            host_ratio = min(_MOST_HOST, max(1 / _MOST_HOST, 1 + surplus / self.host_ns))
        of = {
            key: [
                KernelTime(t.duration * kernels, t.gap * gaps, t.host * host_ratio, t.pause * host_ratio)
                for t in times
            ]
            for key, times in self.of.items()
        }
        return self._replace(of=of, host_ns=self.host_ns * host_ratio), Fit(kernels, gaps, host_ratio)


def kernel_times(trace: Trace, *, marker: str = MARKER) -> KernelTimes | None:
    """The kernels between markers; the first of several iterations is left out, as starting CUPTI made the GPU wait.

    None where the trace holds no whole iteration.
    """
    work = sorted(trace.work, key=lambda w: w.correlation)
    marks = [i for i, one in enumerate(work) if marker in one.name]
    if len(marks) < 2:
        return None
    if len(marks) > 2:
        marks = marks[1:]
    calls = {call.args.correlation: call for call in trace.runtime}
    gaps = queue_gaps(trace.work, {number: call.end_ns for number, call in calls.items()})
    issue = _issue_times(trace.runtime, trace.work)
    iterations: list[dict[tuple[str, int], list[KernelTime]]] = []
    spans, tails, busy, gap_ns, host_ns = [], [], 0.0, 0.0, 0.0
    for begin, end in itertools.pairwise(marks):
        inside = work[begin + 1 : end]
        times: dict[tuple[str, int], list[KernelTime]] = {}
        for one in inside:
            time = KernelTime(
                one.end_ns - one.start_ns,
                gaps.get(one.correlation, 0),
                issue.get(one.correlation, 0.0),
                0.0,
            )
            times.setdefault((one.name, one.stream), []).append(time)
            gap_ns += time.gap
            host_ns += time.host
        iterations.append(times)
        spans.append(float(work[end].start_ns - work[begin].start_ns))
        reached = max((one.end_ns for one in inside), default=work[begin].end_ns)
        tails.append(float(max(0, work[end].start_ns - reached)))
        busy += covered_ns(inside)
    count = len(iterations)
    of = {key: _merged([one[key] for one in iterations if key in one]) for key in set().union(*iterations)}
    return KernelTimes(
        of, tuple(spans), busy / count, gap_ns / count, host_ns / count, statistics.median(tails)
    )


def _merged(of_iterations: list[list[KernelTime]]) -> list[KernelTime]:
    """Means over iterations, launch by launch, with pauses told from what a launch of this kernel usually takes."""
    if len({len(times) for times in of_iterations}) > 1:
        every = np.array([time for times in of_iterations for time in times])
        return [KernelTime(*every.mean(axis=0).tolist())]
    table = np.array(of_iterations)  # (iterations, launches, fields)
    host = table[:, :, 2]
    # A pause is one in every iteration; what only some have is noise, and part of the mean.
    pause = np.maximum(0.0, host.min(axis=0) - np.median(host) - _PAUSE_NS)
    mean = table.mean(axis=0)
    usual = float((mean[:, 2] - pause).mean())
    return [
        KernelTime(float(row[0]), float(row[1]), usual, float(p)) for row, p in zip(mean, pause, strict=True)
    ]


def _issue_times(runtime: Sequence[Span], work: Sequence[Work]) -> dict[int, float]:
    """Correlation → time of the host from the end of the launch before to the end of this one, without waits, ns."""
    launches = {one.correlation for one in work}
    issue: dict[int, float] = {}
    before, waited = None, 0.0
    calls = zip(runtime, waiting_ns(runtime, work), strict=True)
    for call, wait in sorted(calls, key=lambda pair: pair[0].start_ns):
        waited += wait
        if call.args.correlation not in launches:
            continue
        if before is not None:
            issue[call.args.correlation] = max(0.0, call.end_ns - before - waited)
        before, waited = call.end_ns, 0.0
    return issue


def waiting_ns(runtime: Sequence[Span], work: Iterable[Work]) -> list[float]:
    """How long each runtime call waited for the GPU: never while that did nothing."""
    waits = [0.0] * len(runtime)
    by_name: dict[str, list[int]] = {}
    for i, call in enumerate(runtime):
        if call.name in _BLOCKING:
            waits[i] = float(call.end_ns - call.start_ns)
        else:
            by_name.setdefault(call.name, []).append(i)
    for indices in by_name.values():
        took = np.array([runtime[i].end_ns - runtime[i].start_ns for i in indices], float)
        usual = float(np.quantile(took, 0.1))
        for i in np.flatnonzero(took > _HOST_SLACK * usual + 10_000).tolist():
            waits[indices[i]] = float(int(took[i] - usual))
    busy = _Busy(work)
    return [
        min(wait, busy.between(call.start_ns, call.end_ns)) if wait else 0.0
        for wait, call in zip(waits, runtime, strict=True)
    ]


class _Busy:
    """How long the GPU was busy between two times."""

    def __init__(self, work: Iterable[Work]) -> None:
        spans: list[list[int]] = []
        for one in sorted(work, key=lambda w: w.start_ns):
            if spans and one.start_ns <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], one.end_ns)
            else:
                spans.append([one.start_ns, one.end_ns])
        self._times = [t for span in spans for t in span]
        lengths = [end - start for start, end in spans]
        self._until = [0, *itertools.accumulate(t for length in lengths for t in (length, 0))]

    def between(self, start_ns: int, end_ns: int) -> float:
        return float(self._to(end_ns) - self._to(start_ns))

    def _to(self, at_ns: int) -> int:
        i = bisect.bisect_right(self._times, at_ns)
        inside = at_ns - self._times[i - 1] if i % 2 else 0
        return (self._until[i - 1] if i else 0) + inside


def queue_gaps(work: Iterable[Work], launched: Mapping[int, int]) -> dict[int, int]:
    """Correlation → the gap before a kernel that was launched before the one ahead of it on its stream ended, ns."""
    last: dict[int, int] = {}
    gaps = {}
    for one in sorted(work, key=lambda w: w.start_ns):
        before = last.get(one.stream)
        if before is not None and launched.get(one.correlation, one.start_ns) < before:
            gap = one.start_ns - before
            if 0 < gap <= _MAX_GAP_NS:
                gaps[one.correlation] = gap
        last[one.stream] = max(before or 0, one.end_ns)
    return gaps


def covered_ns(work: Iterable[Work]) -> int:
    """Time in which at least one of them ran."""
    total, reached = 0, 0
    for one in sorted(work, key=lambda w: w.start_ns):
        total += max(0, one.end_ns - max(one.start_ns, reached))
        reached = max(reached, one.end_ns)
    return total


class Lookup:
    """Finds the kernels of a traced iteration, asked for one by one in the order of their launch."""

    def __init__(self, times: KernelTimes | None) -> None:
        self._of = times.of if times is not None else {}
        self._turn: dict[tuple[str, int], int] = {}

    def next(self, work: Work) -> KernelTime | None:
        """The time of this kernel; None where the watched iterations had none such."""
        key = (work.name, work.stream)
        times = self._of.get(key)
        if not times:
            return None
        turn = self._turn[key] = self._turn.get(key, -1) + 1
        return times[min(turn, len(times) - 1)]
