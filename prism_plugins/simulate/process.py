"""The machine: advances all streams of all cells until every time is known, or nothing can advance.

A slot is a time that is computed once: the end of a rendezvous or of an op, an event record, a point the host waits
for, the host's base after a wait, a stream's time at the end of a stretch. Processes (one per stream, one per
host that ever waits) run until they need an unknown slot.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from prism_plugins.simulate.compile import Code, StreamItems
from prism_plugins.simulate.link import Layer
from prism_plugins.simulate.unit import Unit

# Item codes of the inner loop; the batch forms serve ops of several parts.
_SYNC, _ASYNC, _WAIT, _SET, _BASE, _END, _SYNC_BATCH, _ASYNC_BATCH, _HOST = range(9)
_NEVER = float("-inf")


class Process:
    """A stream or a host of one unit."""

    __slots__ = ("base", "index", "items", "now", "offset", "stream", "trace", "unit", "waits_for")

    def __init__(self, unit: Unit, stream: int) -> None:
        self.unit = unit
        self.stream = stream
        """-1 for the host."""
        self.items: list[tuple] = []
        self.index = 0
        self.now = 0.0
        self.base = 0.0
        self.trace: list[float] = []
        """Stream time after each item."""
        self.offset = 0
        """Items before the stretch's own."""
        self.waits_for = -1
        """Slot whose value the stream takes over when it resumes; -1: the item is done again."""


