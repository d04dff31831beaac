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
from prism_plugins.program.late import (
    Context,
    Found,
    LateOnTarget,
    LateReleases,
    Numbers,
    Unit,
    context_of,
    likeness_of,
    without_rows,
)
from prism_plugins.program.model import EVENT_DTYPE, EventKind, Phase, Program
from prism_plugins.program.schedule import describe, missing_for, parts_of
from prism_plugins.program.segments import (
    Segments,
    Timetable,
    TokenKind,
    UnitClass,
    makes_token,
    token_key,
)
from prism_plugins.program.tokens import Role, TokenKey, TokenNames, Way, name_unit, way_back, way_to
from prism_plugins.program.work import FirstPlaces, Work


def derive_stage(program: Program, *, captured: Sequence[Phase], target: Sequence[Phase]) -> Program:
    """Reorder a captured stage's program to another stage's schedule; see :meth:`CapturedStage.derive`.

    ``captured`` and ``target`` are the schedules as the framework's scheduler tells them.
    Raises :class:`CannotDeriveError`.
    """
    return CapturedStage(program, captured).derive(target).program


class Derived(NamedTuple):
    """A derived program."""

    program: Program
    origin: np.ndarray
    """Per event the event of the captured program that it was made from; -1 for new ones."""


def with_phases(captured: Program, events: np.ndarray, phases: Sequence[Phase]) -> Program:
    """The program of these events with these phases in their order; the rest is the captured one's."""
    table = list(dict.fromkeys([*captured.phases, *phases]))
    index = {phase: i for i, phase in enumerate(table)}
    marks = (events["kind"] == EventKind.PHASE_BEGIN) | (events["kind"] == EventKind.PHASE_END)
    events["ref"][marks] = np.repeat([index[p] for p in phases], 2)
    return Program(
        rank=captured.rank,
        events=events,
        signatures=captured.signatures,
        comms=captured.comms,
        groups=captured.groups,
        phases=table,
        initial=captured.initial,
        source="derived",
    )


def replace_schedule(
    phases: Sequence[Phase], captured: Sequence[Phase], target: Sequence[Phase]
) -> list[Phase]:
    """A program's phases with the scheduler's stretch replaced; what comes before and after it stays."""
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
        self.origin = np.arange(lo, hi)
        self.identity = segments.timetable.unit_identity(unit)
        self.makes: dict[TokenKey, list[int]] = {}
        self.local: dict[TokenKey, list[int]] = {}
        self.needs: list[_Need] = []
        shape: list[tuple] = []
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

    def complete(self, lacking: list[_Need], others: list[_Template]) -> bool:
        """Add the releases that this unit lacks because something holds their tokens longer, at the places where
        another unit of the class has them. False when no other unit is like this one but for them."""
        releases = {_abstract((EventKind.FREE, 0, 0, 0, 0), (n.role, n.way)): n for n in lacking}
        for other in others:
            rows = [row for row, entry in enumerate(other.shape) if entry in releases]
            rest = tuple(entry for entry in other.shape if entry not in releases)
            if len(rows) == len(lacking) and rest == self.shape:
                break
        else:
            return False
        events = np.zeros(len(other.shape), dtype=self.events.dtype)
        old = np.setdiff1d(np.arange(len(events)), rows)
        events[old] = self.events
        self.needs = [n._replace(row=int(old[n.row])) for n in self.needs]
        for held in (self.makes, self.local):
            held.update({key: [int(old[row]) for row in at] for key, at in held.items()})
        for row in rows:
            need = releases[other.shape[row]]
            events["kind"][row], events["ref"][row] = EventKind.FREE, need.token[1]
            self.needs.append(need._replace(row=row))
        origin = np.full(len(events), -1)
        origin[old] = self.origin
        self.events, self.origin, self.shape = events, origin, other.shape
        return True


