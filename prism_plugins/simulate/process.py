"""The machine: advances all streams of all cells until every time is known, or nothing can advance.

A slot is a time that is computed once: the end of a rendezvous or of an op, an event record, a point the host waits
for, the host's base after a wait, a stream's time at the end of a stretch. Processes (one per stream, one per
host that ever waits) run until they need an unknown slot.

The inner loop is compiled (:mod:`.native`) where that is possible; the one here says, besides, where a job hangs.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from prism_plugins.simulate import native
from prism_plugins.simulate.compile import NEVER, Code, StreamItems
from prism_plugins.simulate.link import Layer
from prism_plugins.simulate.unit import Unit

# Item codes of the inner loop; the batch forms serve ops of several parts.
_SYNC, _ASYNC, _WAIT, _SET, _BASE, _END, _SYNC_BATCH, _ASYNC_BATCH, _HOST = range(9)
_NEVER = float(NEVER)


class Items(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does, in order: arrays over its items."""

    code: np.ndarray
    run: np.ndarray
    """D of the run before the item."""
    issue: np.ndarray
    """C of the run before the item."""
    slot: np.ndarray
    previous: np.ndarray
    """Of an op, the slot that tells when its communicator is free; -1."""
    host: np.ndarray
    """Host offset."""
    more: tuple[np.ndarray, np.ndarray]
    """(items, ascending; slots): of a batch its parts, of a host what it waits for."""

    def tuples(self) -> list[tuple]:
        """(code, D, C, slot, previous, host offset): ``previous`` of a batch is (slot, parts), of a host its slots."""
        columns = (self.code, self.run, self.issue, self.slot, self.previous, self.host)
        out = list(zip(*(column.tolist() for column in columns), strict=True))
        items, slots = self.more
        several = np.flatnonzero(self.code >= _SYNC_BATCH)
        first, last = np.searchsorted(items, several), np.searchsorted(items, several, side="right")
        for i, a, b in zip(several.tolist(), first.tolist(), last.tolist(), strict=True):
            code, run, issue, slot, previous, host = out[i]
            more = tuple(slots[a:b].tolist())
            out[i] = (code, run, issue, slot, more if code == _HOST else (previous, more), host)
        return out


class Process:
    """A stream or a host of one unit."""

    __slots__ = (
        "_tuples", "base", "index", "now", "offset", "program", "stream", "trace", "unit", "waits_for",
    )  # fmt: skip

    def __init__(self, unit: Unit, stream: int, program: Items, offset: int) -> None:
        self.unit = unit
        self.stream = stream
        """-1 for the host."""
        self.program = program
        self.offset = offset
        """Items before the stretch's own."""
        self._tuples: list[tuple] | None = None
        self.index = 0
        self.now = 0.0
        self.base = 0.0
        self.trace: list[float] = []
        """Stream time after each item."""
        self.waits_for = -1
        """Slot whose value the stream takes over when it resumes; -1: the item is done again."""

    @property
    def items(self) -> list[tuple]:
        """The program as tuples."""
        if self._tuples is None:
            self._tuples = self.program.tuples()
        return self._tuples

    def __len__(self) -> int:
        return len(self.program.code)


