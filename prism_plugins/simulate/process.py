"""The machine: advances all streams of all cells until every time is known, or nothing can advance.

A slot is a time that is computed once: the end of a rendezvous or of an op, an event record, a point the host waits
for, the host's base after a wait, a stream's time at the end of a stretch. Processes (one per stream, one per
host that ever waits) run until they need an unknown slot.
"""

from __future__ import annotations

from collections import deque

from prism_plugins.simulate.compile import Code
from prism_plugins.simulate.link import Rendezvous
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

    def __init__(self, rendezvous: Rendezvous, units: list[Unit]) -> None:
        meetings = rendezvous.meetings
        self._value: list[float | None] = [None] * len(meetings)
        self._arrival: list[float] = [_NEVER] * len(meetings)
        self._missing: list[int] = [m.expected for m in meetings]
        self._duration: list[float] = [m.duration_ns for m in meetings]
        self._waiters: dict[int, list] = {}
        self._units = units
        self._processes: list[Process] = []
        self._stream_process: dict[tuple[int, int], Process] = {}
        for unit in units:
            self._allocate(unit)
        for unit in units:
            self._load(unit)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────

    def value(self, slot: int) -> float | None:
        """The time of a slot, None while unknown."""
        return self._value[slot]

    def duration(self, slot: int) -> float:
        """Transfer time of a meeting."""
        return self._duration[slot]

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
        end = 0.0
        for unit in leaf.chain():
            end = max(end, self.bases(unit)[-1] + unit.stretch.host_at_end)
            for slot in (*unit.end_slot.values(), *unit.lane_last.values()):
                end = max(end, self._value[slot] or 0.0)
        return end

    # ── when it hangs ────────────────────────────────────────────────────────────────────────────────────────

    def stuck(self) -> list[tuple[Unit, int]]:
        """Units that did not finish, with the event each of their processes stands at."""
        return [(p.unit, self._event(p)) for p in self._processes if p.index < len(p.items)]

    def position(self, unit: Unit) -> int:
        """The event a unit stands at: of its first unfinished process, or the end."""
        events = [self._event(p) for p in self._processes if p.unit is unit and p.index < len(p.items)]
        return min(events, default=unit.stretch.hi)

    def arrived(self, slot: int) -> list[tuple[Unit, int, float]]:
        """Parties that have come to an open meeting: unit, event, and its arrival."""
        out = []
        for p in self._processes:
            if p.stream < 0:
                continue
            events = next(s for s in p.unit.stretch.streams if s.stream == p.stream)
            done = p.index - p.offset
            for i, op in enumerate(p.unit.stretch.ops):
                if op.stream == p.stream and slot in p.unit.parts[i]:
                    here = int(events.event[max(done - 1, 0)]) if done > 0 else -1
                    if op.event <= here:
                        out.append((p.unit, op.event, self._arrival[slot]))
        return out

    def _event(self, p: Process) -> int:
        if p.stream < 0:
            i = max(0, p.index - p.offset)
            return p.unit.stretch.syncs[i].event if i < len(p.unit.stretch.syncs) else p.unit.stretch.hi
        events = next(s for s in p.unit.stretch.streams if s.stream == p.stream).event
        i = p.index - p.offset - (1 if p.waits_for >= 0 else 0)
        return int(events[min(max(i, 0), len(events) - 1)])

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _slot(self) -> int:
        self._value.append(None)
        self._arrival.append(_NEVER)
        self._missing.append(0)
        self._duration.append(0.0)
        return len(self._value) - 1

    def _allocate(self, unit: Unit) -> None:
        """Give slots to everything that other processes may refer to."""
        stretch = unit.stretch
        parent = unit.parent
        if parent is not None:
            unit.work_slot.update(parent.work_slot)
            unit.event_slot.update(parent.event_slot)
            unit.lane_last.update(parent.lane_last)
        sync_stream: dict[tuple[int, int], int] = {}
        for op, parts in zip(stretch.ops, unit.parts, strict=True):
            slot = parts[0] if len(parts) == 1 else self._slot()
            unit.op_slot.append(slot)
            # A stream that waited for the op before need not look at the communicator again.
            unit.op_previous.append(
                -1 if sync_stream.get(op.lane) == op.stream else unit.lane_last.get(op.lane, -1)
            )
            unit.lane_last[op.lane] = slot
            if op.is_async:
                sync_stream.pop(op.lane, None)
            else:
                sync_stream[op.lane] = op.stream
            unit.work_slot[op.work] = slot
        for items in stretch.streams:
            for code, arg in zip(items.code.tolist(), items.arg.tolist(), strict=True):
                if code == Code.RECORD:
                    unit.event_slot[arg] = self._slot()
                elif code == Code.MARK:
                    unit.mark_slot[arg, items.stream] = self._slot()
            unit.end_slot[items.stream] = self._slot()
        unit.sync_slot = [self._slot() for _ in stretch.syncs]
        unit.base_slot = self._slot()

    def _load(self, unit: Unit) -> None:
        self._load_host(unit)
        streams = {items.stream for items in unit.stretch.streams}
        for items in unit.stretch.streams:
            process = Process(unit, items.stream)
            self._continue_parent(process)
            process.items += _stream_program(unit, items)
            self._processes.append(process)
            self._stream_process[id(unit), items.stream] = process
        if unit.parent is not None:  # streams that the branch does not use end where the trunk left them
            for stream, slot in unit.parent.end_slot.items():
                if stream not in streams:
                    unit.end_slot[stream] = slot

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
        lane_at = _lanes_before(unit)
        for number, sync in enumerate(unit.stretch.syncs):
            slots = [unit.mark_slot[number, s] for s in sync.streams if (number, s) in unit.mark_slot]
            if sync.cuda_event >= 0 and sync.cuda_event in unit.event_slot:
                slots.append(unit.event_slot[sync.cuda_event])
            if sync.everything:
                slots += lane_at[number]
                here = {items.stream for items in unit.stretch.streams}
                slots += [
                    e for s, e in (unit.parent.end_slot if unit.parent else {}).items() if s not in here
                ]
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
        waiters = self._waiters
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
                if slot in waiters:
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
                    if slot in waiters:
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
                if slot in waiters:
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
        self._waiters.setdefault(slot, []).append(p)

    def _arrive_after(
        self, previous: int, slot: int, at: float, parts: tuple[int, ...] | None = None
    ) -> None:
        """An asynchronous op arrives once the communicator is free; the stream goes on meanwhile."""
        if previous >= 0:
            free = self._value[previous]
            if free is None:
                self._waiters.setdefault(previous, []).append((slot, at, parts))
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
            if slot in self._waiters:
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
                self._waiters.setdefault(part, []).append(slot)
            elif end > self._arrival[slot]:
                self._arrival[slot] = end
        if not open_parts:
            self._value[slot] = self._arrival[slot]
            if slot in self._waiters:
                self._wake(slot)

    def _wake(self, slot: int) -> None:
        """A slot got its value: resume processes, free communicators, complete batches."""
        resolved = [slot]
        while resolved:
            slot = resolved.pop()
            end = self._value[slot]
            for waiter in self._waiters.pop(slot, ()):
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


