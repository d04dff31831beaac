"""Compiles a stretch of a program into super-steps: one item per synchronisation point of a stream.

Between two synchronisation points a stream runs kernels only. With host issue offsets ``h_j`` (cumulative host time,
known without simulating) and durations ``d_j``, a run that starts when the stream stands at ``S`` ends at::

    max(S + D, base + C),   D = sum d_j,   C = max over j of (h_j + sum over k >= j of d_k)

where ``base`` is the time the host has spent blocked so far. So a run is two numbers, whatever its length, and
only host synchronisation changes ``base``.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec
import numpy as np

from prism_plugins.program.model import EventFlag, EventKind, Program
from prism_plugins.simulate.prices import ProgramPrices, host_ns_of_events

NEVER = -np.inf


class Code(enum.IntEnum):
    """What a stream does at the end of a run."""

    COMM_SYNC = 0
    """Issue a collective and wait for it. arg: op."""
    COMM_ASYNC = 1
    """Issue a collective and go on. arg: op."""
    WAIT_WORK = 2
    """Wait for a collective. arg: work id."""
    WAIT_EVENT = 3
    """Wait for an event of another stream. arg: event id."""
    RECORD = 4
    """An event is recorded here. arg: event id."""
    MARK = 5
    """The host waits for this point. arg: host sync number."""
    SEGMENT = 6
    """The host was blocked: later kernels are issued from another base. arg: host sync number."""
    END = 7


class StreamItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one stream, in order; arrays of equal length, the last item is END."""

    stream: int
    code: np.ndarray
    arg: np.ndarray
    event: np.ndarray
    """Absolute event index of each item."""
    run_ns: np.ndarray
    """D of the run before the item."""
    issue_ns: np.ndarray
    """C of the run before the item; -inf when it is empty."""
    kernels: np.ndarray
    """Absolute event indices of the stream's kernels."""
    first_kernel: np.ndarray
    """Per item: position in ``kernels`` where its run begins."""
    scale: np.ndarray | None = None
    """Per item: how much longer the kernels of its run last than priced, where something slows them down."""
    wait: np.ndarray | None = None
    """Per item: how long the kernels of its run wait for those of other streams, in terms of their own durations."""

    def durations(self, op_ns: np.ndarray, refs: np.ndarray) -> np.ndarray:
        """Durations of the kernels, ns; ``refs`` is the column of the program's events."""
        durations = op_ns[refs[self.kernels]]
        return durations if self.scale is None else durations * self._of_kernels(self.scale)

    def with_waits(self, durations: np.ndarray) -> np.ndarray:
        """Durations of the kernels, each with the wait before it, ns."""
        return durations if self.wait is None else durations * (1 + self._of_kernels(self.wait))

    def _of_kernels(self, values: np.ndarray) -> np.ndarray:
        return np.repeat(values, np.diff(np.append(self.first_kernel, len(self.kernels))))


class CommOps(msgspec.Struct, frozen=True, kw_only=True):
    """Calls, or coalesced batches of calls, as operations on communicators: arrays over the ops, in issue order."""

    event: np.ndarray
    """Absolute index of the event that issues it: the last of a batch."""
    first_event: np.ndarray
    """Absolute index of its first event."""
    stream: np.ndarray
    host_ns: np.ndarray
    """Host offset at which it is issued."""
    work: np.ndarray
    is_async: np.ndarray
    comm: np.ndarray
    """Index into ``Program.comms``; of a batch, its first part."""
    lane: np.ndarray
    """Communicator: the group's index, or for p2p outside a batch ``num_groups * (1 + peer) + group``, because NCCL
    gives such calls a communicator of the pair."""
    batches: dict[int, tuple[int, ...]]
    """Op → indices into ``Program.comms`` of its parts, for ops of several parts."""

    def __len__(self) -> int:
        return len(self.event)

    def parts(self, op: int) -> tuple[int, ...]:
        """Indices into ``Program.comms``."""
        return self.batches.get(op) or (int(self.comm[op]),)

    def used_comms(self) -> list[int]:
        """Indices into ``Program.comms`` that some op uses, ascending."""
        used = set(np.flatnonzero(np.bincount(self.comm)).tolist())
        return sorted(used.union(*self.batches.values()))