class Machine:
    """Times of all units."""

    def __init__(self, layers: list[Layer], units: list[Unit]) -> None:
        self._units = units
        self._num_slots = sum(layer.num_slots for layer in layers)
        self._processes: list[Process] = []
        self._stream_process: dict[tuple[int, int], int] = {}
        """(unit, stream) → index of its process."""
        for unit in units:
            self._allocate(unit)
        for unit in units:
            self._load(unit)
        self._begin = np.concatenate(([0], np.cumsum([len(p) for p in self._processes], dtype=np.int64)))
        own = self._num_slots - sum(layer.num_slots for layer in layers)
        self._expected = np.concatenate([*(layer.expected for layer in layers), np.zeros(own, np.int64)])
        self._transfer = np.concatenate([*(layer.duration_ns for layer in layers), np.zeros(own)])
        self._times: np.ndarray | None = None
        self._trace: np.ndarray | None = None

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────

    def durations(self, slots: np.ndarray) -> np.ndarray:
        """Transfer times of meetings."""
        return self._transfer[slots]

    def trace(self, unit: Unit, stream: int) -> np.ndarray:
        """Stream time after each of the stretch's own items."""
        index = self._stream_process[id(unit), stream]
        return self._trace[self._begin[index] + self._processes[index].offset : self._begin[index + 1]]

    def start(self, unit: Unit, stream: int) -> float:
        """Stream time at the beginning of a stretch."""
        index = self._stream_process[id(unit), stream]
        offset = self._processes[index].offset
        return float(self._trace[self._begin[index] + offset - 1]) if offset else 0.0

    def bases(self, unit: Unit) -> np.ndarray:
        """The host's base before the first and after each host wait of a stretch."""
        first = self._times[unit.parent.base_slot] if unit.parent else 0.0
        return np.append(first, self._times[unit.sync_slot])

    def base_at(self, unit: Unit, events: np.ndarray) -> np.ndarray:
        """The host's base at each of some events, ascending: a later event, but not the wait itself, is issued from the base
        after a wait."""
        waits = np.array([sync.event for sync in unit.stretch.syncs], dtype=np.int64)
        at = np.searchsorted(events, waits, side="right")
        return np.repeat(self.bases(unit), np.diff(at, prepend=0, append=len(events)))

    def finish_ns(self, leaf: Unit) -> float:
        """When the last lane of a cell comes to rest."""
        slots = np.array([*leaf.end_slot.values(), *leaf.lane_last.values()], dtype=np.int64)
        host = float(self.bases(leaf)[-1]) + leaf.stretch.host_at_end
        return max(host, float(self._times[slots].max(initial=0.0)))

    def values(self, slots: np.ndarray) -> np.ndarray:
        """Times of slots; call after :meth:`run`."""
        return self._times[slots]

    # ── when it hangs ────────────────────────────────────────────────────────────────────────────────────────

    def open_slots(self) -> list[int]:
        """Meetings that somebody has come to and somebody has not."""
        return [
            i for i, n in enumerate(self._missing) if self._value[i] is None and self._arrival[i] > _NEVER
        ]

    def position(self, unit: Unit) -> int:
        """The event at which a unit stands: of its first unfinished stream or host, or the end of its stretch."""
        events = [self._event(p) for p in self._processes if p.unit is unit and p.index < len(p)]
        return min(events, default=unit.stretch.hi)

    def has_arrived(self, unit: Unit, op: int) -> bool:
        """Whether a unit has issued an op and its communicator was free."""
        stream = int(unit.stretch.ops.stream[op])
        p = self._processes[self._stream_process[id(unit), stream]]
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

    def _new_slots(self, count: int) -> np.ndarray:
        first = self._num_slots
        self._num_slots += count
        return np.arange(first, self._num_slots)

    def _allocate(self, unit: Unit) -> None:
        """Give slots to everything that other processes may refer to."""
        stretch, ops = unit.stretch, unit.stretch.ops
        batches = list(unit.linked.parts)
        if batches:
            unit.op_slot = unit.op_slot.copy()
            unit.op_slot[batches] = self._new_slots(len(batches))
        if unit.parent is not None:
            unit.lane_last.update(unit.parent.lane_last)
        unit.op_previous = _previous_on_lane(unit)
        for lane in np.unique(ops.lane).tolist():
            unit.lane_last[lane] = int(unit.op_slot[np.flatnonzero(ops.lane == lane)[-1]])
        recorded: list[np.ndarray] = []
        for items in stretch.streams:
            recorded.append(items.arg[items.code == Code.RECORD])
            marks = items.arg[items.code == Code.MARK]
            unit.mark_slot[items.stream] = marks, self._new_slots(len(marks))
            unit.end_slot[items.stream] = int(self._new_slots(1)[0])
        if recorded:
            events = np.concatenate(recorded)
            order = np.argsort(events, kind="stable")
            unit.recorded = events[order], self._new_slots(len(events))[order]
        unit.sync_slot = self._new_slots(len(stretch.syncs))
        unit.base_slot = int(self._new_slots(1)[0])

    def _load(self, unit: Unit) -> None:
        self._add(unit, -1, _host_program(unit))
        for items in unit.stretch.streams:
            self._stream_process[id(unit), items.stream] = len(self._processes)
            self._add(unit, items.stream, _stream_program(unit, items))
        if unit.parent is not None:  # streams that the branch does not use end where the trunk left them
            unit.end_slot = {**unit.parent.end_slot, **unit.end_slot}

    def _add(self, unit: Unit, stream: int, program: Items) -> None:
        """A process, which continues that of the parent."""
        before: list[tuple[int, int]] = []
        if unit.parent is not None:
            slot = unit.parent.end_slot.get(stream)
            before = [(_WAIT, slot)] if slot is not None else []
            before.append((_BASE, unit.parent.base_slot))
        self._processes.append(Process(unit, stream, _behind(before, program), len(before)))

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> bool:
        """Advance everything; False when something could not finish."""
        results = self._run_compiled()
        if results is None:
            results = self._run_in_python()
        if results is None:
            return False
        times, self._trace = results
        self._times = np.where(np.isnan(times), 0.0, times)
        return True

    def _run_compiled(self) -> tuple[np.ndarray, np.ndarray] | None:
        programs = [p.program for p in self._processes]
        columns = {
            name: np.concatenate([getattr(program, name) for program in programs])
            for name in ("code", "run", "issue", "host", "slot", "previous")
        }
        items = np.concatenate([p.more[0] + first for p, first in zip(programs, self._begin, strict=False)])
        counts = np.bincount(items, minlength=len(columns["code"]))
        return native.run_machine(
            self._begin,
            columns,
            np.append(0, np.cumsum(counts)),
            np.concatenate([program.more[1] for program in programs]),
            duration=self._transfer,
            missing=self._expected,
        )

    def _run_in_python(self) -> tuple[np.ndarray, np.ndarray] | None:
        self._value: list[float | None] = [None] * self._num_slots
        self._arrival: list[float] = [_NEVER] * self._num_slots
        self._missing: list[int] = self._expected.tolist()
        self._duration: list[float] = self._transfer.tolist()
        self._waiters: list = [None] * self._num_slots
        """Per slot: nothing, a process, or a list of processes, batches (slot) and arrivals (slot, time, parts)."""
        self._ready = deque(self._processes)
        ready = self._ready
        while ready:
            self._advance(ready.popleft())
        if any(p.index < len(p) for p in self._processes):
            return None
        times = np.array([np.nan if v is None else v for v in self._value])
        return times, np.concatenate([p.trace for p in self._processes])

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


