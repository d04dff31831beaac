"""Allocations that are released later than their role usually is, on the captured stage and on another. See
:mod:`.derive`.

A release happens when the last holder lets go. Most received tensors and outputs go with their backward step. Two
holders outlast it: a variable of the scheduler that keeps the last received input or the last output until the
scheduler returns, and a model chunk that keeps its last input until its next forward step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import EventKind
from prism_plugins.program.segments import MicroBatch, Segments, Timetable, TokenKind
from prism_plugins.program.tokens import Role, TokenKey, TokenNames, name_unit

Context = tuple[tuple[int, ...], tuple[int, ...]]
"""Codes of the classes of the phases before a unit (nearest first) and after it."""
_CONTEXT_PHASES = 12


def context_of(unit: int, timetable: Timetable) -> Context:
    """The surroundings of a unit."""
    before, after = unit // 2, (unit + 1) // 2
    codes = timetable.codes
    return (
        tuple(reversed(codes[max(0, before - _CONTEXT_PHASES) : before])),
        tuple(codes[after : after + _CONTEXT_PHASES]),
    )


def likeness_of(a: Context, b: Context) -> tuple[int, int]:
    """How many phases before and after agree, counted outward until the first that does not."""
    before, after = (
        next(
            (n for n, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y),
            min(len(mine), len(other)),
        )
        for mine, other in zip(a, b, strict=True)
    )
    return before, after


class Found(NamedTuple):
    """A row of a unit that needs a token found by walking back."""

    row: int
    key: TokenKey
    role: Role
    micro_batch: MicroBatch


class Unit(NamedTuple):
    """A unit of the target."""

    events: np.ndarray
    found: list[Found]
    origin: np.ndarray
    """Per event the captured one that it was made from; -1 for new ones."""


class Numbers:
    """Numbers of tokens on the target: the captured ones by role and micro-batch, and new ones above them all."""

    def __init__(self, events: np.ndarray, names: TokenNames) -> None:
        def above(column: str, *kinds: EventKind) -> int:
            values = events[column][np.isin(events["kind"], kinds)]
            return int(values.max()) + 1 if len(values) else 0

        self._names = names
        self._next = {
            TokenKind.ALLOCATION: above("ref", EventKind.ALLOC, EventKind.FREE),
            TokenKind.WORK: max(above("value", EventKind.COMM), above("ref", EventKind.WORK_WAIT)),
            TokenKind.EVENT: above("ref", EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC),
        }
        self._added: dict[tuple[Role, MicroBatch], TokenKey] = {}

    def new(self, kind: TokenKind) -> int:
        """A number that nothing has yet."""
        number = self._next[kind]
        self._next[kind] = number + 1
        return number

    def token(self, role: Role, micro_batch: MicroBatch) -> TokenKey:
        """The token of a role for a micro-batch. One that the capture does not have (it waited at once for a
        transfer that this stage waits for later) gets a new number."""
        key = self._names.token(role, micro_batch) or self._added.get((role, micro_batch))
        if key is None:
            key = self._added[role, micro_batch] = (role[0], self.new(role[0]))
        return key


class LateReleases:
    """What is released late on the captured stage."""

    def __init__(self, segments: Segments, names: TokenNames) -> None:
        self._segments = segments
        self._names = names
        self._outliving, kept, unreleased = names.late_releases()
        self.kept_roles: dict[Role, int] = {}
        """Roles whose tokens a model chunk keeps until its next forward step; the row of that body where it lets go."""
        for key, event in kept.items():
            self._learn_keeper(key, event)
        self.stripped_rows = {
            segments.unit_of(event): event - int(segments.bounds[segments.unit_of(event)])
            for event in kept.values()
        }
        """Fixed body → row of a late release in it."""
        self.exceptions: dict[int, list[TokenKey]] = {}
        """Loose units that lack a release because a token is released late, and the tokens."""
        self.unreleased = frozenset(unreleased)
        """Tokens that are live when the iteration ends."""
        live: dict[Role, set[MicroBatch | None]] = {}
        for key in unreleased:
            live.setdefault(names.role(key), set()).add(names.micro_batch(key))
        self.tied_roles = {
            role: holder
            for holder in self.kept_roles
            for role, micro_batches in live.items()
            if role not in self.kept_roles and micro_batches == live.get(holder)
        }
        """Roles whose tokens live as long as those of a kept role: the gradient of an input hangs on the input."""
        for key in (*self._outliving, *kept, *unreleased):
            for unit in names.usual_units(key):
                self.exceptions.setdefault(unit, []).append(key)

    def on(self, timetable: Timetable, numbers: Numbers) -> LateOnTarget:
        """The same on another stage. Raises :class:`CannotDeriveError`."""
        outliving: dict[TokenKey, TokenKey] = {}
        moved: dict[MicroBatch | None, MicroBatch] = {}
        # A gradient lives as long as the received input it belongs to: those of loose units come first.
        for key in sorted(self._outliving, key=lambda key: self._names.owner(key) is None):
            mine = self._names.micro_batch(key)
            if self._names.owner(key) is not None or mine not in moved:
                moved[mine] = self._counterpart(key, timetable)
            outliving[key] = numbers.token(self._names.role(key), moved[mine])
        return LateOnTarget(self, timetable, outliving)

    def _learn_keeper(self, key: TokenKey, event: int) -> None:
        timetable, micro_batch = self._segments.timetable, self._names.micro_batch(key)
        unit = self._segments.unit_of(event)
        if next_forward(micro_batch, timetable) != unit // 2:
            raise CannotDeriveError(
                f"an allocation of micro-batch {micro_batch} is released in {name_unit(timetable.unit_class(unit))} "
                "of another one for no reason that is known"
            )
        row = event - int(self._segments.bounds[unit])
        if self.kept_roles.setdefault(self._names.role(key), row) != row:
            raise CannotDeriveError("a model chunk does not always release its last input at the same place")

    def _counterpart(self, key: TokenKey, timetable: Timetable) -> MicroBatch:
        """Whose token outlives the schedule on the other stage: that made in the unit that is most alike."""
        captured, owner = self._segments.timetable, self._names.owner(key)
        unit = self._names.unit(key)
        unit_class, context = captured.unit_class(unit), context_of(unit, captured)
        scores: dict[int, tuple[int, int]] = {}
        for other in range(timetable.num_units):
            if timetable.unit_class(other) == unit_class:
                before, after = likeness_of(context, context_of(other, timetable))
                scores[other] = (min(before, 4) + min(after, 4), before + after)
        best = [other for other, score in scores.items() if score == max(scores.values())]
        if len(best) != 1:
            raise CannotDeriveError(f"{len(best)} units are like the one whose product outlives the schedule")
        if owner is not None:
            micro_batch = owner.micro_batch(best[0], timetable)
        else:
            phase = timetable.phases[best[0] // 2]
            micro_batch = (phase.microbatch, phase.chunk)
        if micro_batch is None:
            raise CannotDeriveError("what outlives the schedule belongs to no micro-batch")
        return micro_batch


class LateOnTarget:
    """What is released late on a target stage."""

    def __init__(
        self, captured: LateReleases, timetable: Timetable, outliving: dict[TokenKey, TokenKey]
    ) -> None:
        self._captured = captured
        self._timetable = timetable
        self.end = timetable.last_working_unit
        self.outliving = outliving
        """Captured tokens that outlive the schedule → those that do so here."""

    def lacks(self, key: TokenKey, micro_batch: MicroBatch | None, unit: int) -> bool:
        """True when a unit that would release the token of ``key``'s role for a micro-batch does not, for the
        reason for which the captured ``key`` is released late."""
        if micro_batch is None:
            return False
        names = self._captured._names
        here = names.token(names.role(key), micro_batch)
        if key in self.outliving:
            return self.outliving[key] == here
        if key in self._captured.unreleased:
            return here in self._captured.unreleased
        return self._keeps(micro_batch, unit)

    def keep(self, units: list[Unit]) -> None:
        """Move releases from where they usually are into the next forward step of the chunk, where that is later;
        drop those of what is live when the iteration ends."""
        source = self._captured._segments.timetable
        late: dict[int, list[tuple[int, bool, int]]] = {}
        for number, unit in enumerate(units):
            moved = []
            for found in unit.found:
                holder = self._captured.tied_roles.get(found.role, found.role)
                row = self._captured.kept_roles.get(holder)
                if found.key in self._captured.unreleased:
                    moved.append(found.row)
                elif row is not None and self._keeps(found.micro_batch, number):
                    body = 2 * next_forward(found.micro_batch, self._timetable) + 1
                    late.setdefault(body, []).append((row, holder == found.role, found.key[1]))
                    moved.append(found.row)
            if moved:
                units[number] = without_rows(unit, moved)
        captured_rows = {source.phases[u // 2]: row for u, row in self._captured.stripped_rows.items()}
        for number, phase in enumerate(self._timetable.phases):
            body = 2 * number + 1
            wanted, has = late.get(body, []), captured_rows.get(phase)
            if not wanted and has is None:
                continue
            events, origin = units[body].events, units[body].origin
            if has is not None:
                events, origin = np.delete(events, has), np.delete(origin, has)
            # What hangs on an input goes before it; the last to be inserted comes first.
            for row, _, id in sorted(wanted, reverse=True):
                release = np.zeros(1, dtype=events.dtype)
                release["kind"], release["ref"] = EventKind.FREE, id
                events, origin = np.insert(events, row, release), np.insert(origin, row, -1)
            units[body] = Unit(events, [], origin)

    def _keeps(self, micro_batch: MicroBatch, unit: int) -> bool:
        """True when the chunk's next forward step comes after a unit."""
        phase = next_forward(micro_batch, self._timetable)
        return phase is not None and 2 * phase + 1 > unit


def next_forward(micro_batch: MicroBatch, timetable: Timetable) -> int | None:
    """The phase of the chunk's forward step after that of a micro-batch."""
    return timetable.next_step_of_chunk(micro_batch)


def without_rows(unit: Unit, rows: list[int]) -> Unit:
    """A unit without some of its events."""
    found = [
        f._replace(row=f.row - sum(row < f.row for row in rows)) for f in unit.found if f.row not in rows
    ]
    return Unit(np.delete(unit.events, rows), found, np.delete(unit.origin, rows))
