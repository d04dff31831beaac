"""What a framework's own timers would measure: spans between CUDA events, on the predicted timeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism_plugins.program.model import EventFlag, EventKind, Program
from prism_plugins.simulate.timeline import OpTimes


def event_times_ns(program: Program, times: OpTimes) -> np.ndarray:
    """When the device reaches each EVENT_RECORD of a program, in order, ns from the start of the iteration.

    A record completes when the host issued it and its stream did what it held: kernels, and collectives, works and
    events that the stream waits for.
    """
    rows = np.flatnonzero(np.isin(program.events["kind"], _ON_STREAMS))
    clock: dict[int, float] = {}
    of_event: dict[int, float] = {}
    of_work: dict[int, float] = {}
    records: list[float] = []
    events = program.events[rows]
    for kind, flags, stream, ref, value, host, end in zip(
        events["kind"].tolist(),
        events["flags"].tolist(),
        events["stream"].tolist(),
        events["ref"].tolist(),
        events["value"].tolist(),
        times.host_ns[rows].tolist(),
        times.end_ns[rows].tolist(),
        strict=True,
    ):
        now = clock.get(stream, 0.0)
        if kind == EventKind.KERNEL:
            now = max(now, end)
        elif kind == EventKind.COMM:
            of_work[value] = max(of_work.get(value, 0.0), end)
            if not flags & EventFlag.ASYNC:
                now = max(now, end)
        elif kind == EventKind.WORK_WAIT:
            now = max(now, of_work.get(ref, 0.0))
        elif kind == EventKind.EVENT_WAIT:
            now = max(now, of_event.get(ref, 0.0))
        else:
            now = max(now, host)
            of_event[ref] = now
            records.append(now)
        clock[stream] = now
    return np.array(records)


_ON_STREAMS = (
    EventKind.KERNEL,
    EventKind.COMM,
    EventKind.WORK_WAIT,
    EventKind.EVENT_WAIT,
    EventKind.EVENT_RECORD,
)


def timer_spans_ms(
    program: Program, times: OpTimes, timers: Sequence[tuple[str, int, int]]
) -> dict[str, tuple[float, ...]]:
    """Durations of named spans, ms, by name in the order they ended. ``timers``: (name, ordinal of the EVENT_RECORD
    that begins it, of the one that ends it)."""
    if not timers:
        return {}
    at = event_times_ns(program, times)
    spans: dict[str, list[float]] = {}
    for name, begin, end in timers:
        if max(begin, end) < len(at):
            spans.setdefault(name, []).append(float(at[end] - at[begin]) / 1e6)
    return {name: tuple(values) for name, values in spans.items()}
