"""Times of all ranks at once where every rank has a speed of its own, or one fails.

Ranks of a cell (:mod:`.quotient`) run the same items in the same order, whatever their times are, because everything is
max and plus. So the machine of :mod:`.process` is run with a vector over the ranks of a cell in place of each number, and
a meeting holds one number per communicator. Its cost grows with cells, not with ranks.

A run of kernels ends at ``max(S + D, base + C)``. With kernels ``f`` times as long, ``D`` grows with ``f`` and ``C`` is convex
in it; ``C`` is interpolated between the smallest and the largest factor, which is exact at both and too long by at
most their distance times the kernels of one run between.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from prism_plugins.errors import PrismError
from prism_plugins.simulate.compile import slowed
from prism_plugins.simulate.link import Layer
from prism_plugins.simulate.process import (
    _ASYNC,
    _ASYNC_BATCH,
    _BASE,
    _HOST,
    _SET,
    _SYNC,
    _WAIT,
    Machine,
    Process,
)
from prism_plugins.simulate.quotient import World
from prism_plugins.simulate.unit import Unit


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that stops."""

    rank: int
    at_ns: float
    """From the start of the iteration."""


class VectorTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What came out, arrays over all ranks."""

    finish_ns: np.ndarray
    """inf for ranks that never finish."""
    waited_ns: np.ndarray
    """Time in collectives and messages before the last member came."""
    caused_ns: np.ndarray
    """Time that others waited for this rank as the last to come."""
    caused_of_class: np.ndarray
    """The same by who waited, shape (ranks, classes of the job)."""
    caused_in: dict[str, np.ndarray]
    """The same by the group of the calls, as its description names it."""
    stalled_ns: np.ndarray
    """Last time at which the rank did something; NaN for ranks that finish."""
    stalled_event: np.ndarray
    """Event of its program at which it waits for ever: of the first call where there is one; -1."""
    failed_event: int = -1
    """Where the failing rank stops."""


class _Vector:
    """One unit's place in the vectors."""

    def __init__(self, unit: Unit) -> None:
        self.ranks = unit.cell.ranks
        self.class_index = unit.cell.class_index
        self.index: dict[int, _Members] = {}
        """Channel number → which communicator each rank belongs to."""


