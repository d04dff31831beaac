"""Where spans go in a trace: track numbers, whole-microsecond times, and the host's own track."""

from __future__ import annotations

import numpy as np

from prism_plugins.emit.spans import DeviceSpans, SpanKind
from prism_plugins.program.model import EventKind, Program
from prism_plugins.simulate.timeline import COMM_LANE, OpTimes

DEFAULT_STREAM_TID = 7
"""CUPTI's number of the legacy default stream in a PyTorch process; HTA ignores kernels on stream 0."""

SYNC_NAMES = {
    EventKind.EVENT_SYNC: "cudaEventSynchronize",
    EventKind.STREAM_SYNC: "cudaStreamSynchronize",
    EventKind.DEVICE_SYNC: "cudaDeviceSynchronize",
}


class Tracks:
    """Thread numbers of the device tracks. A lane whose spans overlap is spread over several tracks."""

    def __init__(self, spans: DeviceSpans):
        self.tid = np.zeros(len(spans.row), dtype=np.int64)
        self.label: dict[int, tuple[int, int]] = {}
        """tid → (lane, which track of the lane)."""
        for lane in np.unique(spans.lane).tolist():
            index = np.flatnonzero(spans.lane == lane)
            for k, part in enumerate(disjoint(spans.start_ns[index], spans.end_ns[index])):
                tid = _lane_tid(lane) + k
                self.tid[index[part]] = tid
                self.label[tid] = (lane, k)


def _lane_tid(lane: int) -> int:
    if lane >= COMM_LANE:
        return 10_000 + 10 * (lane - COMM_LANE)
    return DEFAULT_STREAM_TID if lane == 0 else 100 + 100 * lane


def disjoint(start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """Split intervals into as few lists as a greedy pass needs so that no two of a list overlap; almost always one."""
    order = np.argsort(start, kind="stable")
    if len(order) < 2 or np.all(start[order][1:] >= end[order][:-1] - 0.5):
        return [order]
    lists: list[list[int]] = []
    free_at: list[float] = []
    for i in order.tolist():
        for k, free in enumerate(free_at):
            if start[i] >= free - 0.5:
                lists[k].append(i)
                free_at[k] = end[i]
                break
        else:
            lists.append([i])
            free_at.append(end[i])
    return [np.array(part) for part in lists]


def whole_microseconds(spans: DeviceSpans, tid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends in whole microseconds: disjoint on each track, at least 1 long; spans that touch, on one track
    or on two, still do, and the device's compute, other and idle time keep their sums (:func:`_rounded`).

    On each track, with rounded starts S and ends E, ``e[i] = max(E[i], S[i] + 1, e[i-1] + 1)`` and
    ``s[i] = max(S[i], e[i-1])``; the first is a running maximum of ``max(E, S + 1) - i``.
    """
    start_us, end_us = _rounded(spans)
    for track in np.unique(tid).tolist():
        index = np.flatnonzero(tid == track)
        index = index[np.argsort(spans.start_ns[index], kind="stable")]
        steps = np.arange(len(index))
        end = np.maximum.accumulate(end_us[index] - steps) + steps
        start_us[index[1:]] = np.maximum(start_us[index[1:]], end[:-1])
        end_us[index] = end
    return start_us, end_us


_SAME_US = 0.01
"""Times closer than this are one time."""


def _rounded(spans: DeviceSpans) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends as integers, µs: equal times alike, order kept, no span empty.

    Rounding to nearest would bias sums: kernels issued by a host that takes 8.0 µs an op all have the same fraction.
    So errors are diffused: between two neighbouring times the device computes, does something else or idles, and a
    time is rounded down or up as brings the sum of all such intervals so far closer to what it is.
    """
    n = len(spans.row)
    times = np.concatenate((spans.start_ns, spans.end_ns)) / 1e3
    order = np.argsort(times, kind="stable")
    is_new = np.diff(times[order], prepend=-np.inf) > _SAME_US
    position = np.empty(2 * n, dtype=np.int64)
    position[order] = np.cumsum(is_new) - 1
    distinct = times[order][is_new]
    start, end = position[:n], position[n:]

    def num_active(which: np.ndarray) -> np.ndarray:
        change = np.bincount(start[which], minlength=len(distinct)) - np.bincount(
            end[which], minlength=len(distinct)
        )
        return np.cumsum(change)

    busy, computing = num_active(np.ones(n, dtype=bool)), num_active(spans.kind == SpanKind.COMPUTE)
    interval_kind = np.where(computing > 0, 2, busy > 0).tolist()
    last_start = np.full(len(distinct), -1, dtype=np.int64)
    np.maximum.at(last_start, end, start)

    excess = [0.0, 0.0, 0.0]
    """By how much the rounded intervals of a kind are longer than they should be, µs."""
    rounded: list[int] = []
    error = 0.0
    for k, (time, opens) in enumerate(zip(distinct.tolist(), last_start.tolist(), strict=True)):
        whole = int(time // 1)
        if k:
            kind = interval_kind[k - 1]
            so_far = excess[kind] - error
            if abs(so_far + whole - time) > abs(so_far + whole + 1 - time):
                whole += 1
            whole = max(whole, rounded[-1], rounded[opens] + 1 if opens >= 0 else 0)
            excess[kind] = so_far + whole - time
        error = whole - time
        rounded.append(whole)
    result = np.array(rounded, dtype=np.int64)
    return result[start], result[end]


class HostTimes:
    """Whole-microsecond host times: the host works on row i, or is blocked by it, from ``begin[i]`` to ``end[i]``."""

    def __init__(self, program: Program, times: OpTimes, *, iteration_time_ns: float):
        self.begin = np.maximum.accumulate(np.floor(times.host_ns / 1e3).astype(np.int64))
        last = max(int(iteration_time_ns // 1e3), int(self.begin[-1])) if len(self.begin) else 0
        is_waiting = np.isin(program.events["kind"][-1:], list(SYNC_NAMES))
        self.end = np.append(self.begin[1:], last if is_waiting.any() else self.begin[-1:])
        self.sync_rows = np.flatnonzero(np.isin(program.events["kind"], [int(kind) for kind in SYNC_NAMES]))
