"""Builds the event stream of an iteration from a Kineto trace of it, with the time each op took on the GPU.

What a slice itself adds to the stream (communication, waits, CUDA events, phases) it marks with annotations while the
profiler runs: ``prism::<n>`` is the n-th of the marks it keeps, ``prism::answer`` encloses what answers a call of a
virtual peer (no part of the job: its kernels and allocations are left out), ``prism::stream <handle>`` a launch by which
a stream's number is found, ``prism::end`` ends the iteration. Everything is ordered by when the host issued it.

An op is what the innermost operator launched on one stream; a kernel that no operator launched (a Triton kernel,
an extension's) is an op by its own name. Its duration is the time of its kernels and the gaps the GPU leaves between
kernels that were waiting already; both, and the host's time, from iterations that ran without this profiler where there are
such (:mod:`prism_plugins.capture.kernel_times`).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from prism_plugins.capture.kernel_times import (
    KernelTime,
    KernelTimes,
    Lookup,
    covered_ns,
    queue_gaps,
    waiting_ns,
)
from prism_plugins.capture.kineto import Span, Trace, Work
from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    EventKind,
    OpSignature,
    Phase,
    TensorSpec,
)

ANSWER = "prism::answer"
STREAM = "prism::stream "
END = "prism::end"
_MARK = re.compile(r"prism::(\d+)$")
_DEFAULT_STREAM = 7
_NEVER = 2**63 - 1
_PAUSING = ("optimizer",)
"""Phases in which, as outside of all, pauses of the host are kept where they were: what is derived from other phases (those
of another stage, another micro-batch) has them as a share of its ops' host times."""

_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_LIST_DTYPE = "float32"
"""Kineto does not tell the type of tensors in lists."""


class Mark(NamedTuple):
    """What a slice adds to the stream: the fields of an event. ``stream`` is a ``cudaStream_t``."""

    kind: int
    ref: int = 0
    value: int = 0
    flags: int = 0
    stream: int = 0


class SignatureTable:
    """Distinct ops of a slice, numbered in the order they appear."""

    def __init__(self) -> None:
        self.signatures: list[OpSignature] = []
        self._ids: dict[tuple, int] = {}

    def intern(self, signature: OpSignature) -> int:
        """Number of an op."""
        key = (signature.op, signature.inputs, signature.outputs, signature.scalars)
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = len(self.signatures)
            self.signatures.append(signature)
        return number


class TracedIteration(msgspec.Struct, kw_only=True):
    """An iteration as it was traced."""

    events: np.ndarray
    op_ns: np.ndarray
    """Time of each KERNEL event on its stream, in their order, float64."""
    op_host_ns: np.ndarray
    """What the host took to issue each, what a call with virtual peers took before it included; 0 where not known."""
    pause_ns: float = 0.0
    """Pauses of the host that are events of their own."""
    untimed_ns: float = 0.0
    """Time of kernels that the iterations without this profiler did not have."""
    initial: list[Allocation]
    busy_ns: float
    """Time in which the GPU did something, what answered virtual peers included."""
    span_ns: float
    """From the first kernel's start to the last one's end."""
    host_ns: float
    """Time the host took to issue it: from begin to end without waiting for the GPU."""


class _Launch(NamedTuple):
    at_ns: int
    end_ns: int
    thread: int | str
    work: Work
    op: Span | None


