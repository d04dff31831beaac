"""A program cut into the bodies of its phases and the gaps between them, with what is carried from one to another.

Units are numbered in order: gap 0, body 0, gap 1, body 1, …, the last gap. A *token* is something one unit makes
and another one needs: an allocation and its release, a communication and the waits for it, a recorded event and
the waits for that. Units are *fixed* when their phase belongs to a micro-batch (or to none and occurs once): they
are only ever copied whole. The others, gaps and p2p phases, are *loose*: another stage has them in other places.
"""

from __future__ import annotations

import enum
import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np

from prism_plugins.program.model import EventKind, Phase, Program
from prism_plugins.program.schedule import BOUNDARY, PhaseClass, is_bound, phase_class

MicroBatch = tuple[int, int]
"""Micro-batch and chunk."""
UnitClass = tuple[PhaseClass, ...]
"""One phase class for a body, the two neighbours' for a gap."""


class TokenKind(enum.IntEnum):
    """What is made and needed."""

    ALLOCATION = 0
    WORK = 1
    EVENT = 2


_DEFINES = {
    EventKind.ALLOC: TokenKind.ALLOCATION,
    EventKind.COMM: TokenKind.WORK,
    EventKind.EVENT_RECORD: TokenKind.EVENT,
}
_USES = {
    EventKind.FREE: TokenKind.ALLOCATION,
    EventKind.WORK_WAIT: TokenKind.WORK,
    EventKind.EVENT_WAIT: TokenKind.EVENT,
    EventKind.EVENT_SYNC: TokenKind.EVENT,
}


class Token:
    """One token of a program: where it is made and needed, as event indices."""

    __slots__ = ("definition", "id", "kind", "uses")

    def __init__(self, kind: TokenKind, id: int, definition: int) -> None:
        self.kind = kind
        self.id = id
        self.definition = definition
        """Index of the event that makes it; -1 when it existed before the iteration."""
        self.uses: list[int] = []


_CODES: dict[PhaseClass, int] = {}


class Timetable:
    """The phases of an iteration in order, with look-ups by part and by micro-batch."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self.classes = [phase_class(p) for p in self.phases]
        self.codes = [_CODES.setdefault(cls, len(_CODES)) for cls in self.classes]
        """A number for each class, the same in all timetables."""
        around = [BOUNDARY, *self.classes, BOUNDARY]
        self._unit_classes: list[UnitClass] = [(around[0], around[1])]
        for i, cls in enumerate(self.classes):
            self._unit_classes += [(cls,), (cls, around[i + 2])]
        self._micro_batch_of = {
            part: (p.microbatch, p.chunk) for p in self.phases if is_bound(p) for part in p.parts
        }
        self._phases_of_name: dict[str, list[int]] = {}
        for i, phase in enumerate(self.phases):
            for name, _ in phase.parts:
                self._phases_of_name.setdefault(name, []).append(i)
        self.step_names = tuple(
            dict.fromkeys(name for p in self.phases if is_bound(p) for name, _ in p.parts)
        )
        """Names of the parts that are steps themselves: forward, backward."""
        self._next_step: dict[MicroBatch, int | None] = {}
        self.phases_of: dict[MicroBatch, list[int]] = {}
        """Indices of the phases that work on a micro-batch (compute it, receive or send it), ascending."""
        for i, phase in enumerate(self.phases):
            for micro_batch in self.micro_batches(phase):
                self.phases_of.setdefault(micro_batch, []).append(i)

    def micro_batches(self, phase: Phase) -> list[MicroBatch]:
        """The micro-batches a phase works on."""
        if is_bound(phase):
            return [(phase.microbatch, phase.chunk)]
        found = [self.micro_batch(part) for part in phase.parts]
        return [m for m in found if m is not None]

    def micro_batch(self, part: tuple[str, int]) -> MicroBatch | None:
        """What a part works on: the k-th ``…_forward`` concerns the k-th forward step, likewise backward."""
        name, ordinal = part
        for direction in ("forward", "backward"):
            if name.endswith(direction):
                return self._micro_batch_of.get((direction, ordinal))
        return None

    def next_step_of_chunk(self, micro_batch: MicroBatch) -> int | None:
        """Index of the phase that is the first step of the next micro-batch of the same chunk, if there is one."""
        if not self._next_step:
            last_of_chunk: dict[int, MicroBatch] = {}
            for i, phase in enumerate(self.phases):
                this = (phase.microbatch, phase.chunk)
                if is_bound(phase) and self.phases_of[this][0] <= i and this not in self._next_step:
                    if not any(name.endswith("forward") for name, _ in phase.parts):
                        continue
                    self._next_step[this] = None
                    if phase.chunk in last_of_chunk:
                        self._next_step[last_of_chunk[phase.chunk]] = i
                    last_of_chunk[phase.chunk] = this
        return self._next_step.get(micro_batch)

    def anchor(self, phase: int, micro_batch: MicroBatch) -> str:
        """Name of the part that ties a phase to a micro-batch it works on."""
        for part in self.phases[phase].parts:
            if is_bound(self.phases[phase]) or self.micro_batch(part) == micro_batch:
                return part[0]
        return self.phases[phase].kind

    @functools.cached_property
    def last_working_unit(self) -> int:
        """The body of the last phase that works on a micro-batch."""
        return 2 * max((phases[-1] for phases in self.phases_of.values()), default=0) + 1

    def nearest_part(self, name: str, unit: int, *, ahead: bool) -> int | None:
        """Ordinal of the part of this name in the nearest phase at or before a unit, or after it."""
        phases = self._phases_of_name.get(name, ())
        at = bisect_right(phases, (unit - 1) // 2)
        at = at if ahead else at - 1
        if not 0 <= at < len(phases):
            return None
        return next(k for n, k in self.phases[phases[at]].parts if n == name)

    @property
    def num_units(self) -> int:
        """Bodies and gaps together."""
        return 2 * len(self.phases) + 1

    def unit_class(self, unit: int) -> UnitClass:
        """What decides a loose unit's content."""
        return self._unit_classes[unit]

    def unit_identity(self, unit: int) -> tuple[Phase | None, ...]:
        """Equal for units that are the same piece of work on two stages."""
        i = unit // 2
        if unit % 2:
            return (self.phases[i],)
        return (self._phase_at(i - 1), self._phase_at(i))

    def _phase_at(self, i: int) -> Phase | None:
        return self.phases[i] if 0 <= i < len(self.phases) else None


