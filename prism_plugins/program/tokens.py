"""Names for the tokens of a captured program that hold on every stage's timetable. See :mod:`.derive`.

A token made in a fixed unit (a forward or backward body) belongs to that unit's micro-batch. One made in a loose
unit belongs to the micro-batch of a part nearby; which part is learnt: the one that explains the token's uses by
the fewest and shortest *ways*. A way leads from the last phase that worked on the token's micro-batch to the use.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import EventKind
from prism_plugins.program.schedule import BOUNDARY
from prism_plugins.program.segments import (
    MicroBatch,
    Segments,
    Timetable,
    Token,
    TokenKind,
    UnitClass,
)

TokenKey = tuple[TokenKind, int]
Role = tuple
"""What a token is, however it was made: equal on all stages for tokens that are the same piece of work but for
the micro-batch."""


class TokenType(NamedTuple):
    """Tokens made by the same class of unit, at the same place in it."""

    kind: TokenKind
    unit_class: UnitClass
    ordinal: int


class Owner(NamedTuple):
    """Whose a token made in a loose unit is: the micro-batch of the nearest part of this name, or of its
    predecessor or successor (an output may be shrunk only after the next input has arrived)."""

    ahead: bool
    """Look at the phases after the unit instead of at itself and those before it."""
    name: str
    shift: int = 0
    """Added to the part's ordinal."""

    def micro_batch(self, unit: int, timetable: Timetable) -> MicroBatch | None:
        """The owner's micro-batch where the token is made in ``unit``."""
        ordinal = timetable.nearest_part(self.name, unit, ahead=self.ahead)
        return None if ordinal is None else timetable.micro_batch((self.name, ordinal + self.shift))


class Way(NamedTuple):
    """How a unit follows the last phase that worked on a micro-batch."""

    anchor: str
    """Name of the part that ties that phase to the micro-batch."""
    classes: tuple[int, ...]
    """Codes of the classes from that phase up to the unit."""


_SAMPLE = 24
"""Tokens of a type whose ways are looked at to choose its owner."""