class Machine:
    """Times of all units."""

    def __init__(self, layers: list[Layer], units: list[Unit]) -> None:
        num_meetings = sum(layer.num_slots for layer in layers)
        self._value: list[float | None] = [None] * num_meetings
        self._arrival: list[float] = [_NEVER] * num_meetings
        self._missing: list[int] = [n for layer in layers for n in layer.expected.tolist()]
        self._duration: list[float] = [d for layer in layers for d in layer.duration_ns.tolist()]
        self._units = units
        self._processes: list[Process] = []
        self._stream_process: dict[tuple[int, int], Process] = {}
        for unit in units:
            self._allocate(unit)
        for unit in units:
            self._load(unit)
        self._waiters: list = [None] * len(self._value)
        """Per slot: nothing, a process, or a list of processes, batches (slot) and arrivals (slot, time, parts)."""
        self._known: np.ndarray | None = None
        self._transfer: np.ndarray | None = None

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────

    def durations(self, slots: np.ndarray) -> np.ndarray:
        """Transfer times of meetings."""
        if self._transfer is None:
            self._transfer = np.array(self._duration)
        return self._transfer[slots]

    def trace(self, unit: Unit, stream: int) -> list[float]:
        """Stream time after each of the stretch's own items."""
        process = self._stream_process[id(unit), stream]
        return process.trace[process.offset :]

    def start(self, unit: Unit, stream: int) -> float:
        """Stream time at the beginning of a stretch."""
        process = self._stream_process[id(unit), stream]
        return process.trace[process.offset - 1] if process.offset else 0.0

    def bases(self, unit: Unit) -> list[float]:
        """The host's base before the first and after each host wait of a stretch."""
        first = self._value[unit.parent.base_slot] if unit.parent else 0.0
        return [first or 0.0, *(self._value[s] or 0.0 for s in unit.sync_slot)]

    def finish_ns(self, leaf: Unit) -> float:
        """When the last lane of a cell comes to rest."""
        slots = [*leaf.end_slot.values(), *leaf.lane_last.values()]
        host = self.bases(leaf)[-1] + leaf.stretch.host_at_end
        return max([host, *(self._value[slot] or 0.0 for slot in slots)])

    def values(self, slots: np.ndarray) -> np.ndarray:
        """Times of slots; call after :meth:`run`."""
        if self._known is None:
            self._known = np.array([0.0 if v is None else v for v in self._value])
        return self._known[slots]

    # ── when it hangs ────────────────────────────────────────────────────────────────────────────────────────

    def open_slots(self) -> list[int]:
        """Meetings that somebody has come to and somebody has not."""
        return [
            i for i, n in enumerate(self._missing) if self._value[i] is None and self._arrival[i] > _NEVER
        ]

    def position(self, unit: Unit) -> int:
        """The event at which a unit stands: of its first unfinished stream or host, or the end of its stretch."""
        events = [self._event(p) for p in self._processes if p.unit is unit and p.index < len(p.items)]
        return min(events, default=unit.stretch.hi)

    def has_arrived(self, unit: Unit, op: int) -> bool:
        """Whether a unit has issued an op and its communicator was free."""
        stream = int(unit.stretch.ops.stream[op])
        p = self._stream_process[id(unit), stream]
        items = next(items for items in unit.stretch.streams if items.stream == stream)
        at = int(np.flatnonzero((items.code <= Code.COMM_ASYNC) & (items.arg == op))[0])
        previous = int(unit.op_previous[op])
        return p.index - p.offset > at and (previous < 0 or self._value[previous] is not None)

    def _event(self, p: Process) -> int:
        done = max(p.index - p.offset - (p.waits_for >= 0), 0)
        if p.stream < 0:
            syncs = p.unit.stretch.syncs
            return syncs[done].event if done < len(syncs) else p.unit.stretch.hi
        items = next(items for items in p.unit.stretch.streams if items.stream == p.stream)
        return int(items.event[min(done, len(items.event) - 1)])

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _new_slots(self, count: int) -> range:
        first = len(self._value)
        self._value += [None] * count
        self._arrival += [_NEVER] * count
        self._missing += [0] * count
        self._duration += [0.0] * count
        return range(first, first + count)

    def _allocate(self, unit: Unit) -> None:
        """Give slots to everything that other processes may refer to."""
        stretch, ops = unit.stretch, unit.stretch.ops
        batches = list(unit.linked.parts)
        if batches:
            unit.op_slot = unit.op_slot.copy()
            unit.op_slot[batches] = self._new_slots(len(batches))
        if unit.parent is not None:
            unit.event_slot.update(unit.parent.event_slot)
            unit.lane_last.update(unit.parent.lane_last)
        unit.op_previous = _previous_on_lane(unit)
        for lane in np.unique(ops.lane).tolist():
            unit.lane_last[lane] = int(unit.op_slot[np.flatnonzero(ops.lane == lane)[-1]])
        for items in stretch.streams:
            recorded = items.arg[items.code == Code.RECORD].tolist()
            unit.event_slot.update(zip(recorded, self._new_slots(len(recorded)), strict=True))
            marks = [(number, items.stream) for number in items.arg[items.code == Code.MARK].tolist()]
            unit.mark_slot.update(zip(marks, self._new_slots(len(marks)), strict=True))
            unit.end_slot[items.stream] = self._new_slots(1)[0]
        unit.sync_slot = list(self._new_slots(len(stretch.syncs)))
        unit.base_slot = self._new_slots(1)[0]

    def _load(self, unit: Unit) -> None:
        self._load_host(unit)
        for items in unit.stretch.streams:
            process = Process(unit, items.stream)
            self._continue_parent(process)
            process.items += _stream_program(unit, items)
            self._processes.append(process)
            self._stream_process[id(unit), items.stream] = process
        if unit.parent is not None:  # streams that the branch does not use end where the trunk left them
            unit.end_slot = {**unit.parent.end_slot, **unit.end_slot}

    def _continue_parent(self, process: Process) -> None:
        parent = process.unit.parent
        if parent is None:
            return
        slot = parent.end_slot.get(process.stream)
        if slot is not None:
            process.items.append((_WAIT, 0.0, _NEVER, slot, -1, 0.0))
        process.items.append((_BASE, 0.0, _NEVER, parent.base_slot, -1, 0.0))
        process.offset = len(process.items)

    def _load_host(self, unit: Unit) -> None:
        process = Process(unit, -1)
        self._continue_parent(process)
        lanes = _lanes_before(unit)
        here = {items.stream for items in unit.stretch.streams}
        before = [slot for s, slot in (unit.parent.end_slot if unit.parent else {}).items() if s not in here]
        for number, sync in enumerate(unit.stretch.syncs):
            slots = [unit.mark_slot[number, s] for s in sync.streams if (number, s) in unit.mark_slot]
            if sync.cuda_event in unit.event_slot:
                slots.append(unit.event_slot[sync.cuda_event])
            if sync.everything:
                slots += [*lanes[number], *before]
            process.items.append((_HOST, 0.0, _NEVER, unit.sync_slot[number], tuple(slots), sync.host_ns))
        process.items.append((_HOST, 0.0, _NEVER, unit.base_slot, (), 0.0))
        self._processes.append(process)

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> bool:
        """Advance everything; False when something could not finish."""
        self._ready = deque(self._processes)
        ready = self._ready
        while ready:
            self._advance(ready.popleft())
        return all(p.index >= len(p.items) for p in self._processes)

    def _advance(self, p: Process) -> None:
        value, arrival, missing, duration = self._value, self._arrival, self._missing, self._duration
        waiters, ready = self._waiters, self._ready
        items, trace = p.items, p.trace
        i, now, base = p.index, p.now, p.base
        if p.waits_for >= 0:
            end = value[p.waits_for]
            if end > now:
                now = end
            trace.append(now)
            p.waits_for = -1
        count = len(items)
        while i < count:
            code, run, issue, slot, previous, host = items[i]
            was = now
            now += run
            issued = base + issue
            if issued > now:
                now = issued
            if code == _SYNC:
                if previous >= 0:
                    free = value[previous]
                    if free is None:
                        self._block(p, previous, i, was, base)
                        return
                    if free > now:
                        now = free
                if now > arrival[slot]:
                    arrival[slot] = now
                left = missing[slot] - 1
                missing[slot] = left
                if left:
                    p.waits_for = slot
                    self._block(p, slot, i + 1, now, base)
                    return
                now = arrival[slot] + duration[slot]
                value[slot] = now
                waiter = waiters[slot]
                if waiter is not None:
                    if waiter.__class__ is Process:
                        waiters[slot] = None
                        ready.append(waiter)
                    else:
                        self._wake(slot)
            elif code == _ASYNC:
                at = base + host
                if now > at:
                    at = now
                self._arrive_after(previous, slot, at)
            elif code == _WAIT:
                end = value[slot]
                if end is None:
                    p.waits_for = slot
                    self._block(p, slot, i + 1, now, base)
                    return
                if end > now:
                    now = end
            elif code == _SET:
                if slot >= 0:
                    value[slot] = now
                    if waiters[slot] is not None:
                        self._wake(slot)
            elif code == _BASE:
                end = value[slot]
                if end is None:
                    self._block(p, slot, i, was, base)
                    return
                base = end
            elif code == _HOST:
                until = base + host
                for needed in previous:
                    end = value[needed]
                    if end is None:
                        self._block(p, needed, i, was, base)
                        return
                    if end > until:
                        until = end
                base = until - host
                value[slot] = base
                if waiters[slot] is not None:
                    self._wake(slot)
            elif code == _SYNC_BATCH:
                before, parts = previous
                if before >= 0:
                    free = value[before]
                    if free is None:
                        self._block(p, before, i, was, base)
                        return
                    if free > now:
                        now = free
                self._arrive_batch(slot, parts, now)
                end = value[slot]
                if end is None:
                    p.waits_for = slot
                    self._block(p, slot, i + 1, now, base)
                    return
                now = end
            else:  # _ASYNC_BATCH
                before, parts = previous
                at = base + host
                if now > at:
                    at = now
                self._arrive_after(before, slot, at, parts)
            trace.append(now)
            i += 1
        p.index, p.now, p.base = i, now, base

    def _block(self, p: Process, slot: int, index: int, now: float, base: float) -> None:
        p.index, p.now, p.base = index, now, base
        if self._waiters[slot] is None:
            self._waiters[slot] = p
        else:
            self._add_waiter(slot, p)

    def _add_waiter(self, slot: int, waiter: Process | int | tuple) -> None:
        waiting = self._waiters[slot]
        if waiting.__class__ is list:
            waiting.append(waiter)
        else:
            self._waiters[slot] = [waiter] if waiting is None else [waiting, waiter]

    def _arrive_after(
        self, previous: int, slot: int, at: float, parts: tuple[int, ...] | None = None
    ) -> None:
        """An asynchronous op arrives once the communicator is free; the stream goes on meanwhile."""
        if previous >= 0:
            free = self._value[previous]
            if free is None:
                self._add_waiter(previous, (slot, at, parts))
                return
            at = max(at, free)
        if parts is None:
            self._arrive(slot, at)
        else:
            self._arrive_batch(slot, parts, at)

    def _arrive(self, slot: int, at: float) -> None:
        if at > self._arrival[slot]:
            self._arrival[slot] = at
        self._missing[slot] -= 1
        if not self._missing[slot]:
            self._value[slot] = self._arrival[slot] + self._duration[slot]
            if self._waiters[slot] is not None:
                self._wake(slot)

    def _arrive_batch(self, slot: int, parts: tuple[int, ...], at: float) -> None:
        """The kernel of a batch starts at ``at``; it ends when its last part does."""
        for part in parts:
            self._arrive(part, at)
        self._arrival[slot] = at
        open_parts = [part for part in parts if self._value[part] is None]
        self._missing[slot] = len(open_parts)
        for part in parts:
            end = self._value[part]
            if end is None:
                self._add_waiter(part, slot)
            elif end > self._arrival[slot]:
                self._arrival[slot] = end
        if not open_parts:
            self._value[slot] = self._arrival[slot]
            if self._waiters[slot] is not None:
                self._wake(slot)

    def _wake(self, slot: int) -> None:
        """A slot got its value: resume processes, free communicators, complete batches."""
        resolved = [slot]
        while resolved:
            slot = resolved.pop()
            end = self._value[slot]
            waiting, self._waiters[slot] = self._waiters[slot], None
            for waiter in waiting if waiting.__class__ is list else (waiting,):
                if waiter is None:
                    continue
                if isinstance(waiter, Process):
                    self._ready.append(waiter)
                elif isinstance(waiter, int):  # a part of a batch
                    self._arrival[waiter] = max(self._arrival[waiter], end)
                    self._missing[waiter] -= 1
                    if not self._missing[waiter]:
                        self._value[waiter] = self._arrival[waiter]
                        resolved.append(waiter)
                else:
                    following, at, parts = waiter
                    if parts is None:
                        at = max(at, end)
                        if at > self._arrival[following]:
                            self._arrival[following] = at
                        self._missing[following] -= 1
                        if not self._missing[following]:
                            self._value[following] = self._arrival[following] + self._duration[following]
                            resolved.append(following)
                    else:
                        self._arrive_batch(following, parts, max(at, end))