def _behind(before: list[tuple[int, int]], program: Items) -> Items:
    """A program with items (code, slot) before it."""
    if not before:
        return program
    n = len(before)
    return Items(
        code=np.concatenate((np.array([code for code, _ in before], np.int64), program.code)),
        run=np.concatenate((np.zeros(n), program.run)),
        issue=np.concatenate((np.full(n, _NEVER), program.issue)),
        slot=np.concatenate((np.array([slot for _, slot in before], np.int64), program.slot)),
        previous=np.concatenate((np.full(n, -1, np.int64), program.previous)),
        host=np.concatenate((np.zeros(n), program.host)),
        more=(program.more[0] + n, program.more[1]),
    )


def _host_program(unit: Unit) -> Items:
    syncs = unit.stretch.syncs
    n = len(syncs) + 1
    items, slots = _of_everything(unit)
    events = unit.slots_of_events(np.array([sync.cuda_event for sync in syncs], dtype=np.int64))
    known = np.flatnonzero(events >= 0)
    marks = unit.mark_slot.values()
    items = np.concatenate((items, known, *(numbers for numbers, _ in marks)))
    slots = np.concatenate((slots, events[known], *(slots for _, slots in marks)))
    order = np.argsort(items, kind="stable")
    return Items(
        code=np.full(n, _HOST, dtype=np.int64),
        run=np.zeros(n),
        issue=np.full(n, _NEVER),
        slot=np.append(unit.sync_slot, unit.base_slot),
        previous=np.full(n, -1, dtype=np.int64),
        host=np.array([*(sync.host_ns for sync in syncs), 0.0]),
        more=(items[order], slots[order]),
    )


def _of_everything(unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """(host syncs, slots): what waits for the whole device wait for beyond the unit's streams: the last asynchronous op of
    each communicator issued before it (streams wait for synchronous ops themselves), and the streams that only the parent
    used."""
    ops, syncs = unit.stretch.ops, unit.stretch.syncs
    everything = np.array([number for number, sync in enumerate(syncs) if sync.everything], dtype=np.int64)
    if not len(everything):
        return everything, everything
    here = {items.stream for items in unit.stretch.streams}
    before = [slot for s, slot in (unit.parent.end_slot if unit.parent else {}).items() if s not in here]
    found = [(everything, np.full(len(everything), slot)) for slot in before]
    at = np.array([syncs[number].event for number in everything.tolist()], dtype=np.int64)
    inherited = dict(unit.parent.lane_last) if unit.parent else {}
    for lane in {*np.unique(ops.lane).tolist(), *inherited}:
        mine = np.flatnonzero(ops.lane == lane)
        last = np.searchsorted(ops.event[mine], at) - 1
        own = last >= 0
        op = mine[last[own]]
        keep = ops.is_async[op]
        found.append((everything[own][keep], unit.op_slot[op[keep]]))
        if lane in inherited:
            found.append((everything[~own], np.full(int((~own).sum()), inherited[lane])))
    items, slots = (np.concatenate(column) for column in zip(*found, strict=True)) if found else (at[:0],) * 2
    return items, slots


def _stream_program(unit: Unit, items: StreamItems) -> Items:
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
    events = np.flatnonzero((items.code == Code.WAIT_EVENT) | (items.code == Code.RECORD))
    slot[events] = unit.slots_of_events(items.arg[events])
    segments = np.flatnonzero(items.code == Code.SEGMENT)
    slot[segments] = unit.sync_slot[items.arg[segments]]
    slot[items.code == Code.MARK] = unit.mark_slot[items.stream][1]
    slot[items.code == Code.END] = unit.end_slot[items.stream]
    code[(code == _WAIT) & (slot < 0)] = _SET  # begun before the iteration: nothing to wait for

    batches = unit.linked.parts
    batched = comm[np.isin(op, list(batches))] if batches else comm[:0]
    parts = [batches[i] for i in items.arg[batched].tolist()]
    more = (
        np.repeat(batched, [len(p) for p in parts]) if parts else batched,
        np.array([slot for p in parts for slot in p], dtype=np.int64),
    )
    code[batched] = np.where(code[batched] == _SYNC, _SYNC_BATCH, _ASYNC_BATCH)
    return Items(code=code, run=items.run_ns, issue=issue, slot=slot, previous=previous, host=host, more=more)


_CODES = np.array([_SYNC, _ASYNC, _WAIT, _WAIT, _SET, _SET, _BASE, _SET], dtype=np.int64)
"""Inner-loop code of each :class:`Code`."""