class HostSync(msgspec.Struct, frozen=True, kw_only=True):
    """The host waits."""

    event: int
    host_ns: float
    streams: tuple[int, ...]
    """Streams it waits for."""
    cuda_event: int = -1
    """Or the recorded event it waits for."""
    everything: bool = False
    """Also for all communicators (device synchronise)."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Events ``[lo, hi)`` of a program, compiled."""

    program: Program
    prices: ProgramPrices
    lo: int
    hi: int
    host_end_ns: np.ndarray
    """Cumulative host time at the end of each event, without blocking; continues from ``host0``."""
    host0: float
    streams: tuple[StreamItems, ...]
    ops: CommOps
    syncs: tuple[HostSync, ...]
    phase_marks: np.ndarray
    """Absolute indices of the events at which phases begin and end."""

    @property
    def host_at_end(self) -> float:
        """Cumulative host time when the stretch has been issued."""
        return float(self.host_end_ns[-1]) if len(self.host_end_ns) else self.host0


def compile_stretch(
    program: Program,
    prices: ProgramPrices,
    *,
    lo: int,
    hi: int,
    host0: float = 0.0,
    launch_queue: int = 0,
) -> Stretch:
    """Compile events ``[lo, hi)``; ``host0`` is the host time of what came before, ``launch_queue`` how many kernels the
    GPU takes in advance (0: all)."""
    events = program.events[lo:hi]
    kind, stream, ref = (np.ascontiguousarray(events[f]) for f in ("kind", "stream", "ref"))
    host_end = host_ns_of_events(kind, ref, events["value"], prices)
    np.cumsum(host_end, out=host_end)
    host_end += host0

    ops = comm_ops(program, lo=lo, hi=hi, host_end=host_end)
    syncs = _host_syncs(kind, stream, ref, host_end, lo)

    launched = np.flatnonzero(kind == EventKind.KERNEL)
    launched = launched[prices.op_launches[ref[launched]]]
    launched_on = stream[launched]
    queue = _queue_waits(launched, launched_on, host_end, lo, launch_queue)
    syncs = tuple(sorted((*syncs, *(q.sync for q in queue)), key=lambda sync: sync.event)) if queue else syncs

    simple = np.flatnonzero(
        (kind == EventKind.WORK_WAIT) | (kind == EventKind.EVENT_WAIT) | (kind == EventKind.EVENT_RECORD)
    )
    comm_at = ops.event - lo
    comm_code = np.where(ops.is_async, int(Code.COMM_ASYNC), int(Code.COMM_SYNC))
    comm_stream = ops.stream

    counts = [np.bincount(streams) for streams in (launched_on, stream[simple], comm_stream)]
    synced = {s for sync in syncs for s in sync.streams if s >= 0}
    used = sorted(synced.union(*(np.flatnonzero(count).tolist() for count in counts)))
    compiled = []
    for s in used:
        own = simple[stream[simple] == s]
        mine = np.flatnonzero(comm_stream == s)
        ended = [q for q in queue if q.stream == s]
        at, code, arg = _with_host_syncs(
            np.concatenate((own, comm_at[mine], np.array([q.after for q in ended], np.int64))),
            np.concatenate((_SIMPLE_CODE[kind[own]], comm_code[mine], np.full(len(ended), Code.RECORD))),
            np.concatenate(
                (ref[own].astype(np.int64), mine, np.array([q.sync.cuda_event for q in ended], np.int64))
            ),
            syncs,
            stream=s,
            lo=lo,
        )
        kernels = launched[launched_on == s]
        durations = prices.op_ns[ref[kernels]]
        compiled.append(
            _stream_items(s, (np.append(at, hi - lo), code, arg), kernels, durations, host_end[kernels], lo)
        )
    return Stretch(
        program=program,
        prices=prices,
        lo=lo,
        hi=hi,
        host_end_ns=host_end,
        host0=host0,
        streams=tuple(compiled),
        ops=ops,
        syncs=syncs,
        phase_marks=np.flatnonzero((kind == EventKind.PHASE_BEGIN) | (kind == EventKind.PHASE_END)) + lo,
    )