def build_iteration(
    trace: Trace,
    *,
    marks: Sequence[Mark],
    table: SignatureTable,
    live: Sequence[tuple[int, int, str]] = (),
    times: KernelTimes | None = None,
    phases: Sequence[Phase] = (),
) -> TracedIteration:
    """The event stream of a traced iteration.

    Args:
        trace: of one iteration, from begin to end.
        marks: what the annotations ``prism::<n>`` stand for.
        table: receives the ops.
        live: (address, bytes, category) of the allocations that were live at its begin.
        times: of kernels and of the host, from iterations without this profiler.
        phases: what marks of phases refer to.
    """
    answers = _Intervals([a for a in trace.annotations if a.name == ANSWER or a.name.startswith(STREAM)])
    work_of = {work.correlation: work for work in trace.work}
    launches = _launches(trace, work_of)
    handles = {0: _DEFAULT_STREAM}
    for note in trace.annotations:
        if note.name.startswith(STREAM):
            inside = [
                x for x in launches if x.thread == note.thread and note.start_ns <= x.at_ns <= note.end_ns
            ]
            if inside:
                handles[int(note.name.removeprefix(STREAM))] = inside[0].work.stream
    streams = _Streams()
    rows: list[tuple[int, int, tuple[int, int, int, int, int]]] = []
    op_at: list[tuple[int, int]] = []
    timing = _Timing(trace, launches, answers, times)
    pausing = _pausing(trace, marks, phases)
    sync_rows = _sync_rows(trace, streams, answers)
    syncs_at = sorted(row[0] for row in sync_rows)

    durations: dict[tuple[int, int], float] = {}
    hosts: dict[tuple[int, int], float] = {}
    paused = 0.0
    for launch in launches:
        took, host, pause, ahead = timing.of(launch)
        if ahead:
            sync = bisect.bisect_left(syncs_at, launch.at_ns) - 1
            if sync >= 0 and pausing(syncs_at[sync]):
                paused += ahead
                rows.append((syncs_at[sync] - 1, len(rows), (EventKind.HOST, 0, 0, 0, round(ahead))))
            else:
                host += ahead
        if answers.cover(launch.thread, launch.at_ns):
            continue
        work = launch.work
        owner = (id(launch.op) if launch.op is not None else -work.correlation - 1, work.stream)
        if pause and not (pausing(launch.at_ns) and owner not in durations):
            host, pause = host + pause, 0.0
        if owner in durations:
            durations[owner] += took
            hosts[owner] += host
            continue
        durations[owner], hosts[owner] = took, host
        if pause:
            paused += pause
            rows.append((launch.at_ns, len(rows), (EventKind.HOST, 0, 0, 0, round(pause))))
        ref = table.intern(_signature(launch))
        op_at.append(owner)
        rows.append(
            (launch.at_ns, len(rows), (EventKind.KERNEL, 0, streams.number(work.stream), ref, len(op_at) - 1))
        )
    for note in trace.annotations:
        found = _MARK.match(note.name)
        if found is not None and int(found[1]) < len(marks):
            mark = marks[int(found[1])]
            stream = streams.number(handles.get(mark.stream, _DEFAULT_STREAM))
            rows.append((note.start_ns, len(rows), (mark.kind, mark.flags, stream, mark.ref, mark.value)))
    rows += [(at, len(rows) + i, row) for i, (at, row) in enumerate(sync_rows)]
    initial = [Allocation(i, nbytes, category) for i, (_, nbytes, category) in enumerate(live)]
    rows += _memory_rows(trace, answers, {address: i for i, (address, _, _) in enumerate(live)}, len(rows))
    ends_ns = min((a.start_ns for a in trace.annotations if a.name == END), default=_NEVER)
    rows = sorted(row for row in rows if row[0] < ends_ns)
    events = np.array([row[2] for row in rows], EVENT_DTYPE)
    kernels = np.flatnonzero(events["kind"] == EventKind.KERNEL)
    owners = [op_at[i] for i in events["value"][kernels].tolist()]
    events["value"][kernels] = 0
    starts = [w.start_ns for w in trace.work]
    return TracedIteration(
        events=events,
        op_ns=np.array([durations[owner] for owner in owners], np.float64),
        op_host_ns=np.array([hosts[owner] for owner in owners], np.float64),
        pause_ns=paused,
        untimed_ns=timing.untimed_ns,
        initial=initial,
        busy_ns=float(covered_ns(trace.work)),
        span_ns=float(max((w.end_ns for w in trace.work), default=0) - min(starts, default=0)),
        host_ns=_host_ns(trace, ends_ns),
    )


