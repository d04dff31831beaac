"""Where spans go in a trace: track numbers, whole-microsecond times, and the host's own track."""

from __future__ import annotations

import numpy as np

from prism_plugins.emit.spans import DeviceSpans
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
    or on two, still do, and sums of lengths keep their value.

    On each track, with rounded starts S and ends E, ``e[i] = max(E[i], S[i] + 1, e[i-1] + 1)`` and
    ``s[i] = max(S[i], e[i-1])``; the first is a running maximum of ``max(E, S + 1) - i``.
    """
    start_us, end_us = np.split(_dithered(np.concatenate((spans.start_ns, spans.end_ns)) / 1e3), 2)
    end_us = np.maximum(end_us, start_us + 1)
    for track in np.unique(tid).tolist():
        index = np.flatnonzero(tid == track)
        index = index[np.argsort(spans.start_ns[index], kind="stable")]
        steps = np.arange(len(index))
        end = np.maximum.accumulate(end_us[index] - steps) + steps
        start_us[index[1:]] = np.maximum(start_us[index[1:]], end[:-1])
        end_us[index] = end
    return start_us, end_us


_GOLDEN = (5**0.5 - 1) / 2
_SAME_US = 0.01
"""Times closer than this are one time."""


def _dithered(times: np.ndarray) -> np.ndarray:
    """Round to integers, equal times alike, order kept, off by at most 1, and unbiased whatever the fractions are.

    Rounding to nearest would bias sums: kernels issued by a host that takes 8.0 µs an op all have the same
    fraction. The k-th distinct time ``t`` becomes ``floor(t + frac(k * golden ratio))``, a sequence that
    spreads over [0, 1) as evenly as one can.
    """
    order = np.argsort(times, kind="stable")
    ascending = times[order]
    is_new = np.diff(ascending, prepend=-np.inf) > _SAME_US
    distinct = ascending[is_new]
    rounded = np.floor(distinct + np.arange(len(distinct)) * _GOLDEN % 1.0).astype(np.int64)
    result = np.empty(len(times), dtype=np.int64)
    result[order] = np.maximum.accumulate(rounded)[np.cumsum(is_new) - 1]
    return result


class HostTimes:
    """Whole-microsecond host times: the host works on row i, or is blocked by it, from ``begin[i]`` to ``end[i]``."""

    def __init__(self, program: Program, times: OpTimes, *, iteration_time_ns: float):
        self.begin = np.maximum.accumulate(np.floor(times.host_ns / 1e3).astype(np.int64))
        last = max(int(iteration_time_ns // 1e3), int(self.begin[-1])) if len(self.begin) else 0
        is_waiting = np.isin(program.events["kind"][-1:], list(SYNC_NAMES))
        self.end = np.append(self.begin[1:], last if is_waiting.any() else self.begin[-1:])
        self.sync_rows = np.flatnonzero(np.isin(program.events["kind"], [int(kind) for kind in SYNC_NAMES]))
