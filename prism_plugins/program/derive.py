"""The program of one pipeline stage from the program of another that holds the same layers.

The target's schedule says in which order phases come. Bodies of forward and backward steps are copied whole from
the same step of the captured stage. Every gap and p2p phase is copied from the captured unit of its class whose
surroundings are most alike, and what it makes and needs is renamed (:mod:`.tokens`): a token that it makes is the
one of the same role for the micro-batch found at the same place; one that it needs is found by the way that
leads to it, walked back on the target's timetable.

Nothing is guessed: a class or a way that the capture does not have raises :class:`CannotDeriveError`, and so does
a result that does not run the same kernels and transfers and make and need the same tokens as the capture, each
once and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import EVENT_DTYPE, EventKind, Phase, Program
from prism_plugins.program.schedule import describe, missing_for
from prism_plugins.program.segments import Segments, Timetable, TokenKind, UnitClass, makes_token, token_key
from prism_plugins.program.tokens import Role, TokenKey, TokenNames, Way, name_unit, way_back, way_to


def derive_stage(program: Program, *, captured: Sequence[Phase], target: Sequence[Phase]) -> Program:
    """Reorder a captured stage's program to another stage's schedule; see :meth:`CapturedStage.derive`.

    ``captured`` and ``target`` are the schedules as the framework's scheduler tells them.
    Raises :class:`CannotDeriveError`.
    """
    return CapturedStage(program, captured).derive(target)


def _replace_schedule(
    phases: Sequence[Phase], captured: Sequence[Phase], target: Sequence[Phase]
) -> list[Phase]:
    """The program's phases with the scheduler's stretch replaced; what comes before and after it stays."""
    captured = tuple(captured)
    for start in range(len(phases) - len(captured) + 1):
        if phases[start : start + len(captured)] == captured:
            return [*phases[:start], *target, *phases[start + len(captured) :]]
    ran = [p for p in phases if p in set(captured)]
    where = next(
        (i for i, (a, b) in enumerate(zip(ran, captured, strict=False)) if a != b),
        min(len(ran), len(captured)),
    )
    got = describe(ran[where]) if where < len(ran) else "nothing"
    wanted = describe(captured[where]) if where < len(captured) else "nothing more"
    raise CannotDeriveError(
        f"the slice did not run the schedule its framework told: at phase {where} {got} instead of {wanted}"
    )


class _Need(NamedTuple):
    """A use in a unit of a token from elsewhere."""

    row: int
    token: TokenKey
    role: Role
    way: Way | None
    """None for a token that belongs to no micro-batch."""


class _Template:
    """A captured loose unit, its tokens described so that they can be found on another timetable."""

    def __init__(self, unit: int, segments: Segments, names: TokenNames) -> None:
        lo, hi = int(segments.bounds[unit]), int(segments.bounds[unit + 1])
        self.events = segments.program.events[lo:hi]
        self.identity = segments.timetable.unit_identity(unit)
        self.makes: dict[TokenKey, list[int]] = {}
        self.local: dict[TokenKey, list[int]] = {}
        self.needs: list[_Need] = []
        shape = []
        for row, event in enumerate(self.events.tolist()):
            key = token_key(event)
            what: object = -1
            if key is not None and (makes_token(event) or key in names.local):
                rows = (self.local if key in names.local else self.makes).setdefault(key, [])
                rows.append(row)
                what = ("local", list(self.local).index(key)) if key in names.local else names.role(key)
            elif key is not None:
                micro_batch = names.micro_batch(key)
                way = None if micro_batch is None else way_to(unit, micro_batch, segments.timetable)
                need = _Need(row, key, names.role(key), way)
                self.needs.append(need)
                what = (need.role, way)
            shape.append(_abstract(event, what))
        self.shape = tuple(shape)
        """Equal for units that do the same."""


class CapturedStage:
    """A captured program prepared for derivations; make one per slice and derive many stages from it."""

    def __init__(self, program: Program, schedule: Sequence[Phase]) -> None:
        self._segments = segments = Segments(program)
        self._schedule = tuple(schedule)
        self._names = names = TokenNames(segments)
        timetable = segments.timetable
        self._fixed = {
            phase: segments.program.events[segments.bounds[2 * i + 1] : segments.bounds[2 * i + 2]]
            for i, phase in enumerate(timetable.phases)
            if not segments.is_loose(2 * i + 1)
        }
        self._templates: dict[UnitClass, dict[_Context, list[_Template]]] = {}
        self._exceptions: dict[tuple[UnitClass, _Context], list[_Template]] = {}
        self._choices: dict[tuple[UnitClass, _Context], _Choice] = {}
        exceptions = set(names.units_without_release())
        for unit in range(timetable.num_units):
            if segments.is_loose(unit):
                unit_class, context = timetable.unit_class(unit), _context(unit, timetable)
                of_class = self._templates.setdefault(unit_class, {})
                if unit in exceptions:
                    templates = self._exceptions.setdefault((unit_class, context), [])
                else:
                    templates = of_class.setdefault(context, [])
                templates.append(_Template(unit, segments, names))

    def derive(self, schedule: Sequence[Phase]) -> Program:
        """The program of a stage with another schedule. Groups, peers and rank stay those of the captured program:
        :class:`.instantiate.Instantiator` moves them. Raises :class:`CannotDeriveError`."""
        missing = missing_for(self._schedule, schedule)
        if missing:
            raise CannotDeriveError(f"the captured stage has no {missing}")
        program = self._segments.program
        phases = _replace_schedule(self._segments.timetable.phases, self._schedule, schedule)
        timetable = Timetable(phases)
        fresh = _fresh_ids(program.events)
        units = [self._unit(unit, timetable, fresh) for unit in range(timetable.num_units)]
        # As plain bytes: promoting the fields of a structured type costs more than the copying.
        pieces = [np.ascontiguousarray(piece).view("V16") for piece in self._without_surplus(units)]
        events = np.concatenate(pieces).view(EVENT_DTYPE)
        _check_same_work(program.events, events)
        table = list(dict.fromkeys([*program.phases, *phases]))
        index = {phase: i for i, phase in enumerate(table)}
        marks = (events["kind"] == EventKind.PHASE_BEGIN) | (events["kind"] == EventKind.PHASE_END)
        events["ref"][marks] = np.repeat([index[p] for p in phases], 2)
        return Program(
            rank=program.rank,
            events=events,
            signatures=program.signatures,
            comms=program.comms,
            groups=program.groups,
            phases=table,
            initial=program.initial,
            source="derived",
        )

    def _unit(
        self, unit: int, timetable: Timetable, fresh: dict[TokenKind, int]
    ) -> tuple[np.ndarray, list[tuple[int, TokenKey]]]:
        """Events of a unit, and the rows of tokens that were found by walking back."""
        if unit % 2 and timetable.phases[unit // 2] in self._fixed:
            return self._fixed[timetable.phases[unit // 2]], []
        template = self._template(unit, timetable)
        events = template.events.copy()
        for key, rows in template.local.items():
            _set_token(events, rows, key[0], fresh[key[0]])
            fresh[key[0]] += 1
        for key, rows in template.makes.items():
            owner = self._names.owner(key)
            if owner is not None:
                micro_batch = owner.micro_batch(unit, timetable)
                if micro_batch is None:
                    raise CannotDeriveError(f"{name_unit(timetable.unit_class(unit))} lacks {owner.name}")
                key = self._names.token(self._names.role(key), micro_batch)
            _set_token(events, rows, key[0], key[1])
        found: list[tuple[int, TokenKey]] = []
        same_unit = template.identity == timetable.unit_identity(unit)
        for need in template.needs:
            key = need.token
            if need.way is not None and not same_unit:
                micro_batch = way_back(need.way, unit, timetable)
                if micro_batch is None:
                    raise CannotDeriveError(
                        f"{name_unit(timetable.unit_class(unit))} needs something that is not made on the way there"
                    )
                key = self._names.token(need.role, micro_batch)
                found.append((need.row, key))
            _set_token(events, [need.row], key[0], key[1])
        return events, found

    def _without_surplus(
        self, units: list[tuple[np.ndarray, list[tuple[int, TokenKey]]]]
    ) -> list[np.ndarray]:
        """Drop releases found by walking back of tokens that are released in a unit the stages share.

        A variable that outlives its step (the last output, until the scheduler returns) makes an exception to
        where such tokens are released otherwise.
        """
        released = np.concatenate([events["ref"][events["kind"] == EventKind.FREE] for events, _ in units])
        ids, counts = np.unique(released, return_counts=True)
        repeated = {(TokenKind.ALLOCATION, id) for id in ids[counts > 1].tolist()}
        kept = []
        for events, found in units:
            surplus = [row for row, key in found if key in repeated]
            kept.append(np.delete(events, surplus) if surplus else events)
        return kept

    def _template(self, unit: int, timetable: Timetable) -> _Template:
        """The captured unit to copy: the very same one in the same surroundings, else that whose surroundings are
        most alike, as far back as possible, then as far ahead."""
        unit_class, context = timetable.unit_class(unit), _context(unit, timetable)
        choice = self._choices.get((unit_class, context))
        if choice is None:
            choice = self._choices[unit_class, context] = self._choose(unit_class, context)
        return choice.template(timetable.unit_identity(unit))

    def _choose(self, unit_class: UnitClass, context: _Context) -> _Choice:
        known = self._templates.get(unit_class)
        if not known:
            raise CannotDeriveError(f"the captured stage has nothing like {name_unit(unit_class)}")
        same = [*known.get(context, ()), *self._exceptions.get((unit_class, context), ())]
        likeness = {other: _likeness(context, other) for other in known}
        best = max(likeness.values())
        alike = [t for other, templates in known.items() if likeness[other] == best for t in templates]
        return _Choice(same, alike, name_unit(unit_class))


class _Choice:
    """The captured units that may be copied for units of one class in one kind of surroundings."""

    def __init__(self, same: list[_Template], alike: list[_Template], name: str) -> None:
        self._same = {template.identity: template for template in same}
        self._alike = alike[0]
        self._is_clear = all(template.shape == alike[0].shape for template in alike)
        self._name = name

    def template(self, identity: tuple[Phase | None, ...]) -> _Template:
        """The unit with this identity in the same surroundings, else one that is alike."""
        same = self._same.get(identity)
        if same is not None:
            return same
        if not self._is_clear:
            raise CannotDeriveError(f"{self._name} does not always do the same")
        return self._alike


_Context = tuple[tuple[int, ...], tuple[int, ...]]
"""Codes of the classes of the phases before a unit (nearest first) and after it."""
_CONTEXT_PHASES = 12


def _context(unit: int, timetable: Timetable) -> _Context:
    before, after = unit // 2, (unit + 1) // 2
    codes = timetable.codes
    return (
        tuple(reversed(codes[max(0, before - _CONTEXT_PHASES) : before])),
        tuple(codes[after : after + _CONTEXT_PHASES]),
    )


def _likeness(a: _Context, b: _Context) -> tuple[int, ...]:
    """How many phases before and after agree, counted outward until the first that does not."""
    return tuple(
        next(
            (n for n, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y),
            min(len(mine), len(other)),
        )
        for mine, other in zip(a, b, strict=True)
    )


def _abstract(event: tuple[int, int, int, int, int], what: object) -> tuple:
    """An event without the numbers that differ from one occurrence to the next."""
    kind, flags, stream, ref, value = event
    if kind in (EventKind.PHASE_BEGIN, EventKind.PHASE_END):
        return (kind,)
    if kind == EventKind.COMM:
        return (kind, flags, stream, ref, what)
    return event if what == -1 else (kind, flags, stream, what, value)


def _set_token(events: np.ndarray, rows: list[int], kind: TokenKind, id: int) -> None:
    for row in rows:
        column = "value" if events["kind"][row] == EventKind.COMM else "ref"
        events[column][row] = id


def _fresh_ids(events: np.ndarray) -> dict[TokenKind, int]:
    """Numbers above all that the program uses, by token kind."""

    def above(column: str, *kinds: EventKind) -> int:
        values = events[column][np.isin(events["kind"], kinds)]
        return int(values.max()) + 1 if len(values) else 0

    return {
        TokenKind.ALLOCATION: above("ref", EventKind.ALLOC, EventKind.FREE),
        TokenKind.WORK: max(above("value", EventKind.COMM), above("ref", EventKind.WORK_WAIT)),
        TokenKind.EVENT: above("ref", EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC),
    }


def _check_same_work(captured: np.ndarray, derived: np.ndarray) -> None:
    """Raise unless two stages' programs do the same in another order."""
    for kind, column, what in (
        (EventKind.KERNEL, "ref", "kernels"),
        (EventKind.COMM, "ref", "transfers"),
        (EventKind.ALLOC, "value", "allocations"),
    ):
        a, b = (np.sort(events[column][events["kind"] == kind]) for events in (captured, derived))
        if not np.array_equal(a, b):
            raise CannotDeriveError(f"the derived program has other {what} than the captured one")
    _check_order(derived, EventKind.ALLOC, "ref", EventKind.FREE, "allocation", once=True)
    _check_order(derived, EventKind.COMM, "value", EventKind.WORK_WAIT, "communication", once=False)
    _check_order(derived, EventKind.EVENT_RECORD, "ref", EventKind.EVENT_WAIT, "event", once=False)
    if not np.array_equal(_live_at_end(captured), _live_at_end(derived)):
        raise CannotDeriveError("the derived program ends with other live allocations than the captured one")


def _check_order(
    events: np.ndarray, makes: EventKind, column: str, needs: EventKind, what: str, *, once: bool
) -> None:
    """Whatever is made and needed in the program is made first (and, for ``once``, made and needed once)."""
    made_at = np.flatnonzero(events["kind"] == makes)
    made, first = np.unique(events[column][made_at].astype(np.int64), return_index=True)
    needed_at = np.flatnonzero(events["kind"] == needs)
    needed = events["ref"][needed_at].astype(np.int64)
    if once and (len(made) != len(made_at) or len(np.unique(needed)) != len(needed)):
        raise CannotDeriveError(f"the derived program makes or releases an {what} twice")
    where = np.searchsorted(made, needed)
    known = (
        (where < len(made)) & (made[np.minimum(where, len(made) - 1)] == needed)
        if len(made)
        else np.zeros(len(needed), bool)
    )
    if np.any(made_at[first[where[known]]] > needed_at[known]):
        raise CannotDeriveError(f"the derived program needs an {what} before it is made")


def _live_at_end(events: np.ndarray) -> np.ndarray:
    made = events["ref"][events["kind"] == EventKind.ALLOC]
    freed = events["ref"][events["kind"] == EventKind.FREE]
    return np.setdiff1d(made, freed)