class _Timing:
    """What launches took, asked for in their order."""

    def __init__(
        self, trace: Trace, launches: Sequence[_Launch], answers: _Intervals, times: KernelTimes | None
    ) -> None:
        self.untimed_ns = 0.0
        self._gaps = queue_gaps(trace.work, {x.work.correlation: x.end_ns for x in launches})
        self._answers = answers
        self._streams = _Intervals([a for a in trace.annotations if a.name.startswith(STREAM)])
        self._lookup = Lookup(times) if times is not None else None
        self._call_ns = 0.0
        self._answer: int | None = None

    def of(self, launch: _Launch) -> tuple[float, float, float, float]:
        """Time on the GPU, of the host, of a pause before it, and of the host before it waited, ns.

        The host time of a call with virtual peers is what it took until its answer was launched; the op after it has
        that on top, and what answering took in addition nobody.
        """
        work = launch.work
        traced = float(work.end_ns - work.start_ns + self._gaps.get(work.correlation, 0))
        if self._lookup is None or self._streams.cover(launch.thread, launch.at_ns):
            return traced, 0.0, 0.0, 0.0
        time = self._lookup.next(work)
        if time is None:
            self.untimed_ns += traced
            time = KernelTime(traced, 0.0, 0.0, 0.0)
        answer = self._answers.find(launch.thread, launch.at_ns)
        if answer is not None:
            if answer != self._answer:
                self._call_ns += time.host + time.pause
            self._answer = answer
            return 0.0, 0.0, 0.0, time.ahead
        call_ns, self._call_ns = self._call_ns, 0.0
        return time.duration + time.gap, time.host + call_ns, time.pause, time.ahead


def _pausing(trace: Trace, marks: Sequence[Mark], phases: Sequence[Phase]) -> Callable[[int], bool]:
    """Whether a pause of the host at a time of the trace is kept where it is."""
    changes: list[tuple[int, bool]] = []
    for note in trace.annotations:
        found = _MARK.match(note.name)
        mark = marks[int(found[1])] if found is not None and int(found[1]) < len(marks) else None
        if mark is not None and mark.kind == EventKind.PHASE_BEGIN:
            kind = phases[mark.ref].kind if mark.ref < len(phases) else "unknown"
            changes.append((note.start_ns, kind in _PAUSING))
        elif mark is not None and mark.kind == EventKind.PHASE_END:
            changes.append((note.start_ns, True))
    changes.sort()
    times = [at for at, _ in changes]

    def pausing(at_ns: int) -> bool:
        i = bisect.bisect_right(times, at_ns) - 1
        return i < 0 or changes[i][1]

    return pausing


class _Streams:
    """The default stream is 0, others are numbered as they appear."""

    def __init__(self) -> None:
        self._numbers = {_DEFAULT_STREAM: 0}

    def number(self, cupti: int) -> int:
        return self._numbers.setdefault(cupti, len(self._numbers))


