"""Links compiled stretches of all cells: which calls meet in which rendezvous.

Every collective on a communicator is a rendezvous of its member cells; the n-th call of one member meets the n-th of
the others. A p2p message is a rendezvous of two, matched per (communicator, sender, receiver) in order. What can
be known without times is checked here: calls that meet must agree in kind and size.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.model import CommSignature
from prism_plugins.simulate.compile import CommOp, Stretch
from prism_plugins.simulate.faults import Party, SimulationFault
from prism_plugins.simulate.prices import Pricer
from prism_plugins.simulate.quotient import Cell, Quotient

_ROOTED = ("broadcast", "reduce", "gather", "scatter")


class Meeting(msgspec.Struct, kw_only=True):
    """A rendezvous before and while it is assembled."""

    slot: int
    channel: tuple
    """(quotient communicator,) of a collective, (communicator, sender, receiver, distance) of a message."""
    sequence: int
    what: tuple
    """Kind and sizes that all parties must agree on."""
    duration_ns: float
    expected: int
    parties: list[tuple[int, int]]
    """(cell, absolute event index) of those whose programs come here."""


class Rendezvous:
    """All meetings of the job, and flat tables for the engine: one slot per meeting."""

    def __init__(self) -> None:
        self.meetings: list[Meeting] = []
        self._by_key: dict[tuple, Meeting] = {}

    def meet(
        self,
        key: tuple,
        sequence: int,
        *,
        what: tuple,
        duration_ns: float,
        expected: int,
        party: tuple[int, int],
    ) -> Meeting:
        """The meeting number ``sequence`` on a channel; created by the first party."""
        meeting = self._by_key.get((key, sequence))
        if meeting is None:
            meeting = Meeting(
                slot=len(self.meetings),
                channel=key,
                sequence=sequence,
                what=what,
                duration_ns=duration_ns,
                expected=expected,
                parties=[party],
            )
            self._by_key[key, sequence] = meeting
            self.meetings.append(meeting)
            return meeting
        meeting.parties.append(party)
        if duration_ns > meeting.duration_ns:
            meeting.duration_ns = duration_ns
        return meeting


class Layer:
    """The linked calls of one partition: the job up to the fork, or after it."""

    def __init__(self, quotient: Quotient, rendezvous: Rendezvous, pricer: Pricer, *, name: str) -> None:
        self.quotient = quotient
        self.rendezvous = rendezvous
        self.name = name
        self._pricer = pricer
        self._sequence: dict[tuple, int] = {}

    def link(self, cell: Cell, stretch: Stretch) -> list[tuple[int, ...]]:
        """For each op of a cell's stretch, the slots of the meetings it takes part in."""
        return [self._link_op(cell, stretch, op) for op in stretch.ops]

    def _link_op(self, cell: Cell, stretch: Stretch, op: CommOp) -> tuple[int, ...]:
        comms = stretch.program.comms
        slots: list[int] = []
        collectives: dict[int, list[int]] = {}
        for part in op.parts:
            comm = comms[part]
            if comm.kind in ("send", "recv"):
                slots.append(self._message(cell, stretch, op, part, comm))
            else:
                collectives.setdefault(comm.group, []).append(part)
        for group, parts in collectives.items():
            slots.append(self._collective(cell, stretch, op, group, parts))
        return tuple(slots)

    def _collective(self, cell: Cell, stretch: Stretch, op: CommOp, group: int, parts: list[int]) -> int:
        comms = stretch.program.comms
        communicator = self.quotient.communicator[cell.index, group]
        if len(parts) == 1:
            duration = float(stretch.prices.comm_ns[parts[0]])
        else:
            duration = self._pricer.price_comm(stretch.program, merged([comms[p] for p in parts])).duration_ns
        what = tuple(agreement(comms[p]) for p in parts)
        sequence = self._next((self.name, communicator), cell.index)
        meeting = self.rendezvous.meet(
            (self.name, communicator),
            sequence,
            what=what,
            duration_ns=duration,
            expected=len(self.quotient.members[communicator]),
            party=(cell.index, op.event),
        )
        if meeting.what != what:
            raise self._mismatch(meeting, cell, stretch, op, what)
        return meeting.slot

    def _message(self, cell: Cell, stretch: Stretch, op: CommOp, part: int, comm: CommSignature) -> int:
        communicator = self.quotient.communicator[cell.index, comm.group]
        peer = self.quotient.peers[cell.index, part]
        sends = comm.kind == "send"
        source, target = (cell.index, peer) if sends else (peer, cell.index)
        distance = 0
        if (
            source == target
        ):  # neighbours of one cell: which neighbour is told by the distance around the group
            ranks = stretch.program.groups[comm.group].ranks
            own = ranks.index(stretch.program.rank)
            distance = (comm.peer - own if sends else own - comm.peer) % len(ranks)
        key = (self.name, communicator, source, target, distance)
        sequence = self._next(key, (cell.index, sends))
        what = (("message", comm.nbytes),)
        meeting = self.rendezvous.meet(
            key,
            sequence,
            what=what,
            duration_ns=float(stretch.prices.comm_ns[part]),
            expected=2,
            party=(cell.index, op.event),
        )
        if meeting.what != what:
            raise self._mismatch(meeting, cell, stretch, op, what)
        return meeting.slot

    def _next(self, key: tuple, member: object) -> int:
        n = self._sequence.get((key, member), 0)
        self._sequence[key, member] = n + 1
        return n

    def _mismatch(
        self, meeting: Meeting, cell: Cell, stretch: Stretch, op: CommOp, what: tuple
    ) -> SimulationFault:
        other_cell, other_event = meeting.parties[0]
        other = self.quotient.cells[other_cell]
        group = stretch.program.groups[stretch.program.comms[op.parts[0]].group]
        return SimulationFault(
            kind="mismatch",
            group=group.desc or group.name,
            sequence=meeting.sequence,
            waiting=Party(
                ranks=tuple(other.ranks.tolist()),
                call=describe(meeting.what),
                phase=phase_at(other.program, other_event),
            ),
            other=Party(
                ranks=tuple(cell.ranks.tolist()),
                call=describe(what),
                phase=phase_at(stretch.program, op.event),
            ),
        )