class TokenNames:
    """Roles and micro-batches of the tokens of a captured program that pass through loose units."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._timetable = segments.timetable
        tokens = segments.loose_tokens()
        self._unit = {key: segments.unit_of(token.definition) for key, token in tokens.items()}
        self.local = {key for key, token in tokens.items() if self._is_local(key, token)}
        """Tokens that no other unit needs than the loose one that makes them."""
        self._tokens = {key: token for key, token in tokens.items() if key not in self.local}
        self._type = self._types()
        self._add_unreleased()
        self._owner: dict[TokenType, Owner | None] = {}
        self._named: dict[tuple[Role, MicroBatch | None], TokenKey] = {}
        self._micro_batch: dict[TokenKey, MicroBatch | None] = {}
        self._ways: dict[Role, set[Way]] = {}
        self._learn_owners()
        self._roles = {type_: self._role(type_) for type_ in self._owner}

    def role(self, key: TokenKey) -> Role:
        """The role of a token."""
        return self._roles[self._type[key]]

    def micro_batch(self, key: TokenKey) -> MicroBatch | None:
        """The micro-batch a token belongs to, if to any."""
        return self._micro_batch[key]

    def owner(self, key: TokenKey) -> Owner | None:
        """Where the micro-batch of a token made in a loose unit is read; None: it has none, or was made elsewhere."""
        return self._owner[self._type[key]]

    def token(self, role: Role, micro_batch: MicroBatch | None) -> TokenKey | None:
        """The captured token of this role and micro-batch, if the capture has it."""
        return self._named.get((role, micro_batch))

    def late_releases(self) -> tuple[list[TokenKey], dict[TokenKey, int], list[TokenKey]]:
        """Allocations that something holds beyond where their role is released otherwise.

        First those that outlive the schedule: the scheduler's variables keep the last received input and the last
        output until it returns. Second those released in the copied body of another micro-batch, with the event: a
        model chunk keeps its last input until its next forward step. Third those still live when the iteration
        ends.
        """
        outliving: list[TokenKey] = []
        kept: dict[TokenKey, int] = {}
        unreleased: list[TokenKey] = []
        for key, token in self._tokens.items():
            micro_batch = self._micro_batch[key]
            if micro_batch is None or key[0] != TokenKind.ALLOCATION:
                continue
            if not token.uses:
                unreleased.append(key)
            for event in token.uses:
                unit = self._segments.unit_of(event)
                if unit > self._timetable.last_working_unit:
                    outliving.append(key)
                elif not self._segments.is_loose(unit) and self._made_for(unit) not in (None, micro_batch):
                    kept[key] = event
        return outliving, kept, unreleased

    def usual_units(self, key: TokenKey) -> Iterator[int]:
        """Loose units where a token would be needed if it were needed as others of its role are."""
        micro_batch = self._micro_batch[key]
        starts = self._timetable.phases_of[micro_batch] if micro_batch is not None else ()
        for start, way in itertools.product(starts, self._usual_ways()[self.role(key)]):
            for unit in (2 * (start + len(way.classes)) - 1, 2 * (start + len(way.classes))):
                usual = unit <= self._timetable.last_working_unit and self._segments.is_loose(unit)
                if usual and way_to(unit, micro_batch, self._timetable) == way:
                    yield unit

    def _usual_ways(self) -> dict[Role, set[Way]]:
        if not self._ways:
            for key, token in self._tokens.items():
                ways = self._ways.setdefault(self.role(key), set())
                micro_batch = self._micro_batch[key]
                for event in token.uses if micro_batch is not None else ():
                    unit = self._segments.unit_of(event)
                    way = way_to(unit, micro_batch, self._timetable)
                    if self._segments.is_loose(unit) and way is not None:
                        ways.add(way)
        return self._ways

    def unit(self, key: TokenKey) -> int:
        """The unit that makes a token; -1 for one from before the iteration."""
        return self._unit[key]

    def _is_local(self, key: TokenKey, token: Token) -> bool:
        unit = self._unit[key]
        return (
            unit >= 0
            and (bool(token.uses) or token.kind != TokenKind.ALLOCATION)
            and self._segments.is_loose(unit)
            and all(self._segments.unit_of(event) == unit for event in token.uses)
        )

    def _types(self) -> dict[TokenKey, TokenType]:
        types: dict[TokenKey, TokenType] = {}
        count: dict[tuple[int, TokenKind], int] = {}
        for key, token in sorted(self._tokens.items(), key=lambda item: item[1].definition):
            unit = self._unit[key]
            ordinal = count.get((unit, token.kind), 0)
            count[unit, token.kind] = ordinal + 1
            types[key] = TokenType(token.kind, self._timetable.unit_class(unit) if unit >= 0 else (), ordinal)
        return types

    def _add_unreleased(self) -> None:
        """Take in what a fixed body makes and nothing releases, where other bodies of the class make a token there.

        Its like is released in loose units; this one lives on (the gradient of an input that a chunk keeps).
        """
        made: dict[TokenType, dict[int, int]] = {}
        events = self._segments.program.events
        for key, type_ in self._type.items():
            unit = self._unit[key]
            if key[0] == TokenKind.ALLOCATION and unit >= 0 and not self._segments.is_loose(unit):
                made.setdefault(type_, {})[unit] = int(events["value"][self._tokens[key].definition])
        released = np.unique(events["ref"][events["kind"] == EventKind.FREE])
        for type_, nbytes_of in made.items():
            sizes = set(nbytes_of.values())
            for i in range(len(self._timetable.phases)):
                unit = 2 * i + 1
                if self._timetable.unit_class(unit) != type_.unit_class or unit in nbytes_of:
                    continue
                lo, hi = self._segments.bounds[unit], self._segments.bounds[unit + 1]
                rows = np.flatnonzero(events["kind"][lo:hi] == EventKind.ALLOC) + lo
                rows = rows[~np.isin(events["ref"][rows], released)]
                rows = [row for row in rows.tolist() if int(events["value"][row]) in sizes]
                if len(rows) == 1:
                    key = (TokenKind.ALLOCATION, int(events["ref"][rows[0]]))
                    self._tokens[key] = Token(*key, rows[0])
                    self._type[key], self._unit[key] = type_, unit

    def _learn_owners(self) -> None:
        """Choose the owners, of types with many tokens first: what is seen often explains what is seen once."""
        keys_of: dict[TokenType, list[TokenKey]] = {}
        for key, type_ in self._type.items():
            keys_of.setdefault(type_, []).append(key)
        known: dict[Role, set[Way]] = {}
        for type_, keys in sorted(keys_of.items(), key=lambda item: -len(item[1])):
            best: tuple[int, Owner | None, set[Way], dict[TokenKey, MicroBatch | None]] | None = None
            outlives = all(
                self._segments.unit_of(event) > self._timetable.last_working_unit
                for key in keys
                for event in self._tokens[key].uses
            )
            for owner in self._owner_candidates(type_, keys[0]):
                self._owner[type_] = owner
                found = self._explain(type_, keys)
                if found is None:
                    continue
                ways, micro_batches = found
                if outlives:
                    # Its ways say nothing; it is the one that a well-known role lacks.
                    cost = -sum(role == self._role(type_) for role, _ in self._named)
                else:
                    cost = sum(1 + len(way.classes) for way in ways - known.get(self._role(type_), set()))
                if best is None or cost < best[0]:
                    best = (cost, owner, ways, micro_batches)
            if best is None:
                raise CannotDeriveError(f"nothing explains what becomes of an {_name_type(type_)}")
            _, self._owner[type_], ways, micro_batches = best
            role = self._role(type_)
            known.setdefault(role, set()).update(ways)
            self._micro_batch.update(micro_batches)
            self._named.update({(role, m): key for key, m in micro_batches.items()})

    def _owner_candidates(self, type_: TokenType, example: TokenKey) -> list[Owner | None]:
        unit = self._unit[example]
        if unit < 0 or BOUNDARY in type_.unit_class or not self._segments.is_loose(unit):
            return [None]
        if len(type_.unit_class) == 1:
            names = type_.unit_class[0][1]
            received = sorted((name for name in names if name.startswith("recv")), reverse=True)
            if type_.kind == TokenKind.ALLOCATION and received:
                # A p2p phase allocates what it receives, from the previous stage first.
                return [Owner(False, received[min(type_.ordinal, len(received) - 1)])]
            return [Owner(False, name) for name in names] or [None]
        beside = [(bool(side), name) for side, cls in enumerate(type_.unit_class) for name in cls[1]]
        candidates = [Owner(ahead, name, shift) for shift in (0, 1, -1) for ahead, name in beside]
        candidates += [Owner(False, name) for name in self._timetable.step_names]
        return list(dict.fromkeys(candidates)) or [None]

    def _explain(
        self, type_: TokenType, keys: list[TokenKey]
    ) -> tuple[set[Way], dict[TokenKey, MicroBatch | None]] | None:
        """The ways to all uses and the micro-batches with the owners as they stand; None when they do not fit: a
        token without micro-batch or way, or with the name of another token."""
        owner, role = self._owner[type_], self._role(type_)
        ways: set[Way] = set()
        micro_batches: dict[TokenKey, MicroBatch | None] = {}
        names: set[tuple[Role, MicroBatch | None]] = set()
        sample = set(keys[:: 1 + len(keys) // _SAMPLE]) | set(keys[-2:])
        for key in keys:
            unit = self._unit[key]
            micro_batch = self._made_for(unit) if owner is None else owner.micro_batch(unit, self._timetable)
            if owner is not None and micro_batch is None:
                return None
            name = (role, micro_batch)
            if name in names or name in self._named:
                return None
            names.add(name)
            micro_batches[key] = micro_batch
            if micro_batch is None:
                continue
            if key not in sample:
                continue
            for event in self._tokens[key].uses:
                way = way_to(self._segments.unit_of(event), micro_batch, self._timetable)
                if way is None:
                    return None
                ways.add(way)
        return ways, micro_batches

    def _made_for(self, unit: int) -> MicroBatch | None:
        """The micro-batch of a fixed body."""
        if unit < 0 or unit % 2 == 0:
            return None
        phase = self._timetable.phases[unit // 2]
        return (phase.microbatch, phase.chunk) if phase.microbatch >= 0 else None

    def _role(self, type_: TokenType) -> Role:
        owner = self._owner[type_]
        if owner is None:
            return type_
        # Among the tokens that this owner has in this unit, which one.
        rank = sum(
            its == owner
            and other.unit_class == type_.unit_class
            and other.kind == type_.kind
            and other.ordinal < type_.ordinal
            for other, its in self._owner.items()
        )
        name = owner.name if len(type_.unit_class) == 1 else owner.name.rpartition("_")[2]
        return (type_.kind, len(type_.unit_class), name, rank)


def way_to(unit: int, micro_batch: MicroBatch, timetable: Timetable) -> Way | None:
    """The way from the last phase at or before a unit that worked on a micro-batch."""
    last = (unit - 1) // 2
    phases = timetable.phases_of.get(micro_batch, ())
    at = bisect_right(phases, last)
    if not at:
        return None
    start = phases[at - 1]
    return Way(timetable.anchor(start, micro_batch), tuple(timetable.codes[start : last + 1]))


def way_back(way: Way, unit: int, timetable: Timetable) -> MicroBatch | None:
    """The micro-batch from whose last phase this way leads to a unit of any timetable; None if none does."""
    last = (unit - 1) // 2
    start = last + 1 - len(way.classes)
    if start < 0 or tuple(timetable.codes[start : last + 1]) != way.classes:
        return None
    phase = timetable.phases[start]
    found = [m for m in timetable.micro_batches(phase) if timetable.anchor(start, m) == way.anchor]
    if not found or way_to(unit, found[0], timetable) != way:
        return None
    return found[0]


def _name_type(type_: TokenType) -> str:
    return f"{type_.kind.name.lower()} that {name_unit(type_.unit_class)} makes"


def name_unit(unit_class: UnitClass) -> str:
    """A unit's class in words."""
    names = [cls[0] or "the edge of the iteration" for cls in unit_class]
    if not names:
        return "the previous iteration"
    return names[0] if len(names) == 1 else f"the step from {names[0]} to {names[1]}"
