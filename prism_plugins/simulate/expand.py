"""From super-steps back to single events, for the ranks somebody asks about, and where their time goes.

Kernel ``j`` of a stream ends at ``P_j+1 + max over i <= j of max(base_i + h_i - P_i, S_r(i) - P_r(i))`` where ``P`` are cumulative
durations (with the waits for other streams' kernels), ``h`` the host's issue times, and ``S_r`` the stream's time at the start of run ``r``: one cumulative
maximum over the whole stream, because a stream never runs backwards.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from prism_plugins.program.model import EventKind
from prism_plugins.program.prediction import Breakdown
from prism_plugins.simulate.compile import NEVER, Code, StreamItems
from prism_plugins.simulate.prices import host_ns_of_events
from prism_plugins.simulate.process import Machine
from prism_plugins.simulate.timeline import COMM_LANE, OpTimes
from prism_plugins.simulate.unit import Unit


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A set of times: disjoint, ascending intervals, shape (n,) each, ns."""

    start: np.ndarray
    end: np.ndarray


class StreamTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of one stretch."""

    kernel_start: np.ndarray
    """When its stream comes to the kernel; it may wait for kernels of other streams first."""
    kernel_end: np.ndarray
    kernel_begin: np.ndarray
    """When that wait ends."""
    after_run: np.ndarray
    """Stream time before each item's action, shape (num_items,)."""
    after_item: np.ndarray


class CallStarts(msgspec.Struct, frozen=True, kw_only=True):
    """When a rank comes to its calls, in issue order; a coalesced batch is one. Shape (num_calls,) each."""

    work: np.ndarray
    """Work ids."""
    start_ns: np.ndarray


class _Runs(msgspec.Struct, frozen=True, kw_only=True):
    """A stream's runs of kernels between its items."""

    durations: np.ndarray
    before: np.ndarray
    """Cumulative, with waits for other streams' kernels, shape (num_kernels + 1,)."""
    stop: np.ndarray
    """Per item: the kernel behind its run."""
    at_start: np.ndarray
    after_run: np.ndarray
    after_item: np.ndarray


def call_starts(unit: Unit, machine: Machine) -> CallStarts:
    """The starts of one stretch's calls: what :func:`expand_unit` says of them, for a tenth of its work."""
    start = np.empty(len(unit.stretch.ops))
    for items in unit.stretch.streams:
        op, at = _op_starts(unit, items, _runs(unit, items, machine).after_run, machine)
        start[op] = at
    return CallStarts(work=unit.stretch.ops.work, start_ns=start)


def expand_unit(unit: Unit, machine: Machine) -> OpTimes:
    """Times of the events of one stretch."""
    stretch = unit.stretch
    host_end = machine.base_at(unit, np.arange(stretch.lo, stretch.hi)) + stretch.host_end_ns
    events = stretch.program.events[stretch.lo : stretch.hi]
    host = host_end - host_ns_of_events(events["kind"], events["ref"], events["value"], stretch.prices)
    start, end = host.copy(), host.copy()
    lane = stretch.program.events["stream"][stretch.lo : stretch.hi].astype(np.int32)
    transfer = np.full(len(start), np.nan)
    for items in stretch.streams:
        times = stream_times(unit, items, machine)
        local = items.kernels - stretch.lo
        start[local], end[local], transfer[local] = times.kernel_start, times.kernel_end, times.kernel_begin
        _place_ops(unit, items, times, machine, (start, end, lane, transfer))
    return OpTimes(
        host_ns=host,
        start_ns=start,
        end_ns=end,
        transfer_start_ns=np.where(np.isnan(transfer), start, transfer),
        lane=lane,
    )