_QUEUE_STEP = 32
"""Waits for room in the launch queue are looked at every so many launches: each cuts the runs of all streams."""

_SIMPLE_CODE = np.full(256, -1, dtype=np.int64)
_SIMPLE_CODE[EventKind.WORK_WAIT] = Code.WAIT_WORK
_SIMPLE_CODE[EventKind.EVENT_WAIT] = Code.WAIT_EVENT
_SIMPLE_CODE[EventKind.EVENT_RECORD] = Code.RECORD


def comm_ops(
    program: Program, *, lo: int = 0, hi: int | None = None, host_end: np.ndarray | None = None
) -> CommOps:
    """Group the COMM events of ``[lo, hi)`` by work id; a batch is issued with its last event.

    ``host_end`` is the host offset of each event; zeros stand in where only the order matters.
    """
    events = program.events[lo:hi]
    index = np.flatnonzero(events["kind"] == EventKind.COMM)
    work = events["value"][index]
    order = np.argsort(work, kind="stable")
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = work[order][1:] != work[order][:-1]
    starts = np.flatnonzero(opens)
    sizes = np.diff(np.append(starts, len(order)))
    first, last = order[starts], order[starts + sizes - 1]
    by_issue = np.argsort(last, kind="stable")
    starts, sizes, first, last = starts[by_issue], sizes[by_issue], first[by_issue], last[by_issue]
    ref = events["ref"][index].astype(np.int64)
    batches = {
        op: tuple(ref[order[starts[op] : starts[op] + sizes[op]]].tolist())
        for op in np.flatnonzero(sizes > 1).tolist()
    }
    num_groups = len(program.groups)
    pair_lane = np.array(
        [c.group + (num_groups * (1 + c.peer) if c.kind in ("send", "recv") else 0) for c in program.comms],
        dtype=np.int64,
    )
    group = np.array([c.group for c in program.comms], dtype=np.int64)
    comm = ref[first]
    at = index[last]
    flags = events["flags"][index]
    is_async = (flags[last] & int(EventFlag.ASYNC)).astype(bool)
    return CommOps(
        event=at + lo,
        first_event=index[first] + lo,
        stream=events["stream"][at].astype(np.int64),
        host_ns=np.zeros(len(at)) if host_end is None else host_end[at],
        work=work[last],
        is_async=is_async,
        comm=comm,
        lane=np.where(sizes > 1, group[comm], pair_lane[comm]) if len(comm) else comm,
        batches=batches,
    )


def _host_syncs(
    kind: np.ndarray, stream: np.ndarray, ref: np.ndarray, host_end: np.ndarray, lo: int
) -> tuple[HostSync, ...]:
    index = np.flatnonzero(
        (kind == EventKind.STREAM_SYNC) | (kind == EventKind.DEVICE_SYNC) | (kind == EventKind.EVENT_SYNC)
    )
    if not len(index):
        return ()
    stream_sync, event_sync = int(EventKind.STREAM_SYNC), int(EventKind.EVENT_SYNC)
    device_streams: tuple[int, ...] = ()
    if (kind[index] == EventKind.DEVICE_SYNC).any():
        busy = np.bincount(stream[(kind == EventKind.KERNEL) | (kind == EventKind.COMM)])
        device_streams = tuple(np.flatnonzero(busy).tolist())
    syncs = []
    for i in index.tolist():
        if kind[i] == stream_sync:
            syncs.append(HostSync(event=lo + i, host_ns=float(host_end[i]), streams=(int(stream[i]),)))
        elif kind[i] == event_sync:
            syncs.append(
                HostSync(event=lo + i, host_ns=float(host_end[i]), streams=(), cuda_event=int(ref[i]))
            )
        else:
            syncs.append(
                HostSync(event=lo + i, host_ns=float(host_end[i]), streams=device_streams, everything=True)
            )
    return tuple(syncs)


class _QueueWait(NamedTuple):
    """The host waits for room in the launch queue."""

    sync: HostSync
    """At the event before the launch; for an event of its own."""
    stream: int
    after: int
    """Position right behind the kernel that has to end first, on this stream."""


