"""When the caching allocator may reuse a block after its release, where other streams use the block.

A block that ``record_stream`` was called for goes through an event on each of those streams when it is released
(``c10/cuda/CUDACachingAllocator.cpp``: ``insert_events``); it is free again at the first allocation that finds the events
passed (``process_events``). The host issues work far ahead of the GPU, so on a busy GPU that is many allocations later,
and what is allocated in between takes other memory: ``active`` and reserved bytes grow, allocated bytes do not.

The host is ahead by at most the launches that CUDA's queue holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prism_plugins.program.model import EventFlag, EventKind, Program

LAUNCH_QUEUE = 1024
"""Launches that wait for the GPU before the next one blocks the host."""


class IssueTimes(NamedTuple):
    """Simulated times of a program's events, shape (num_events,) each, ns from the start of the iteration."""

    host_ns: np.ndarray
    """When the host issues the event, if it never waits for room in the queue."""
    start_ns: np.ndarray
    end_ns: np.ndarray


def host_with_queue(program: Program, times: IssueTimes) -> np.ndarray:
    """When the host comes to each event, shape (num_events,), where a launch waits until the one :data:`LAUNCH_QUEUE`
    before it has started."""
    host = times.host_ns.copy()
    launches = np.flatnonzero(np.isin(program.events["kind"], (EventKind.KERNEL, EventKind.COMM)))
    late = launches[LAUNCH_QUEUE:]
    host[late] = np.maximum(host[late], times.start_ns[launches[: len(late)]])
    return np.maximum.accumulate(host)


class HeldBlock(NamedTuple):
    """A block that is held back after its release; rows of events."""

    alloc: int
    release: int
    reusable: int
    """The ALLOC before which it is free again; the number of events, where that is after the iteration."""


def held_blocks(program: Program, times: IssueTimes) -> list[HeldBlock]:
    """Blocks that are held back while something else is allocated."""
    events = program.events
    kinds = events["kind"]
    shared = EventFlag.OTHER_STREAM | EventFlag.MESSAGE
    born = np.flatnonzero((kinds == EventKind.ALLOC) & ((events["flags"] & shared) != 0))
    if not len(born):
        return []
    born_at = dict(zip(events["ref"][born].tolist(), born.tolist(), strict=True))
    frees = np.flatnonzero(kinds == EventKind.FREE)
    pairs = [
        (born_at[ref], row)
        for ref, row in zip(events["ref"][frees].tolist(), frees.tolist(), strict=True)
        if ref in born_at
    ]
    host = host_with_queue(program, times)
    streams = _Streams(program, times)
    allocs = np.flatnonzero(kinds == EventKind.ALLOC)
    alloc_host = host[allocs]
    held = []
    for alloc, release in pairs:
        free_at = streams.passed(alloc, release)
        if free_at <= host[release]:
            continue
        at = int(np.searchsorted(alloc_host, free_at))
        if at > np.searchsorted(allocs, release):  # something is allocated meanwhile
            held.append(HeldBlock(alloc, release, int(allocs[at]) if at < len(allocs) else len(events)))
    return held


class _Streams:
    """What each stream of a rank, NCCL's among them, has done by a row."""

    def __init__(self, program: Program, times: IssueTimes) -> None:
        self._events = program.events
        kernels = np.flatnonzero(self._events["kind"] == EventKind.KERNEL)
        on = self._events["stream"][kernels]
        self._compute = {
            int(s): _Lane(kernels[on == s], times.end_ns[kernels[on == s]]) for s in np.unique(on).tolist()
        }
        self._messages = _message_lanes(program, times)

    def passed(self, alloc: int, release: int) -> float:
        """When the streams that use the block have come to its release, ns."""
        flags = int(self._events["flags"][alloc])
        latest = 0.0
        if flags & EventFlag.OTHER_STREAM:
            own = int(self._events["stream"][alloc])
            for stream, lane in self._compute.items():
                if stream != own and lane.works_between(alloc, release):
                    latest = max(latest, lane.end_by(release))
        if flags & EventFlag.MESSAGE:
            nbytes = int(self._events["value"][alloc])
            lane = next((lane for lane in self._messages if lane.carries(nbytes, alloc, release)), None)
            latest = max(latest, lane.end_by(release) if lane is not None else 0.0)
        return latest


class _Lane:
    """Rows of a stream's work, ascending, and when each has ended."""

    def __init__(self, rows: np.ndarray, end_ns: np.ndarray, nbytes: np.ndarray | None = None) -> None:
        self._rows = rows
        self._end = np.maximum.accumulate(end_ns) if len(end_ns) else end_ns
        self._nbytes = nbytes

    def works_between(self, low: int, high: int) -> bool:
        """Whether the stream gets work in between."""
        return bool(np.searchsorted(self._rows, high) > np.searchsorted(self._rows, low))

    def carries(self, nbytes: int, low: int, high: int) -> bool:
        """Whether a message of that size is among it."""
        a, b = np.searchsorted(self._rows, (low, high))
        return self._nbytes is not None and bool(np.any(self._nbytes[a:b] == nbytes))

    def end_by(self, row: int) -> float:
        """When all that was issued before ``row`` has ended, ns."""
        count = int(np.searchsorted(self._rows, row))
        return float(self._end[count - 1]) if count else 0.0


def _message_lanes(program: Program, times: IssueTimes) -> list[_Lane]:
    """NCCL's streams for sends and receives: one for each pair of ranks, or, where calls are batched, one for the group."""
    events = program.events
    rows = np.flatnonzero(events["kind"] == EventKind.COMM)
    messages = np.array([c.kind in ("send", "recv") for c in program.comms] + [False])
    rows = rows[messages[events["ref"][rows].astype(np.int64)]]
    _, inverse, counts = np.unique(events["value"][rows], return_inverse=True, return_counts=True)
    batched = counts[inverse] > 1
    lanes: dict[tuple[int, ...], list[int]] = {}
    for row, whole in zip(rows.tolist(), batched.tolist(), strict=True):
        comm = program.comms[events["ref"][row]]
        members = program.groups[comm.group].ranks
        key = (-1, *members) if whole else (members[comm.peer] if comm.peer >= 0 else -1,)
        lanes.setdefault(key, []).append(row)
    found = []
    for of_lane in lanes.values():
        at = np.array(of_lane)
        nbytes = np.array([program.comms[ref].nbytes for ref in events["ref"][at].tolist()])
        found.append(_Lane(at, times.end_ns[at], nbytes))
    return found