def _place_ops(
    unit: Unit,
    items: StreamItems,
    times: StreamTimes,
    machine: Machine,
    rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Fill in start, end, lane and transfer start of the calls that a stream issues."""
    start, end, lane, transfer = rows
    ops = unit.stretch.ops
    op, at = _op_starts(unit, items, times.after_run, machine)
    event = ops.event[op] - unit.stretch.lo
    first = unit.linked.first_slot[op]
    start[event], end[event] = at, machine.values(unit.op_slot[op])
    transfer[event] = np.maximum(at, machine.values(first) - machine.durations(first))
    lane[event] = COMM_LANE + ops.lane[op]
    batched = np.isin(op, list(ops.batches)) if ops.batches else np.zeros(len(op), dtype=bool)
    for i, row in zip(op[batched].tolist(), event[batched].tolist(), strict=True):
        slots = np.array(unit.linked.slots(i))
        transfer[row] = max(start[row], float((machine.values(slots) - machine.durations(slots)).min()))
        parts = _events_of(unit, i)
        for column in rows:
            column[parts] = column[row]


def _op_starts(
    unit: Unit, items: StreamItems, after_run: np.ndarray, machine: Machine
) -> tuple[np.ndarray, np.ndarray]:
    """(ops that a stream issues, when each comes to its communicator)."""
    comm = np.flatnonzero(items.code <= Code.COMM_ASYNC)
    op = items.arg[comm]
    event = unit.stretch.ops.event[op]
    base = machine.base_at(unit, event)
    at = np.maximum(after_run[comm], base + unit.stretch.host_end_ns[event - unit.stretch.lo])
    previous = unit.op_previous[op]
    return op, np.where(previous >= 0, np.maximum(at, machine.values(previous)), at)


T = TypeVar("T", OpTimes, CallStarts)


def join(parts: list[T]) -> T:
    """Consecutive stretches as one."""
    if len(parts) == 1:
        return parts[0]
    kind = type(parts[0])
    return kind(**{f: np.concatenate([getattr(p, f) for p in parts]) for f in kind.__struct_fields__})


def _runs(unit: Unit, items: StreamItems, machine: Machine) -> _Runs:
    durations = items.durations(unit.stretch.prices.op_ns, unit.stretch.program.events["ref"])
    before = np.zeros(len(durations) + 1)
    np.cumsum(items.with_waits(durations), out=before[1:])
    after = machine.trace(unit, items.stream)
    at_start = np.concatenate(([machine.start(unit, items.stream)], after[:-1]))
    base_of_item = machine.base_at(unit, items.event)
    stop = np.append(items.first_kernel[1:], len(durations))
    # `issue_ns` of the run; -inf for an empty run leaves the stream where it was.
    after_run = np.maximum(
        at_start + (before[stop] - before[items.first_kernel]), base_of_item + items.issue_ns
    )
    return _Runs(
        durations=durations,
        before=before,
        stop=stop,
        at_start=at_start,
        after_run=after_run,
        after_item=after,
    )


def stream_times(unit: Unit, items: StreamItems, machine: Machine) -> StreamTimes:
    """Times of a stream's kernels and items."""
    stretch = unit.stretch
    runs = _runs(unit, items, machine)
    durations, before, stop, at_start = runs.durations, runs.before, runs.stop, runs.at_start
    issued = machine.base_at(unit, items.kernels) + stretch.host_end_ns[items.kernels - stretch.lo]
    bound = issued - before[:-1]
    filled = np.flatnonzero(stop > items.first_kernel)
    first = items.first_kernel[filled]
    bound[first] = np.maximum(bound[first], at_start[filled] - before[first])
    np.maximum.accumulate(bound, out=bound)
    start, end = bound + before[:-1], bound + before[1:]
    return StreamTimes(
        kernel_start=start,
        kernel_end=end,
        kernel_begin=start if items.wait is None else np.maximum(end - durations, start),
        after_run=runs.after_run,
        after_item=runs.after_item,
    )


def break_down(leaf: Unit, machine: Machine, total_ns: float) -> Breakdown:
    """Where the time of a cell goes, ms. The parts sum to ``total_ns``.

    A moment belongs to compute or optimizer if any stream runs a kernel, or holds one back for another stream's; otherwise to exposed communication if a stream
    waits for a collective of its stage, or one of several stages transfers; otherwise to the bubble if a stream waits
    for p2p with another stage, for another stage to come to a collective, or has finished; otherwise to the host. A
    host that waits for the device (a synchronisation) waits for what the device's communicators do meanwhile.
    """
    busy, optimizer, waits, bubbles = [], [], [], []
    until = {id(unit): _other_stage_until(unit, machine) for unit in leaf.chain()}
    for unit in leaf.chain():
        for items in unit.stretch.streams:
            times = stream_times(unit, items, machine)
            busy.append((times.kernel_start, times.kernel_end))
            for lo, hi in unit.phases("optimizer"):
                mine = slice(*np.searchsorted(items.kernels, (lo, hi)))
                optimizer.append((times.kernel_start[mine], times.kernel_end[mine]))
            issued = machine.base_at(unit, items.event) + _issue_offset(unit, items)
            since = np.maximum(times.after_run, np.minimum(issued, times.after_item))
            where, met = _waits(unit, items, until)
            met = np.clip(met, since[where], times.after_item[where])
            bubbles.append((since[where], met))
            waits.append((met, times.after_item[where]))
        own, other = _blocked_host(unit, machine, until[id(unit)])
        waits.append(own)
        bubbles.append(other)
    compute = union(busy)
    communication, bubble = union(waits), union([*waits, *bubbles])
    finish = machine.finish_ns(leaf)
    busy_ns, optimizer_ns = measure(compute), measure(union(optimizer))
    exposed_ns = measure(communication) - overlap(communication, compute)
    bubble_ns = measure(bubble) - overlap(bubble, compute) - exposed_ns
    host_ns = finish - busy_ns - exposed_ns - bubble_ns
    ms = 1e-6
    return Breakdown(
        compute=(busy_ns - optimizer_ns) * ms,
        exposed_communication=exposed_ns * ms,
        bubble=(bubble_ns + total_ns - finish) * ms,
        host=host_ns * ms,
        optimizer=optimizer_ns * ms,
    )


def _blocked_host(
    unit: Unit, machine: Machine, until: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(start, end) of communication while the host waits for the device: of the own stage, and for other stages.
    ``until``: of :func:`_other_stage_until`."""
    stretch, ops = unit.stretch, unit.stretch.ops
    syncs = _sync_events(unit)
    nothing = np.empty(0), np.empty(0)
    if not len(syncs) or not len(ops):
        return nothing, nothing
    bases = np.array(machine.bases(unit))
    offset = stretch.host_end_ns[syncs - stretch.lo]
    blocked = union([(bases[: len(syncs)] + offset, bases[1 : len(syncs) + 1] + offset)])
    end = machine.values(unit.op_slot)
    first = unit.linked.first_slot
    moving = np.minimum(machine.values(first) - machine.durations(first), end)
    met = np.clip(until, moving, end)
    own, other = (intersection(blocked, union([part])) for part in ((met, end), (moving, met)))
    return (own.start, own.end), (other.start, other.end)


def intersection(a: Interval, b: Interval) -> Interval:
    """Times in both."""
    low = np.searchsorted(b.end, a.start, side="right")
    counts = np.maximum(np.searchsorted(b.start, a.end, side="left") - low, 0)
    mine = np.repeat(np.arange(len(a.start)), counts)
    its = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts) + low[mine]
    return union([(np.maximum(b.start[its], a.start[mine]), np.minimum(b.end[its], a.end[mine]))])


def union(parts: list[tuple[np.ndarray, np.ndarray]]) -> Interval:
    """Merge intervals."""
    start = np.concatenate([p[0] for p in parts]) if parts else np.empty(0)
    end = np.concatenate([p[1] for p in parts]) if parts else np.empty(0)
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return Interval(start=start, end=end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > end[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return Interval(start=start[opens], end=end[closes])


def measure(a: Interval) -> float:
    """Total length."""
    return float((a.end - a.start).sum())


def overlap(a: Interval, b: Interval) -> float:
    """Length of the intersection."""
    if not len(a.start) or not len(b.start):
        return 0.0
    cumulative = np.concatenate(([0.0], np.cumsum(b.end - b.start)))

    def until(t: np.ndarray) -> np.ndarray:
        i = np.searchsorted(b.start, t, side="right")
        inside = np.where(i > 0, np.minimum(t, b.end[i - 1]) - b.start[i - 1], 0.0)
        return np.where(i > 0, cumulative[i - 1] + inside, 0.0)

    return float((until(a.end) - until(a.start)).sum())


def _sync_events(unit: Unit) -> np.ndarray:
    """Events of host waits: a later event, but not the wait itself, is issued from the new base."""
    return np.array([s.event for s in unit.stretch.syncs], dtype=np.int64)


def _waits(unit: Unit, items: StreamItems, until: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Items that wait for communication, and until when each waits for another stage: for ever if it is p2p with one, until the
    transfer starts if it is a collective of several stages, not at all otherwise. ``until``: of :func:`_other_stage_until`, by
    unit."""
    sync = np.flatnonzero(items.code == Code.COMM_SYNC)
    works = np.flatnonzero(items.code == Code.WAIT_WORK)
    met = np.full(len(items.code), NEVER)
    met[sync] = until[id(unit)][items.arg[sync]]
    for link in unit.chain():
        own = link.stretch.ops.work
        if len(own) and len(works):
            order = np.argsort(own)
            at = order[np.minimum(np.searchsorted(own[order], items.arg[works]), len(own) - 1)]
            met[works] = np.where(own[at] == items.arg[works], until[id(link)][at], met[works])
    where = np.sort(np.concatenate((sync, works)))
    return where, met[where]


def _other_stage_until(unit: Unit, machine: Machine) -> np.ndarray:
    """Per op: until when a wait for it is a wait for another pipeline stage."""
    ops, quotient, cell = unit.stretch.ops, unit.layer.quotient, unit.cell
    program = unit.stretch.program
    p2p = np.zeros(len(program.comms), dtype=bool)
    collective = np.zeros(len(program.comms), dtype=bool)
    for i in ops.used_comms():
        comm = program.comms[i]
        if comm.kind in ("send", "recv"):
            p2p[i] = quotient.cells[quotient.peers[cell.index, i]].stage != cell.stage
        else:
            members = quotient.members[quotient.communicator[cell.index, comm.group]]
            collective[i] = any(quotient.cells[member].stage != cell.stage for member, _ in members)
    first = unit.linked.first_slot
    until = np.full(len(ops), NEVER)
    if len(ops):
        transfer = machine.values(first) - machine.durations(first)
        until = np.where(p2p[ops.comm], np.inf, np.where(collective[ops.comm], transfer, NEVER))
    for op, parts in ops.batches.items():
        if program.comms[parts[0]].kind in ("send", "recv"):
            until[op] = np.inf if p2p[list(parts)].any() else NEVER
    return until


def _issue_offset(unit: Unit, items: StreamItems) -> np.ndarray:
    """Host offset of each item's own event (END: of the last)."""
    local = np.minimum(items.event - unit.stretch.lo, len(unit.stretch.host_end_ns) - 1)
    return unit.stretch.host_end_ns[local] if len(unit.stretch.host_end_ns) else np.zeros(len(local))


def _events_of(unit: Unit, op: int) -> np.ndarray:
    """Local rows of a batch."""
    ops = unit.stretch.ops
    first = int(ops.first_event[op])
    events = unit.stretch.program.events[first : int(ops.event[op]) + 1]
    mine = np.flatnonzero((events["kind"] == EventKind.COMM) & (events["value"] == ops.work[op]))
    return mine + first - unit.stretch.lo