def _queue_waits(
    launches: np.ndarray, streams: np.ndarray, host_end: np.ndarray, lo: int, depth: int
) -> list[_QueueWait]:
    """Waits of launches (positions, their streams) for room, at every :data:`_QUEUE_STEP`-th launch."""
    if not depth:
        return []
    waits = []
    for i in range(depth, len(launches), _QUEUE_STEP):
        before, freed = int(launches[i]) - 1, int(launches[i - depth])
        sync = HostSync(
            event=lo + before, host_ns=float(host_end[before]), streams=(), cuda_event=-2 - lo - freed
        )
        waits.append(_QueueWait(sync, int(streams[i - depth]), freed + 1))
    return waits


def _with_host_syncs(
    at: np.ndarray, code: np.ndarray, arg: np.ndarray, syncs: tuple[HostSync, ...], *, stream: int, lo: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Insert a MARK where the host waits for this stream and a SEGMENT after every host wait; sort by event."""
    if syncs:
        where = np.array([s.event - lo for s in syncs], dtype=np.int64)
        number = np.arange(len(syncs), dtype=np.int64)
        marked = np.array([stream in s.streams for s in syncs], dtype=bool)
        at = np.concatenate((at, where[marked], where))
        code = np.concatenate(
            (code, np.full(int(marked.sum()), Code.MARK), np.full(len(syncs), Code.SEGMENT))
        )
        arg = np.concatenate((arg, number[marked], number))
    order = np.lexsort((code, at))
    return at[order], code[order], arg[order]


def recut(
    stretch: Stretch, items: StreamItems, scale: np.ndarray, wait: np.ndarray | None = None
) -> StreamItems:
    """The same items with the kernels of each run lasting ``scale`` times as they did and, if given, waiting for
    ``wait`` times their new durations; shape (num_items,) each."""
    scaled = msgspec.structs.replace(
        items,
        scale=scale if items.scale is None else items.scale * scale,
        wait=items.wait if wait is None else wait,
    )
    durations = scaled.with_waits(scaled.durations(stretch.prices.op_ns, stretch.program.events["ref"]))
    run_ns, issue_ns = _run_numbers(
        durations,
        stretch.host_end_ns[items.kernels - stretch.lo],
        items.first_kernel,
        np.append(items.first_kernel[1:], len(durations)),
    )
    return msgspec.structs.replace(scaled, run_ns=run_ns, issue_ns=issue_ns)


def slowed(stretch: Stretch, factor: float) -> Stretch:
    """A stretch whose kernels all last ``factor`` times as long."""
    streams = tuple(recut(stretch, items, np.full(len(items.code), factor)) for items in stretch.streams)
    return msgspec.structs.replace(stretch, streams=streams)


def _run_numbers(
    durations: np.ndarray, issued: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """D and C of the runs ``[start, stop)`` of kernels."""
    before = np.zeros(len(durations) + 1)
    np.cumsum(durations, out=before[1:])
    issue = np.full(len(start), NEVER)
    filled = np.flatnonzero(stop > start)
    if len(filled):
        issue[filled] = np.maximum.reduceat(issued - before[:-1], start[filled]) + before[stop[filled]]
    return before[stop] - before[start], issue


def _stream_items(
    stream: int,
    actions: tuple[np.ndarray, np.ndarray, np.ndarray],
    kernels: np.ndarray,
    durations: np.ndarray,
    issued: np.ndarray,
    lo: int,
) -> StreamItems:
    """Cut a stream's kernels (positions, durations, host issue offsets) into runs between its actions (positions, the
    last being the end of the stretch; codes; arguments)."""
    at, code, arg = actions
    stop = np.searchsorted(kernels, at)
    start = np.concatenate(([0], stop[:-1]))
    run_ns, issue_ns = _run_numbers(durations, issued, start, stop)
    return StreamItems(
        stream=stream,
        code=np.append(code, int(Code.END)),
        arg=np.append(arg, 0),
        event=at + lo,
        run_ns=run_ns,
        issue_ns=issue_ns,
        kernels=kernels + lo,
        first_kernel=start,
    )
