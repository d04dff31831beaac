"""Links the compiled stretches of all cells: which calls meet in which rendezvous.

Every collective on a communicator is a rendezvous of its member cells; the n-th call of one member meets the n-th of
the others. A p2p message is a rendezvous of two, matched per (communicator, sender, receiver) in order. Both are a
channel and a sequence number, and every meeting gets a slot: the channel's first slot plus the number. What can be
known without times is checked here: calls that meet must agree in kind and size.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.calls import P2P, agreement, describe, phase_at
from prism_plugins.program.model import CommSignature, Program
from prism_plugins.simulate.compile import Stretch
from prism_plugins.simulate.faults import Party, SimulationFault
from prism_plugins.simulate.prices import Pricer
from prism_plugins.simulate.quotient import Cell, Quotient


class Linked(msgspec.Struct, frozen=True, kw_only=True):
    """The meetings of one cell's stretch: one row per (op, meeting), in the order of the ops."""

    op: np.ndarray
    slot: np.ndarray
    first_slot: np.ndarray
    """Per op: the slot of its first (mostly only) meeting."""
    parts: dict[int, tuple[int, ...]]
    """Op → slots of its meetings, for ops with several."""

    def slots(self, op: int) -> tuple[int, ...]:
        """Slots of an op's meetings."""
        return self.parts.get(op) or (int(self.first_slot[op]),)


