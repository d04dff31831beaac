"""What kernels take in a running job, from iterations that CUPTI watched alone (no operators, shapes or memory).

Such iterations follow each other without a pause and the host is hardly held up, so the GPU keeps the clocks, power and
queue of the job; under the whole profiler kernels were 0.3 to 1 % faster, and the host took twice as long. A kernel of a
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
_PAUSE_NS = 2_000
"""What the host takes beyond this before a launch, more than before the quickest quarter of its kind, is a pause of the
script."""
_A_WAIT_NS = 20_000
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
    ahead: float = 0.0
    """Of the host since the launch before until it waited for the GPU, where it did in between; no part of ``host``."""


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
    beside_ns: float
    """Sum of times of kernels on other streams than the busiest."""
    overlap_ns: float
    """Time in which more than one stream was busy."""
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

        Where the GPU is the bound, its idle time goes with the host's; what an iteration is longer then is the kernels', and
        what it is shorter the gaps', which CUPTI makes longer. Where the host is the bound, both are the host's. In between
        only ``host_ratio`` is applied.
        """
        span = statistics.median(self.span_ns)
        surplus = timed_ns - span
        kernels = gaps = 1.0
        if min(span, timed_ns) <= 0:
            pass
        elif self.idle <= _FEW_IDLE:
            surplus += self.idle * span * (1 - host_ratio)
            if surplus > 0:
                kernels = 1 + surplus / max(self.busy_ns, 1.0)
                kernels = kernels if kernels <= 1 + _MOST else 1.0
            elif self.gap_ns:
                gaps = max(0.0, 1 + surplus / self.gap_ns)
        elif self.host_ns >= _HOST_BOUND * span:
            host_ratio = min(_MOST_HOST, max(1 / _MOST_HOST, 1 + surplus / self.host_ns))
        of = {
            key: [
                KernelTime(
                    t.duration * kernels,
                    t.gap * gaps,
                    t.host * host_ratio,
                    t.pause * host_ratio,
                    t.ahead * host_ratio,
                )
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
    spans, tails, busy, beside, overlap, gap_ns, host_ns = [], [], 0.0, 0.0, 0.0, 0.0, 0.0
    for begin, end in itertools.pairwise(marks):
        inside = work[begin + 1 : end]
        times: dict[tuple[str, int], list[KernelTime]] = {}
        for one in inside:
            ahead, host = issue.get(one.correlation, (0.0, 0.0))
            gap = gaps.get(one.correlation, 0)
            time = KernelTime(one.end_ns - one.start_ns, gap, host, 0.0, ahead)
            times.setdefault((one.name, one.stream), []).append(time)
            gap_ns += time.gap
            host_ns += time.host + time.ahead
        iterations.append(times)
        spans.append(float(work[end].start_ns - work[begin].start_ns))
        reached = max((one.end_ns for one in inside), default=work[begin].end_ns)
        tails.append(float(max(0, work[end].start_ns - reached)))
        covered, of_stream = covered_ns(inside), _by_stream(inside)
        busy += covered
        beside += sum(of_stream) - max(of_stream, default=0)
        overlap += sum(of_stream) - covered
    count = len(iterations)
    of = {key: _merged([one[key] for one in iterations if key in one]) for key in set().union(*iterations)}
    return KernelTimes(
        of=of,
        span_ns=tuple(spans),
        busy_ns=busy / count,
        beside_ns=beside / count,
        overlap_ns=overlap / count,
        gap_ns=gap_ns / count,
        host_ns=host_ns / count,
        tail_ns=statistics.median(tails),
    )


def _merged(of_iterations: list[list[KernelTime]]) -> list[KernelTime]:
    """Means over iterations, launch by launch, with pauses told from what a launch of this kernel usually takes."""
    if len({len(times) for times in of_iterations}) > 1:
        every = np.array([time for times in of_iterations for time in times])
        return [KernelTime(*every.mean(axis=0).tolist())]
    table = np.array(of_iterations)  # (iterations, launches, fields)
    host = table[:, :, 2]
    # What only one iteration has is noise, and part of the mean.
    pause = np.median(host, axis=0) - np.quantile(host, 0.25)
    pause[pause < _PAUSE_NS] = 0.0
    mean = table.mean(axis=0)
    return [
        KernelTime(float(row[0]), float(row[1]), max(0.0, float(row[2] - p)), float(p), float(row[4]))
        for row, p in zip(mean, pause, strict=True)
    ]


def _issue_times(runtime: Sequence[Span], work: Sequence[Work]) -> dict[int, tuple[float, float]]:
    """Correlation → time of the host from the end of the launch before until it last waited, and from then (or from that
    launch) to the end of this one, without waits, ns."""
    launches = {one.correlation for one in work}
    issue: dict[int, tuple[float, float]] = {}
    begin, ahead, waited = None, 0.0, 0.0
    calls = zip(runtime, waiting_ns(runtime, work), strict=True)
    for call, wait in sorted(calls, key=lambda pair: pair[0].start_ns):
        launches_now = call.args.correlation in launches
        if begin is not None and wait > _A_WAIT_NS and not launches_now:
            ahead += max(0.0, call.start_ns - begin - waited)
            begin, waited = call.start_ns, 0.0
        waited += wait
        if not launches_now:
            continue
        if begin is not None:
            issue[call.args.correlation] = (ahead, max(0.0, call.end_ns - begin - waited))
        begin, ahead, waited = call.end_ns, 0.0, 0.0
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
    """How long the GPU was busy between two times, gaps between kernels that were queued included."""

    def __init__(self, work: Iterable[Work]) -> None:
        spans: list[list[int]] = []
        for one in sorted(work, key=lambda w: w.start_ns):
            if spans and one.start_ns <= spans[-1][1] + _MAX_GAP_NS:
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


def _by_stream(work: Iterable[Work]) -> list[int]:
    """Time in which each stream was busy."""
    streams: dict[int, list[Work]] = {}
    for one in work:
        streams.setdefault(one.stream, []).append(one)
    return [covered_ns(of_stream) for of_stream in streams.values()]


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