class _Members:
    """Ranks of a cell → communicators of a channel."""

    def __init__(self, instance: np.ndarray) -> None:
        self.instance = instance
        order = np.argsort(instance, kind="stable")
        starts = np.flatnonzero(np.diff(instance[order], prepend=-1))
        self.distinct = instance[order][starts]
        single = len(self.distinct) == len(instance)
        self.order, self.starts = (None, None) if single else (order, starts)

    def latest(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(communicators, when the last of the cell's ranks in each comes)."""
        if self.order is None:
            return self.instance, at
        return self.distinct, np.maximum.reduceat(at[self.order], self.starts)


class VectorMachine:
    """Times for one draw of factors; make it once and call :meth:`run` per draw."""

    def __init__(
        self, layer: Layer, units: list[Unit], world: World, *, factors: tuple[float, float]
    ) -> None:
        """``factors``: the smallest and the largest that :meth:`run` will be given."""
        self._bounds = factors
        self._communicator = dict(
            zip(
                zip(world.entry_rank.tolist(), world.entry_group.tolist(), strict=True),
                world.entry_communicator.tolist(),
                strict=True,
            )
        )
        self._peer = dict(
            zip(
                zip(world.p2p_rank.tolist(), world.p2p_comm.tolist(), strict=True),
                world.p2p_peer.tolist(),
                strict=True,
            )
        )
        self._layer = layer
        low, high = (self._machine(layer, units, factor) for factor in factors)
        self._low, self._high = low, high
        self._channel_of_slot = np.repeat(
            np.arange(len(layer.channels)), np.diff(layer.first_of_channel).astype(np.int64)
        )
        self._num_instances = [0] * len(layer.channels)
        self._labels = [self._label(channel) for channel in layer.channels]
        self._num_classes = 1 + max(cell.class_index for cell in layer.quotient.cells)
        self._vectors = {id(unit): _Vector(unit) for unit in low[1]}
        for number, channel in enumerate(layer.channels):
            self._instances(number, channel, low[1])

    def _label(self, channel: tuple) -> str:
        cell, index = self._layer.quotient.members[channel[0]][0]
        return self._layer.quotient.cells[cell].program.groups[index].label

    @staticmethod
    def _machine(layer: Layer, units: list[Unit], factor: float) -> tuple[Machine, list[Unit]]:
        copies = []
        for unit in units:
            copy = Unit(layer, unit.cell.index, parent=None)
            copy.stretch = slowed(unit.stretch, factor)
            copies.append(copy)
        return Machine([layer], copies), copies

    def _instances(self, number: int, channel: tuple, units: list[Unit]) -> None:
        numbers: dict[int, int] = {}
        if len(channel) == 1:
            for cell, group in self._layer.quotient.members[channel[0]]:
                unit = units[cell]
                own = [self._communicator[rank, group] for rank in unit.cell.ranks.tolist()]
                instance = np.array([numbers.setdefault(communicator, len(numbers)) for communicator in own])
                self._vectors[id(unit)].index[number] = _Members(instance)
        else:
            _, sender, receiver, *_ = channel
            if sender == receiver:
                raise PrismError(
                    "jitter and failures of jobs whose ranks send messages to others of their own class cannot be simulated yet"
                )
            senders = units[sender].cell.ranks
            place = {int(r): i for i, r in enumerate(senders)}
            self._vectors[id(units[sender])].index[number] = _Members(np.arange(len(senders)))
            peers = self._senders(units[receiver], channel)
            instance = np.array([place[int(rank)] for rank in peers])
            self._vectors[id(units[receiver])].index[number] = _Members(instance)
            numbers = place
        self._num_instances[number] = len(numbers)

    def _senders(self, unit: Unit, channel: tuple) -> list[int]:
        """Who sends to each rank of the receiving cell."""
        communicator, sender, *_ = channel
        quotient, cell = self._layer.quotient, unit.cell
        for i, comm in enumerate(cell.program.comms):
            if (
                comm.kind == "recv"
                and quotient.peers.get((cell.index, i)) == sender
                and quotient.communicator.get((cell.index, comm.group)) == communicator
            ):
                return [self._peer[rank, i] for rank in cell.ranks.tolist()]
        raise PrismError("a message without its receiver; this is a defect of prism")

    # ── one draw ─────────────────────────────────────────────────────────────────────────────────────────────

    def run(
        self, factor_of_rank: np.ndarray, *, failure: Failure | None = None, explain: bool = False
    ) -> VectorTimes:
        """Times with these factors, shape (num_ranks,). ``explain`` counts who waits for whom as well."""
        low, high = self._bounds
        share = (factor_of_rank - low) / (high - low) if high > low else np.zeros(len(factor_of_rank))
        return _Run(self, share, failure, explain).times()


class _Run:
    def __init__(
        self, machine: VectorMachine, share: np.ndarray, failure: Failure | None, explain: bool
    ) -> None:
        self.m = machine
        self.explain = explain
        self.failure = failure
        low, high = machine._low[0], machine._high[0]
        num_slots = low._num_slots
        self.value: list[np.ndarray | None] = [None] * num_slots
        self.arrival: list[np.ndarray | None] = [None] * num_slots
        self.missing = low._expected.tolist()
        self.duration = low._transfer.tolist()
        self.waiters: list[list] = [[] for _ in range(num_slots)]
        self.come: dict[int, list[tuple[_Vector, _Members, np.ndarray]]] = {}
        num_ranks = len(share)
        self.waited, self.caused = np.zeros(num_ranks), np.zeros(num_ranks)
        self.caused_of_class = np.zeros((num_ranks if explain else 0) * machine._num_classes)
        self.caused_in: dict[str, np.ndarray] = {}
        self.last_seen = np.zeros(num_ranks)
        self.stalled_event = np.full(num_ranks, -1, dtype=np.int64)
        self.called = np.full(num_ranks, np.inf)
        """When the call was made that the stalled event is."""
        self.failed_event, self.failed_ns = -1, np.inf
        self.processes = [
            _VectorProcess(a, b, machine._vectors[id(a.unit)], share, failure)
            for a, b in zip(low._processes, high._processes, strict=True)
        ]

    def times(self) -> VectorTimes:
        self.ready = deque(self.processes)
        while self.ready:
            self.advance(self.ready.popleft())
        if any(p.index < len(p.items) for p in self.processes):
            raise RuntimeError("the vector machine stopped; this is a defect of prism")
        finish = np.zeros(len(self.waited))
        for unit in self.m._low[1]:
            vector = self.m._vectors[id(unit)]
            slots = [*unit.end_slot.values(), *unit.lane_last.values()]
            end = self.value[unit.base_slot] + unit.stretch.host_at_end
            for slot in slots:
                end = np.maximum(end, self.get(slot, vector))
            finish[vector.ranks] = end
        stuck = ~np.isfinite(finish)
        return VectorTimes(
            finish_ns=finish,
            waited_ns=self.waited,
            caused_ns=self.caused,
            caused_of_class=self.caused_of_class.reshape(-1, self.m._num_classes),
            caused_in=self.caused_in,
            stalled_ns=np.where(stuck, self.last_seen, np.nan),
            stalled_event=self.stalled_event,
            failed_event=self.failed_event,
        )

    # slots

    def get(self, slot: int, vector: _Vector) -> np.ndarray | None:
        value = self.value[slot]
        if value is None or slot >= len(self.m._channel_of_slot):
            return value
        return value[vector.index[int(self.m._channel_of_slot[slot])].instance]

    def set(self, slot: int, value: np.ndarray) -> None:
        resolved = [(slot, value)]
        while resolved:
            slot, value = resolved.pop()
            self.value[slot] = value
            waiting, self.waiters[slot] = self.waiters[slot], []
            for waiter in waiting:
                if isinstance(waiter, _VectorProcess):
                    self.ready.append(waiter)
                elif waiter[0] == "part":
                    resolved += self.part_done(*waiter[1:], part=slot)
                else:
                    _, p, following, at, parts = waiter
                    at = np.maximum(at, self.get(slot, p.vector))
                    resolved += (
                        self.arrive(p, following, at)
                        if parts is None
                        else self.batch(p, following, parts, at)
                    )

    def arrive(self, p: _VectorProcess, slot: int, at: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Come to a meeting; returns the slots that are resolved by it."""
        number = int(self.m._channel_of_slot[slot])
        members = p.vector.index[number]
        so_far = self.arrival[slot]
        if so_far is None:
            so_far = self.arrival[slot] = np.full(self.m._num_instances[number], -np.inf)
        which, latest = members.latest(at)
        so_far[which] = np.maximum(so_far[which], latest)
        if self.explain:
            self.come.setdefault(slot, []).append((p.vector, members, at))
        self.missing[slot] -= 1
        if self.missing[slot]:
            return []
        if self.explain:
            self.account(slot, so_far)
        self.arrival[slot] = None
        return [(slot, so_far + self.duration[slot])]

    def account(self, slot: int, latest: np.ndarray) -> None:
        last = np.full(len(latest), -1, dtype=np.int64)
        waits: list[tuple[_Vector, _Members, np.ndarray]] = []
        for vector, members, at in self.come.pop(slot):
            came = latest[members.instance]
            wait = came - at
            self.waited[vector.ranks] += wait
            is_last = at >= came
            last[members.instance[is_last]] = vector.ranks[is_last]
            waits.append((vector, members, wait))
        label = self.m._labels[int(self.m._channel_of_slot[slot])]
        caused_in = self.caused_in.get(label)
        if caused_in is None:
            caused_in = self.caused_in[label] = np.zeros(len(self.caused))
        for vector, members, wait in waits:
            culprit = last[members.instance]
            np.add.at(self.caused, culprit, wait)
            np.add.at(caused_in, culprit, wait)
            np.add.at(self.caused_of_class, culprit * self.m._num_classes + vector.class_index, wait)

    def batch(
        self, p: _VectorProcess, slot: int, parts: tuple[int, ...], at: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """The kernel of a batch starts at ``at``; it ends when its last part does."""
        resolved = []
        for part in parts:
            resolved += self.arrive(p, part, at)
        done = {part for part, _ in resolved}
        self.arrival[slot] = at
        open_parts = [part for part in parts if self.value[part] is None]
        self.missing[slot] = len(open_parts)
        for part in open_parts:
            self.waiters[part].append(("part", p, slot))
        for part in parts:
            if part not in done and self.value[part] is not None:
                self.arrival[slot] = np.maximum(self.arrival[slot], self.get(part, p.vector))
        if not open_parts:
            resolved.append((slot, self.arrival[slot]))
        return resolved

    def part_done(self, p: _VectorProcess, slot: int, *, part: int) -> list[tuple[int, np.ndarray]]:
        self.arrival[slot] = np.maximum(self.arrival[slot], self.get(part, p.vector))
        self.missing[slot] -= 1
        return [] if self.missing[slot] else [(slot, self.arrival[slot])]

    def resolve(self, resolved: list[tuple[int, np.ndarray]]) -> None:
        for slot, value in resolved:
            self.set(slot, value)

    def arrive_after(
        self, p: _VectorProcess, previous: int, slot: int, at: np.ndarray, parts: tuple[int, ...] | None
    ) -> None:
        if previous >= 0:
            free = self.get(previous, p.vector)
            if free is None:
                self.waiters[previous].append(("after", p, slot, at, parts))
                return
            at = np.maximum(at, free)
        self.resolve(self.arrive(p, slot, at) if parts is None else self.batch(p, slot, parts, at))

    # processes

    def advance(self, p: _VectorProcess) -> None:
        while p.index < len(p.items):
            code, run, run_more, issue, issue_more, slot, previous, host = p.items[p.index]
            if p.pending is None:
                now = p.now
                if run:
                    now = now + (run + p.share * run_more)
                if issue > -np.inf:
                    now = np.maximum(now, p.base + (issue + p.share * issue_more))
            else:
                now, p.pending = p.pending, None
            if len(p.failed):
                now = self.failing(p, now)
            wait = -1
            if code == _SYNC:
                if not p.issued:
                    if previous >= 0:
                        free = self.get(previous, p.vector)
                        if free is None:
                            return self.block(p, previous, now)
                        now = np.maximum(now, free)
                    p.issued = True
                    self.resolve(self.arrive(p, slot, now))
                wait = slot
            elif code == _ASYNC:
                self.arrive_after(p, previous, slot, np.maximum(now, p.base + host), None)
            elif code == _WAIT:
                wait = slot
            elif code == _SET:
                if slot >= 0:
                    self.set(slot, now)
            elif code == _BASE:
                base = self.get(slot, p.vector)
                if base is None:
                    return self.block(p, slot, now)
                p.base = base
            elif code == _HOST:
                until = p.base + host
                for needed in previous:
                    end = self.get(needed, p.vector)
                    if end is None:
                        return self.block(p, needed, now)
                    until = np.maximum(until, end)
                p.base = until - host
                self.set(slot, p.base)
            elif code == _ASYNC_BATCH:
                before, parts = previous
                self.arrive_after(p, before, slot, np.maximum(now, p.base + host), parts)
            else:  # _SYNC_BATCH
                before, parts = previous
                if not p.issued:
                    if before >= 0:
                        free = self.get(before, p.vector)
                        if free is None:
                            return self.block(p, before, now)
                        now = np.maximum(now, free)
                    p.issued = True
                    self.resolve(self.batch(p, slot, parts, now))
                wait = slot
            if wait >= 0:
                end = self.get(wait, p.vector)
                if end is None:
                    return self.block(p, wait, now)
                if self.failure is not None:
                    self.note(p, wait, now, end)
                now = np.maximum(now, end)
            p.issued = False
            p.now = now
            p.index += 1
        return None

    def block(self, p: _VectorProcess, slot: int, now: np.ndarray) -> None:
        p.pending = now
        self.waiters[slot].append(p)

    def failing(self, p: _VectorProcess, now: np.ndarray) -> np.ndarray:
        """A failed rank comes to nothing any more."""
        own = p.failed[0]
        if now[own] > p.fail_at:
            if p.process.stream >= 0 and now[own] < self.failed_ns:
                self.failed_ns, self.failed_event = float(now[own]), p.event_of(p.index)
            now = now.copy()
            now[own] = np.inf
        return now

    def note(self, p: _VectorProcess, slot: int, now: np.ndarray, end: np.ndarray) -> None:
        """Remember where ranks begin to wait for ever."""
        stuck = np.isinf(end) & np.isfinite(now)
        if not stuck.any():
            return
        fresh, since = p.vector.ranks[stuck], now[stuck]
        self.last_seen[fresh] = np.maximum(self.last_seen[fresh], since)
        call = p.call_of(slot)
        if call >= 0:
            earlier = since < self.called[fresh]
            self.called[fresh[earlier]] = since[earlier]
            self.stalled_event[fresh[earlier]] = call
        else:
            self.stalled_event[fresh[self.stalled_event[fresh] < 0]] = p.event_of(p.index)


class _VectorProcess:
    """A stream or a host of one unit, over its ranks."""

    __slots__ = (
        "base", "fail_at", "failed", "index", "issued", "items", "now", "pending", "process", "share", "vector",
    )  # fmt: skip

    def __init__(
        self, low: Process, high: Process, vector: _Vector, share: np.ndarray, failure: Failure | None
    ) -> None:
        self.process, self.vector = low, vector
        self.share = share[vector.ranks]
        self.items = [
            (a[0], a[1], b[1] - a[1], a[2], b[2] - a[2] if a[2] > -np.inf else 0.0, a[3], a[4], a[5])
            for a, b in zip(low.items, high.items, strict=True)
        ]
        self.index = 0
        self.now = np.zeros(len(vector.ranks))
        self.base = np.zeros(len(vector.ranks))
        self.pending: np.ndarray | None = None
        self.issued = False
        self.failed = np.zeros(0, np.int64)
        self.fail_at = np.inf
        if failure is not None:
            self.failed = np.flatnonzero(vector.ranks == failure.rank)
            self.fail_at = failure.at_ns

    def call_of(self, slot: int) -> int:
        """The event of the call that ends in this slot; -1 for none of the unit's calls."""
        unit = self.process.unit
        op = np.flatnonzero(unit.op_slot == slot)
        return int(unit.stretch.ops.event[op[0]]) if len(op) else -1

    def event_of(self, index: int) -> int:
        """The event of an item."""
        if self.process.stream < 0:
            return self.process.unit.stretch.hi
        streams = self.process.unit.stretch.streams
        items = next(items for items in streams if items.stream == self.process.stream)
        return int(items.event[min(index, len(items.event) - 1)])