class Layer:
    """The linked calls of one partition: the whole job, or the part before or behind the fork."""

    def __init__(
        self, quotient: Quotient, stretches: list[Stretch], pricer: Pricer, *, first_slot: int
    ) -> None:
        self.quotient = quotient
        self.stretches = stretches
        self.first_slot = first_slot
        self._pricer = pricer
        self._channels: dict[tuple, int] = {}
        self._agreements: dict[tuple, int] = {}
        rows = [self._rows(cell, stretch) for cell, stretch in zip(quotient.cells, stretches, strict=True)]

        self.channels = tuple(self._channels)
        """(quotient communicator,) of a collective; (communicator, sender, receiver, distance) of messages."""
        counts = np.zeros(len(self.channels), dtype=np.int64)
        for row in rows:
            np.maximum.at(counts, row.channel, row.sequence + 1)
        self.first_of_channel = first_slot + np.concatenate(([0], np.cumsum(counts)))
        self.num_slots = int(counts.sum())
        self.linked = [self._place(row, stretch) for row, stretch in zip(rows, stretches, strict=True)]
        self.duration_ns = self._durations(rows)
        self.undisturbed_ns = self.duration_ns.copy()
        """As priced; ``duration_ns`` may be longer where compute slows a transfer down."""
        expected = [
            len(quotient.members[channel[0]]) if len(channel) == 1 else 2 for channel in self.channels
        ]
        self.expected = np.repeat(np.array(expected, dtype=np.int64), counts)
        self._check(rows)

    def channel_of(self, slot: int) -> tuple[tuple, int]:
        """Channel and sequence number of a slot."""
        i = int(np.searchsorted(self.first_of_channel, slot, side="right")) - 1
        return self.channels[i], slot - int(self.first_of_channel[i])

    def cells_at(self, slot: int) -> tuple[int, ...]:
        """Cells that have to come to a meeting."""
        channel, _ = self.channel_of(slot)
        if len(channel) == 1:
            return tuple(dict.fromkeys(cell for cell, _ in self.quotient.members[channel[0]]))
        return tuple(dict.fromkeys(channel[1:3]))

    def describe(self, slot: int) -> str:
        """What happens in a meeting, for people."""
        number = int(self._agreement[slot - self.first_slot])
        return describe(next((what for what, i in self._agreements.items() if i == number), ()))

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _rows(self, cell: Cell, stretch: Stretch) -> _Rows:
        comms, ops = stretch.program.comms, stretch.ops
        channel_of_comm, side_of_comm = self._comm_channels(cell, stretch)
        agreement_of_comm = np.array([self._agree((agreement(c),)) for c in comms], dtype=np.int64)
        op, comm = np.arange(len(ops)), ops.comm
        extra = [self._batch(stretch, index, parts) for index, parts in ops.batches.items()]
        if extra:
            single = np.ones(len(ops), dtype=bool)
            single[list(ops.batches)] = False
            op, comm = op[single], comm[single]
        channel, side = channel_of_comm[comm], side_of_comm[comm]
        agreed, duration = agreement_of_comm[comm], stretch.prices.comm_ns[comm]
        if extra:
            columns = [
                np.array(column) for column in zip(*(row for rows in extra for row in rows), strict=True)
            ]
            op = np.concatenate((op, columns[0]))
            channel = np.concatenate((channel, channel_of_comm[columns[1]]))
            side = np.concatenate((side, side_of_comm[columns[1]]))
            agreed = np.concatenate((agreed, columns[2]))
            duration = np.concatenate((duration, columns[3]))
            order = np.argsort(op, kind="stable")
            op, channel, side, agreed, duration = (x[order] for x in (op, channel, side, agreed, duration))
        return _Rows(
            op=op,
            channel=channel,
            side=side,
            sequence=_running_count(channel * 2 + side),
            agreement=agreed,
            duration_ns=duration,
        )

    def _comm_channels(self, cell: Cell, stretch: Stretch) -> tuple[np.ndarray, np.ndarray]:
        program = stretch.program
        channels = np.full(len(program.comms), -1, dtype=np.int64)
        sides = np.zeros(len(program.comms), dtype=np.int64)
        for index in stretch.ops.used_comms():
            comm = program.comms[index]
            communicator = self.quotient.communicator[cell.index, comm.group]
            key: tuple[int, ...] = (communicator,)
            if comm.kind in P2P:
                peer = self.quotient.peers[cell.index, index]
                sends = comm.kind == "send"
                pair = (cell.index, peer) if sends else (peer, cell.index)
                key = (communicator, *pair, _distance(program, comm) if peer == cell.index else 0)
            channels[index] = self._channels.setdefault(key, len(self._channels))
            sides[index] = comm.kind == "recv"
        return channels, sides

    def _batch(self, stretch: Stretch, op: int, parts: tuple[int, ...]) -> list[tuple[int, int, int, float]]:
        """Rows (op, comm, agreement, duration) of a batch: each message is one, coalesced collectives are one."""
        comms = stretch.program.comms
        rows = []
        collectives: dict[int, list[int]] = {}
        for part in parts:
            if comms[part].kind in P2P:
                rows.append(
                    (op, part, self._agree((agreement(comms[part]),)), float(stretch.prices.comm_ns[part]))
                )
            else:
                collectives.setdefault(comms[part].group, []).append(part)
        for together in collectives.values():
            calls = [comms[part] for part in together]
            duration = float(stretch.prices.comm_ns[together[0]])
            if len(calls) > 1:
                duration = self._pricer.price_comm(stretch.program, merged(calls)).duration_ns
            rows.append((op, together[0], self._agree(tuple(agreement(c) for c in calls)), duration))
        return rows

    def _agree(self, what: tuple) -> int:
        return self._agreements.setdefault(what, len(self._agreements))

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, rows: _Rows, stretch: Stretch) -> Linked:
        slot = self.first_of_channel[rows.channel] + rows.sequence
        first = np.searchsorted(rows.op, np.arange(len(stretch.ops)))
        several = np.flatnonzero(np.bincount(rows.op, minlength=len(stretch.ops)) > 1)
        last = np.searchsorted(rows.op, several, side="right")
        return Linked(
            op=rows.op,
            slot=slot,
            first_slot=slot[first] if len(slot) else slot,
            parts={
                int(op): tuple(slot[a:b].tolist())
                for op, a, b in zip(several.tolist(), first[several].tolist(), last.tolist(), strict=True)
            },
        )

    def _durations(self, rows: list[_Rows]) -> np.ndarray:
        duration = np.zeros(self.num_slots)
        for row, linked in zip(rows, self.linked, strict=True):
            np.maximum.at(duration, linked.slot - self.first_slot, row.duration_ns)
        return duration

    def _check(self, rows: list[_Rows]) -> None:
        """Raise :class:`SimulationFault` where calls that meet do not agree."""
        self._agreement = np.full(self.num_slots, -1, dtype=np.int64)
        for cell, row, linked in zip(self.quotient.cells, rows, self.linked, strict=True):
            for side in (0, 1):
                mine = row.side == side
                where = linked.slot[mine] - self.first_slot
                seen = self._agreement[where]
                wrong = np.flatnonzero((seen >= 0) & (seen != row.agreement[mine]))
                if len(wrong):
                    first = int(wrong[0])
                    raise self._mismatch(cell, int(row.op[mine][first]), int(linked.slot[mine][first]))
                self._agreement[where] = row.agreement[mine]

    def _mismatch(self, cell: Cell, op: int, slot: int) -> SimulationFault:
        for index in self.cells_at(slot):
            found = self.op_at(index, slot)
            if found is not None and (index, found) != (cell.index, op):
                other, other_op = index, found
                break
        return SimulationFault(
            kind="mismatch",
            group=self.group_name(cell.index, op),
            sequence=self.channel_of(slot)[1],
            waiting=self.party(other, other_op),
            other=self.party(cell.index, op),
        )

    # ── for people ───────────────────────────────────────────────────────────────────────────────────────────

    def op_at(self, cell: int, slot: int) -> int | None:
        """The op of a cell that takes part in a meeting."""
        linked = self.linked[cell]
        found = np.flatnonzero(linked.slot == slot)
        return int(linked.op[found[0]]) if len(found) else None

    def group_name(self, cell: int, op: int) -> str:
        """Description of the group an op runs on."""
        stretch = self.stretches[cell]
        group = stretch.program.groups[stretch.program.comms[int(stretch.ops.comm[op])].group]
        return group.desc or group.name

    def party(self, cell: int, op: int | None, event: int | None = None) -> Party:
        """A cell and the op it is in (or, without one, the event it stands at)."""
        stretch = self.stretches[cell]
        if op is None:
            at = stretch.hi if event is None else event
            call = "no further call" if at >= stretch.hi else f"a wait (event {at})"
        else:
            at = int(stretch.ops.event[op])
            what = tuple(agreement(stretch.program.comms[part]) for part in stretch.ops.parts(op))
            site = stretch.program.comms[stretch.ops.parts(op)[0]].site
            call = f"{describe(what)} in group {self.group_name(cell, op)}" + (f" at {site}" if site else "")
        return Party(
            ranks=tuple(self.quotient.cells[cell].ranks.tolist()),
            call=call,
            phase=phase_at(stretch.program, at),
        )