def _previous_on_lane(unit: Unit) -> np.ndarray:
    """Per op, the slot that tells when its communicator is free; -1 where the issuing stream knows already."""
    ops = unit.stretch.ops
    order = np.argsort(ops.lane, kind="stable")
    follows = np.zeros(len(order), dtype=bool)
    follows[1:] = ops.lane[order][1:] == ops.lane[order][:-1]
    before = np.full(len(order), -1, dtype=np.int64)
    before[order[follows]] = order[np.flatnonzero(follows) - 1]
    slot = np.where(before >= 0, unit.op_slot[before], -1) if len(order) else before
    known = (
        (before >= 0) & ~ops.is_async[before] & (ops.stream[before] == ops.stream) if len(order) else follows
    )
    slot[known] = -1
    for i in np.flatnonzero(before < 0).tolist():
        slot[i] = unit.lane_last.get(int(ops.lane[i]), -1)
    return slot


def _lanes_before(unit: Unit) -> list[list[int]]:
    """Per host sync: slots of the last asynchronous op of each communicator issued before it.

    Streams wait for synchronous ops themselves.
    """
    ops, syncs = unit.stretch.ops, unit.stretch.syncs
    out: list[list[int]] = [[] for _ in syncs]
    at = np.array([s.event for s in syncs], dtype=np.int64)
    inherited = dict(unit.parent.lane_last) if unit.parent else {}
    for lane in {*np.unique(ops.lane).tolist(), *inherited}:
        mine = np.flatnonzero(ops.lane == lane)
        last = np.searchsorted(ops.event[mine], at) - 1
        for number, i in enumerate(last.tolist()):
            if i < 0 and lane in inherited:
                out[number].append(inherited[lane])
            elif i >= 0 and ops.is_async[mine[i]]:
                out[number].append(int(unit.op_slot[mine[i]]))
    return out


