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
            for k, part in enumerate(_disjoint(spans.start_ns[index], spans.end_ns[index])):
                tid = _lane_tid(lane) + k
                self.tid[index[part]] = tid
                self.label[tid] = (lane, k)


def _lane_tid(lane: int) -> int:
    if lane >= COMM_LANE:
        return 10_000 + 10 * (lane - COMM_LANE)
    return DEFAULT_STREAM_TID if lane == 0 else 100 + 100 * lane


def _disjoint(start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
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
    """Starts and ends rounded to microseconds: disjoint on each track, at least 1 µs long, neighbours still touch.

    With rounded ends E and starts S in track order, ``e[i] = max(E[i], S[i] + 1, e[i-1] + 1)`` and
    ``s[i] = max(S[i], e[i-1])``; the recursion is a running maximum of ``E' - i``.
    """
    start_us = np.zeros(len(tid), dtype=np.int64)
    end_us = np.zeros(len(tid), dtype=np.int64)
    for track in np.unique(tid).tolist():
        index = np.flatnonzero(tid == track)
        index = index[np.argsort(spans.start_ns[index], kind="stable")]
        start = np.rint(spans.start_ns[index] / 1e3).astype(np.int64)
        end = np.maximum(np.rint(spans.end_ns[index] / 1e3).astype(np.int64), start + 1)
        steps = np.arange(len(index))
        end = np.maximum.accumulate(end - steps) + steps
        start[1:] = np.maximum(start[1:], end[:-1])
        start_us[index], end_us[index] = start, end
    return start_us, end_us


class HostTimes:
    """Whole-microsecond host times: the host works on row i, or is blocked by it, from ``begin[i]`` to ``end[i]``."""

    def __init__(self, program: Program, times: OpTimes, *, iteration_time_ns: float):
        self.begin = np.maximum.accumulate(np.floor(times.host_ns / 1e3).astype(np.int64))
        last = max(int(iteration_time_ns // 1e3), int(self.begin[-1])) if len(self.begin) else 0
        is_waiting = np.isin(program.events["kind"][-1:], list(SYNC_NAMES))
        self.end = np.append(self.begin[1:], last if is_waiting.any() else self.begin[-1:])
        self.sync_rows = np.flatnonzero(np.isin(program.events["kind"], [int(kind) for kind in SYNC_NAMES]))