class _Rows(msgspec.Struct, frozen=True, kw_only=True):
    op: np.ndarray
    channel: np.ndarray
    side: np.ndarray
    """1 for the receiver of a message."""
    sequence: np.ndarray
    agreement: np.ndarray
    duration_ns: np.ndarray


def merged(parts: list[CommSignature]) -> CommSignature:
    """Coalesced calls of one communicator as one: their sizes add up, the latency is paid once."""
    return msgspec.structs.replace(
        parts[0],
        in_numel=sum(p.in_numel for p in parts),
        out_numel=sum(p.out_numel for p in parts),
        send_splits=(),
        recv_splits=(),
    )


def _distance(program: Program, comm: CommSignature) -> int:
    """How far around the group a message travels: tells apart the neighbours of a rank in its own cell."""
    ranks = program.groups[comm.group].ranks
    own = ranks.index(program.rank)
    return (comm.peer - own if comm.kind == "send" else own - comm.peer) % len(ranks)


def _running_count(key: np.ndarray) -> np.ndarray:
    """For each element, how many equal ones come before it."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    opens = (
        np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        if len(key)
        else np.empty(0, np.int64)
    )
    count = np.empty(len(key), dtype=np.int64)
    count[order] = np.arange(len(key)) - np.repeat(opens, np.diff(np.append(opens, len(key))))
    return count