def _stream_program(unit: Unit, items: StreamItems) -> list[tuple]:
    """The inner loop's items: (code, D, C, slot, previous, host offset)."""
    ops = unit.stretch.ops
    code = _CODES[items.code]
    slot = np.full(len(code), -1, dtype=np.int64)
    previous = np.full(len(code), -1, dtype=np.int64)
    host = np.zeros(len(code))
    issue = items.issue_ns.copy()

    comm = np.flatnonzero(items.code <= Code.COMM_ASYNC)
    op = items.arg[comm]
    slot[comm], previous[comm], host[comm] = unit.op_slot[op], unit.op_previous[op], ops.host_ns[op]
    # A stream that waits for an op may as well wait for its issue.
    sync = np.flatnonzero(items.code == Code.COMM_SYNC)
    issue[sync] = np.maximum(issue[sync], host[sync])
    waits = np.flatnonzero(items.code == Code.WAIT_WORK)
    slot[waits] = unit.slots_of_works(items.arg[waits])
    for which, table in (
        (Code.WAIT_EVENT, unit.event_slot),
        (Code.RECORD, unit.event_slot),
        (Code.MARK, {number: s for (number, stream), s in unit.mark_slot.items() if stream == items.stream}),
        (Code.SEGMENT, dict(enumerate(unit.sync_slot))),
    ):
        mine = np.flatnonzero(items.code == which)
        slot[mine] = [table.get(arg, -1) for arg in items.arg[mine].tolist()]
    slot[items.code == Code.END] = unit.end_slot[items.stream]
    code[(code == _WAIT) & (slot < 0)] = _SET  # begun before the iteration: nothing to wait for

    out = list(
        zip(
            code.tolist(),
            items.run_ns.tolist(),
            issue.tolist(),
            slot.tolist(),
            previous.tolist(),
            host.tolist(),
            strict=True,
        )
    )
    batches = unit.linked.parts
    for i in comm[np.isin(op, list(batches))].tolist() if batches else ():
        kind, run, issued, end, before, offset = out[i]
        batch = _SYNC_BATCH if kind == _SYNC else _ASYNC_BATCH
        out[i] = (batch, run, issued, end, (before, batches[int(items.arg[i])]), offset)
    return out


_CODES = np.array([_SYNC, _ASYNC, _WAIT, _WAIT, _SET, _SET, _BASE, _SET], dtype=np.int64)
"""Inner-loop code of each :class:`Code`."""