def agreement(comm: CommSignature) -> tuple:
    """What all members of a collective must agree on."""
    if comm.kind == "barrier":
        return ("barrier",)
    if comm.kind == "all_to_all":
        return ("all_to_all", 0 if comm.send_splits or comm.recv_splits else comm.nbytes)
    if comm.kind == "gather":
        size, root = comm.in_numel, comm.peer
    elif comm.kind == "scatter":
        size, root = comm.out_numel, comm.peer
    else:
        size, root = max(comm.in_numel, comm.out_numel), comm.peer if comm.kind in _ROOTED else -1
    return (comm.kind, size, comm.dtype, root)


def describe(what: tuple) -> str:
    """For people: ``all_reduce of 4096 bfloat16``."""
    texts = []
    for part in what:
        if part[0] == "message":
            texts.append(f"a message of {part[1]} bytes")
        elif len(part) >= 3:
            root = f" from member {part[3]}" if part[3] >= 0 else ""
            texts.append(f"{part[0]} of {part[1]} {part[2]}{root}")
        else:
            texts.append(" of ".join(str(x) for x in part))
    return " + ".join(texts[:3]) + (f" + {len(texts) - 3} more" if len(texts) > 3 else "")


def merged(parts: list[CommSignature]) -> CommSignature:
    """Coalesced calls of one communicator as one: their sizes add up, the latency is paid once."""
    first = parts[0]
    return msgspec.structs.replace(
        first,
        in_numel=sum(p.in_numel for p in parts),
        out_numel=sum(p.out_numel for p in parts),
        send_splits=(),
        recv_splits=(),
    )


def phase_at(program, event: int) -> str:
    """Name of the phase that is open at an event."""
    from prism_plugins.program.model import EventKind

    kind = program.events["kind"][: event + 1]
    opened = np.flatnonzero((kind == EventKind.PHASE_BEGIN) | (kind == EventKind.PHASE_END))
    if not len(opened) or kind[opened[-1]] == EventKind.PHASE_END:
        return "none"
    phase = program.phases[int(program.events["ref"][opened[-1]])]
    at = "".join(
        f" {label} {value}"
        for label, value in (("micro-batch", phase.microbatch), ("chunk", phase.chunk))
        if value >= 0
    )
    return phase.kind + at