class Segments:
    """A program cut into units."""

    def __init__(self, program: Program) -> None:
        self.program = program
        spans = list(program.iter_phases())
        self.timetable = Timetable([phase for phase, _, _ in spans])
        bounds = [0]
        for _, begin, end in spans:
            bounds += [begin, end + 1]
        self.bounds = np.array([*bounds, len(program.events)])
        """Unit ``u`` holds the events ``bounds[u]:bounds[u + 1]``."""
        counts = Counter(self.timetable.classes)
        self._fixed = [
            is_bound(phase) or (counts[cls] == 1 and not self.timetable.micro_batches(phase))
            for phase, cls in zip(self.timetable.phases, self.timetable.classes, strict=True)
        ]

    def is_loose(self, unit: int) -> bool:
        """Gaps, and phases that stand for all of their class."""
        return unit % 2 == 0 or not self._fixed[unit // 2]

    def unit_of(self, event: int) -> int:
        """The unit an event lies in; -1 for the event index -1."""
        return int(np.searchsorted(self.bounds, event, side="right")) - 1 if event >= 0 else -1

    def loose_tokens(self) -> dict[tuple[TokenKind, int], Token]:
        """Every token that some loose unit makes or needs, in order of first appearance in a loose unit."""
        events = self.program.events
        definitions, uses = _index_tokens(events)
        tokens: dict[tuple[TokenKind, int], Token] = {}
        for unit in range(self.timetable.num_units):
            if not self.is_loose(unit):
                continue
            lo, hi = self.bounds[unit], self.bounds[unit + 1]
            for event in events[lo:hi].tolist():
                key = token_key(event)
                if key is None or key in tokens:
                    continue
                token = Token(key[0], key[1], definitions.get(key, -1))
                token.uses = uses.get(key, [])
                tokens[key] = token
        return tokens


def token_key(event: tuple[int, int, int, int, int]) -> tuple[TokenKind, int] | None:
    """The token an event (a row of the event array as a tuple) makes or needs."""
    kind, _, _, ref, value = event
    made = _DEFINES.get(kind)
    if made is not None:
        return (made, value if made == TokenKind.WORK else ref)
    needed = _USES.get(kind)
    return None if needed is None else (needed, ref)


def makes_token(event: tuple[int, int, int, int, int]) -> bool:
    """True for the event that makes a token, False for one that needs it (or has nothing to do with one)."""
    return event[0] in _DEFINES


def _index_tokens(
    events: np.ndarray,
) -> tuple[dict[tuple[TokenKind, int], int], dict[tuple[TokenKind, int], list[int]]]:
    definitions: dict[tuple[TokenKind, int], int] = {}
    uses: dict[tuple[TokenKind, int], list[int]] = {}
    for kind, token in _DEFINES.items():
        at = np.flatnonzero(events["kind"] == kind)
        ids = events["value" if token == TokenKind.WORK else "ref"][at]
        for i, id in zip(at.tolist(), ids.tolist(), strict=True):
            definitions.setdefault((token, id), i)
    for kind, token in _USES.items():
        at = np.flatnonzero(events["kind"] == kind)
        for i, id in zip(at.tolist(), events["ref"][at].tolist(), strict=True):
            uses.setdefault((token, id), []).append(i)
    return definitions, uses