class _Intervals:
    """Disjoint spans by thread."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._of: dict[int | str, tuple[list[int], list[int]]] = {}
        for span in sorted(spans, key=lambda s: s.start_ns):
            starts, ends = self._of.setdefault(span.thread, ([], []))
            starts.append(span.start_ns)
            ends.append(max(span.end_ns, ends[-1] if ends else 0))

    def find(self, thread: int | str, at_ns: int) -> int | None:
        """Begin of the span."""
        starts, ends = self._of.get(thread, ((), ()))
        i = bisect.bisect_right(starts, at_ns) - 1
        return starts[i] if i >= 0 and at_ns <= ends[i] else None

    def cover(self, thread: int | str, at_ns: int) -> bool:
        return self.find(thread, at_ns) is not None

    def cover_any(self, at_ns: int) -> bool:
        return any(self.cover(thread, at_ns) for thread in self._of)


def _launches(trace: Trace, work_of: dict[int, Work]) -> list[_Launch]:
    """Runtime calls that made the GPU work, in order, each with the innermost operator around it."""
    calls: dict[int | str, list[Span]] = {}
    for call in trace.runtime:
        if call.args.correlation in work_of:
            calls.setdefault(call.thread, []).append(call)
    ops: dict[int | str, list[Span]] = {}
    for op in trace.ops:
        ops.setdefault(op.thread, []).append(op)
    launches = []
    for thread, of_thread in calls.items():
        of_thread.sort(key=lambda s: s.start_ns)
        pending = sorted(ops.get(thread, ()), key=lambda s: (s.start_ns, -s.end_ns))
        stack: list[Span] = []
        next_op = 0
        for call in of_thread:
            while next_op < len(pending) and pending[next_op].start_ns <= call.start_ns:
                while stack and stack[-1].end_ns < pending[next_op].start_ns:
                    stack.pop()
                stack.append(pending[next_op])
                next_op += 1
            while stack and stack[-1].end_ns < call.start_ns:
                stack.pop()
            work = work_of[call.args.correlation]
            launches.append(_Launch(call.start_ns, call.end_ns, thread, work, stack[-1] if stack else None))
    launches.sort(key=lambda x: x.at_ns)
    return launches


def _sync_rows(trace: Trace, streams: _Streams, answers: _Intervals) -> list[tuple[int, Any]]:
    """When and where the host waits for a stream (also: reads a value back) or for all."""
    call_of = {call.args.correlation: call for call in trace.runtime}
    rows: list[tuple[int, Any]] = []
    for sync in trace.syncs:
        call = call_of.get(sync.correlation)
        if call is None or answers.cover(call.thread, call.start_ns):
            continue
        if sync.name.startswith("Stream Sync"):
            row = (EventKind.STREAM_SYNC, 0, streams.number(sync.stream), 0, 0)
        elif sync.name.startswith("Context Sync"):
            row = (EventKind.DEVICE_SYNC, 0, 0, 0, 0)
        else:
            continue
        rows.append((call.start_ns, row))
    return rows


def _memory_rows(trace: Trace, answers: _Intervals, known: dict[int, int], order: int) -> list[Any]:
    """Allocations and releases. What is allocated while a call is answered is no part of the job."""
    rows: list[Any] = []
    next_id = len(known)
    for change in sorted(trace.memory, key=lambda c: c.at_ns):  # a file is ordered by thread
        if change.nbytes > 0:
            if answers.cover_any(change.at_ns):
                continue
            known[change.address] = next_id
            row = (EventKind.ALLOC, 0, 0, next_id, change.nbytes)
            next_id += 1
        else:
            number = known.pop(change.address, None)
            if number is None:
                continue
            row = (EventKind.FREE, 0, 0, number, 0)
        rows.append((change.at_ns, order + len(rows), row))
    return rows


def _host_ns(trace: Trace, ends_ns: int) -> float:
    """From the first to the last thing the host did, less what it waited for the GPU."""
    calls = [call for call in trace.runtime if call.start_ns < ends_ns]
    spans = [s for s in (*trace.ops, *calls, *trace.annotations) if s.start_ns < ends_ns]
    if not spans:
        return 0.0
    total = max(s.end_ns for s in spans) - min(s.start_ns for s in spans)
    return float(max(0, total - sum(waiting_ns(calls, trace.work))))


def _signature(launch: _Launch) -> OpSignature:
    if launch.op is None:
        return OpSignature(op=f"kernel::{launch.work.name[:200]}")
    args = launch.op.args
    inputs: list[TensorSpec] = []
    scalars: list[tuple[str, str]] = []
    strides = list(args.strides or ()) + [()] * len(args.dims)
    for i, (kind, dims) in enumerate(zip(args.types, args.dims, strict=False)):
        if kind in _DTYPES:
            inputs.append(_spec(_DTYPES[kind], dims, strides[i]))
        elif kind == "TensorList":
            lists = list(strides[i] or ()) + [()] * len(dims)
            inputs += [_spec(_LIST_DTYPE, d, s) for d, s in zip(dims, lists, strict=False)]
        elif kind in ("Scalar", "ScalarList") and i < len(args.concrete):
            scalars.append((str(i), str(args.concrete[i])))
    return OpSignature(op=launch.op.name, inputs=tuple(inputs), scalars=tuple(_costly(scalars)))


def _costly(scalars: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Arguments that may change what an op costs: a float (a learning rate, a scale) does not, and moves from one
    iteration to the next."""
    return [(name, text) for name, text in scalars if "." not in text and "e-" not in text and text]


def _spec(dtype: str, dims: Any, strides: Any) -> TensorSpec:
    shape = tuple(int(n) for n in dims)
    step, contiguous = 1, []
    for n in reversed(shape):
        contiguous.append(step)
        step *= max(1, n)
    given = tuple(int(n) for n in strides) if strides and len(strides) == len(shape) else ()
    return TensorSpec(dtype, shape, () if given == tuple(reversed(contiguous)) else given)