def _lanes_before(unit: Unit) -> list[list[int]]:
    """Per host sync: the slots of the last op of each communicator issued before it."""
    last = dict(unit.parent.lane_last) if unit.parent else {}
    out, i, ops = [], 0, unit.stretch.ops
    for sync in unit.stretch.syncs:
        while i < len(ops) and ops[i].event < sync.event:
            last[ops[i].lane] = unit.op_slot[i]
            i += 1
        out.append(list(last.values()) if sync.everything else [])
    return out


def _stream_program(unit: Unit, items) -> list[tuple]:
    ops = unit.stretch.ops
    out: list[tuple] = []
    rows = zip(
        items.code.tolist(), items.arg.tolist(), items.run_ns.tolist(), items.issue_ns.tolist(), strict=True
    )
    for code, arg, run, issue in rows:
        if code <= Code.COMM_ASYNC:
            op, slot, previous, parts = ops[arg], unit.op_slot[arg], unit.op_previous[arg], unit.parts[arg]
            if code == Code.COMM_SYNC:
                issue = max(
                    issue, op.host_ns
                )  # the stream waits for the op, so it may as well wait for its issue
                if len(parts) == 1:
                    out.append((_SYNC, run, issue, slot, previous, op.host_ns))
                else:
                    out.append((_SYNC_BATCH, run, issue, slot, (previous, parts), op.host_ns))
            elif len(parts) == 1:
                out.append((_ASYNC, run, issue, slot, previous, op.host_ns))
            else:
                out.append((_ASYNC_BATCH, run, issue, slot, (previous, parts), op.host_ns))
        elif code == Code.WAIT_WORK:
            slot = unit.work_slot.get(arg, -1)
            out.append((_WAIT if slot >= 0 else _SET, run, issue, slot, -1, 0.0))
        elif code == Code.WAIT_EVENT:
            slot = unit.event_slot.get(arg, -1)
            out.append((_WAIT if slot >= 0 else _SET, run, issue, slot, -1, 0.0))
        elif code == Code.RECORD:
            out.append((_SET, run, issue, unit.event_slot[arg], -1, 0.0))
        elif code == Code.MARK:
            out.append((_SET, run, issue, unit.mark_slot[arg, items.stream], -1, 0.0))
        elif code == Code.SEGMENT:
            out.append((_BASE, run, issue, unit.sync_slot[arg], -1, 0.0))
        else:
            out.append((_SET, run, issue, unit.end_slot[items.stream], -1, 0.0))
    return out