class CapturedStage:
    """A captured program prepared for derivations; make one per slice and derive many stages from it."""

    def __init__(self, program: Program, schedule: Sequence[Phase]) -> None:
        self._segments = segments = Segments(program)
        self._schedule = tuple(schedule)
        self._work: Work | None = None
        """What the captured program does in all, once somebody asks."""
        self._names = names = TokenNames(segments)
        timetable = segments.timetable
        self._fixed = {
            phase: (int(segments.bounds[2 * i + 1]), int(segments.bounds[2 * i + 2]))
            for i, phase in enumerate(timetable.phases)
            if not segments.is_loose(2 * i + 1)
        }
        self._templates: dict[UnitClass, dict[Context, list[_Template]]] = {}
        self._choices: dict[tuple[UnitClass, Context], _Choice] = {}
        self._late = LateReleases(segments, names)
        incomplete: dict[int, _Template] = {}
        for unit in range(timetable.num_units):
            if segments.is_loose(unit):
                template = _Template(unit, segments, names)
                if unit in self._late.exceptions:
                    incomplete[unit] = template
                else:
                    self._add_template(unit, template)
        self._exceptions: dict[UnitClass, list[tuple[Context, _Template, list[_Need]]]] = {}
        """By class: units that lack a release and could not be completed, and what they lack."""
        for unit, template in incomplete.items():
            unit_class = timetable.unit_class(unit)
            lacking = [self._usual_need(unit, key) for key in self._late.exceptions[unit]]
            known = self._templates.get(unit_class, {})
            if template.complete(lacking, [t for templates in known.values() for t in templates]):
                self._add_template(unit, template)
            else:
                exception = (context_of(unit, timetable), template, lacking)
                self._exceptions.setdefault(unit_class, []).append(exception)

    def _add_template(self, unit: int, template: _Template) -> None:
        timetable = self._segments.timetable
        of_class = self._templates.setdefault(timetable.unit_class(unit), {})
        of_class.setdefault(context_of(unit, timetable), []).append(template)

    def _usual_need(self, unit: int, key: TokenKey) -> _Need:
        way = way_to(unit, self._names.micro_batch(key), self._segments.timetable)
        return _Need(-1, key, self._names.role(key), way)

    def derive(self, schedule: Sequence[Phase]) -> Derived:
        """The program of a stage with another schedule. Groups, peers and rank stay those of the captured program:
        :class:`.instantiate.Instantiator` moves them. Raises :class:`CannotDeriveError`."""
        missing = missing_for(parts_of(self._schedule), parts_of(schedule))
        if missing:
            raise CannotDeriveError(f"the captured stage has no {missing}")
        program = self._segments.program
        phases = replace_schedule(self._segments.timetable.phases, self._schedule, schedule)
        timetable = Timetable(phases)
        numbers = Numbers(program.events, self._names)
        late = self._late.on(timetable, numbers)
        units = [self._unit(unit, timetable, numbers, late) for unit in range(timetable.num_units)]
        late.keep(units)
        events, origin = _without_surplus(units)
        if self._work is None:
            self._work = Work(program.events)
        self._work.check(Work(events))
        return Derived(with_phases(program, events, phases), origin)

    def _unit(self, unit: int, timetable: Timetable, numbers: Numbers, late: LateOnTarget) -> Unit:
        if unit % 2 and timetable.phases[unit // 2] in self._fixed:
            lo, hi = self._fixed[timetable.phases[unit // 2]]
            return Unit(self._segments.program.events[lo:hi], [], np.arange(lo, hi))
        template = self._template(unit, timetable, late)
        events = template.events.copy()
        for key, rows in template.local.items():
            _set_token(events, rows, key[0], numbers.new(key[0]))
        for key, rows in template.makes.items():
            owner = self._names.owner(key)
            if owner is not None:
                micro_batch = owner.micro_batch(unit, timetable)
                if micro_batch is None:
                    raise CannotDeriveError(f"{name_unit(timetable.unit_class(unit))} lacks {owner.name}")
                key = numbers.token(self._names.role(key), micro_batch)
            _set_token(events, rows, key[0], key[1])
        found: list[Found] = []
        same_unit = template.identity == timetable.unit_identity(unit)
        for need in template.needs:
            key = need.token
            micro_batch = self._names.micro_batch(key)
            if need.way is not None and same_unit:
                key = late.outliving.get(key, key) if unit > late.end else key
            elif need.way is not None:
                micro_batch = way_back(need.way, unit, timetable)
                if micro_batch is None:
                    raise CannotDeriveError(
                        f"{name_unit(timetable.unit_class(unit))} needs something that is not made on the way there"
                    )
                key = numbers.token(need.role, micro_batch)
            if need.way is not None and unit <= late.end:
                found.append(Found(need.row, key, need.role, micro_batch))
            _set_token(events, [need.row], key[0], key[1])
        if unit % 2:
            _issue_in_order(events, template.identity[0], timetable.phases[unit // 2])
        return Unit(events, found, template.origin)

    def _template(self, unit: int, timetable: Timetable, late: LateOnTarget) -> _Template:
        """The captured unit to copy: the very same one in the same surroundings, else that whose surroundings are
        most alike, as far back as possible, then as far ahead."""
        unit_class, context = timetable.unit_class(unit), context_of(unit, timetable)
        identity = timetable.unit_identity(unit)
        choice = self._choices.get((unit_class, context))
        if choice is None:
            choice = self._choices[unit_class, context] = self._choose(unit_class, context)
        for its_context, template, lacking in self._exceptions.get(unit_class, ()):
            if likeness_of(context, its_context) >= choice.likeness and all(
                late.lacks(need.token, way_back(need.way, unit, timetable), unit) for need in lacking
            ):
                return template
        return choice.template(identity)

    def _choose(self, unit_class: UnitClass, context: Context) -> _Choice:
        known = self._templates.get(unit_class, {})
        likeness = {other: likeness_of(context, other) for other in known}
        best = max(likeness.values(), default=(-1, -1))
        alike = [t for other, templates in known.items() if likeness[other] == best for t in templates]
        return _Choice(known.get(context, []), alike, best, name_unit(unit_class))


class _Choice:
    """The captured units that may be copied for units of one class in one kind of surroundings."""

    def __init__(
        self, same: list[_Template], alike: list[_Template], likeness: tuple[int, int], name: str
    ) -> None:
        self.likeness = likeness
        """Of the surroundings."""
        self._same = {template.identity: template for template in same}
        self._alike = alike
        self._is_clear = all(template.shape == alike[0].shape for template in alike)
        self._name = name

    def template(self, identity: tuple[Phase | None, ...]) -> _Template:
        """The unit with this identity in the same surroundings, else one that is alike."""
        same = self._same.get(identity)
        if same is not None:
            return same
        if not self._alike:
            raise CannotDeriveError(f"the captured stage has nothing like {self._name}")
        if not self._is_clear:
            raise CannotDeriveError(f"{self._name} does not always do the same")
        return self._alike[0]


def _abstract(event: tuple[int, int, int, int, int], what: object) -> tuple:
    """An event without the numbers that differ from one occurrence to the next."""
    kind, flags, stream, ref, value = event
    if kind in (EventKind.PHASE_BEGIN, EventKind.PHASE_END):
        return (kind,)
    if kind == EventKind.COMM:
        return (kind, flags, stream, ref, what)
    return event if what == -1 else (kind, flags, stream, what, value)


def _without_surplus(units: list[Unit]) -> tuple[np.ndarray, np.ndarray]:
    """All events, and where they are from, but the releases, found by walking back, of tokens that are released later:
    something holds them longer."""
    events, origin = _joined(units)
    released = events["ref"][events["kind"] == EventKind.FREE].astype(np.int64)
    places = np.arange(len(released))
    first = FirstPlaces(released, places).of(released)
    repeated = {(TokenKind.ALLOCATION, id) for id in released[first != places].tolist()}
    if not repeated:
        return events, origin
    surplus = ([found.row for found in unit.found if found.key in repeated] for unit in units)
    return _joined([without_rows(u, rows) if rows else u for u, rows in zip(units, surplus, strict=True)])


def _joined(units: list[Unit]) -> tuple[np.ndarray, np.ndarray]:
    # As plain bytes: promoting the fields of a structured type costs more than the copying.
    pieces = [np.ascontiguousarray(unit.events).view("V16") for unit in units]
    return np.concatenate(pieces).view(EVENT_DTYPE), np.concatenate([unit.origin for unit in units])


def _issue_in_order(events: np.ndarray, captured: Phase, target: Phase) -> None:
    """Reorder the transfers of a p2p phase, and the waits for them, as the target stage issues its parts."""
    before, after = ([name for name, _ in phase.parts] for phase in (captured, target))
    if before == after:
        return
    transfers = np.flatnonzero(events["kind"] == EventKind.COMM)
    works = events["value"][transfers].tolist()
    if len(transfers) != len(before) or len(set(works)) != len(works):
        raise CannotDeriveError(f"{captured.kind} does not issue one transfer for each of its parts")
    order = [before.index(name) for name in after]
    events[transfers] = events[transfers[order]]
    waits = np.flatnonzero((events["kind"] == EventKind.WORK_WAIT) & np.isin(events["ref"], works))
    if len(waits):
        place = {work: position for position, work in enumerate(works[i] for i in order)}
        events[waits] = events[sorted(waits.tolist(), key=lambda row: place[int(events["ref"][row])])]


def _set_token(events: np.ndarray, rows: list[int], kind: TokenKind, id: int) -> None:
    for row in rows:
        column = "value" if events["kind"][row] == _COMM else "ref"
        events[column][row] = id


_COMM = int(EventKind.COMM)
