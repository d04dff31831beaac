"""Loops over parameter fragments in a stretch of events: found in one rank's program, issued again for another's.

An optimizer visits its fragments in loops (a block of events per fragment: allocate, multiply, copy, release) and
hands whole lists of them to ``_foreach_`` and fused ops, or joins what it made of them (``cat``). Given the lists a
rank has, a stretch of its events is parsed (:mod:`.parse_loops`) into the items here: literal events, loops and list
ops; given another rank's lists it is issued again. A loop needs two turns to be seen, so lists of one fragment are
read with the help of a pattern parsed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import op_key
from prism_plugins.program.fragment_signatures import spread, with_count, with_size
from prism_plugins.program.model import EventKind, OpSignature

Row = tuple[int, int, int, int, int]
"""An event as a tuple: kind, flags, stream, ref, value."""
Lists = Mapping[tuple, tuple[int, ...]]
"""Fragment sizes in elements, by the name of the list."""


class AbstractEvent(NamedTuple):
    """An event of a loop without the fragment's size and without ids."""

    kind: int
    flags: int
    stream: int
    what: object
    """KERNEL: signature with :data:`FRAGMENT` in its shapes; FREE: (loop, slot) of what is released; else the ref."""
    size: tuple[int, int]
    """ALLOC: (bytes per element, constant bytes); else (0, value)."""


class Loop(NamedTuple):
    """One block of events per fragment of a list."""

    names: tuple[tuple, ...]
    """The lists it may run over (those that are equal where it was seen)."""
    block: tuple[AbstractEvent, ...]
    backward: bool | None
    """Releases what an earlier loop made, last first. None: seen with one fragment only, either way is possible."""


class ListOp(NamedTuple):
    """An op that takes whole lists of fragments."""

    names: tuple[tuple, ...]
    event: Row
    signature: OpSignature
    """Each list appears as one tensor with :data:`FRAGMENT` as its shape."""


class Counted(NamedTuple):
    """An event on a tensor that has one element per fragment."""

    names: tuple[tuple, ...]
    event: Row
    signature: OpSignature | None
    """KERNEL: the op, with :data:`COUNT` as the shape of such tensors."""
    itemsize: int
    """ALLOC: bytes per element."""


class Literal(NamedTuple):
    """An event that does not depend on the fragments."""

    event: Row


Item = Loop | ListOp | Counted | Literal


class Tables:
    """The signatures of a program, growing as a stretch is issued again."""

    def __init__(self, signatures: Sequence[OpSignature]) -> None:
        self.signatures = list(signatures)
        self._index = {op_key(s): i for i, s in enumerate(self.signatures)}

    def copy(self) -> Tables:
        """Tables that grow on their own."""
        tables = Tables(())
        tables.signatures, tables._index = list(self.signatures), dict(self._index)
        return tables

    def index(self, signature: OpSignature) -> int:
        """Index of a signature, appended if it is new."""
        key = op_key(signature)
        if key not in self._index:
            self._index[key] = len(self.signatures)
            self.signatures.append(signature)
        return self._index[key]


def issue(items: Sequence[Item], lists: Lists, tables: Tables, first_id: int) -> list[Row]:
    """The stretch of events for these lists. New allocations are numbered from ``first_id``.

    Raises :class:`CannotDeriveError` when a loop may run over several lists that differ here.
    """
    out: list[Row] = []
    made: dict[tuple[int, int, int], int] = {}
    for index, item in enumerate(items):
        if isinstance(item, Literal):
            out.append(item.event)
            continue
        sizes = resolve(item.names, lists)
        if isinstance(item, ListOp):
            if sizes:
                kind, flags, stream, _, value = item.event
                out.append((kind, flags, stream, tables.index(spread(item.signature, sizes)), value))
            continue
        if isinstance(item, Counted):
            kind, flags, stream, ref, _ = item.event
            if item.signature is None:
                out.append((kind, flags, stream, ref, item.itemsize * len(sizes)))
            else:
                signature = with_count(item.signature, len(sizes))
                out.append((kind, flags, stream, tables.index(signature), item.event[4]))
            continue
        turns = range(len(sizes))
        if item.backward is None and len(sizes) > 1:
            raise CannotDeriveError("the order in which fragments are released was not seen")
        for turn in reversed(turns) if item.backward else turns:
            slot = 0
            for event in item.block:
                ref, value = 0, event.size[1]
                if event.kind == EventKind.ALLOC:
                    ref = made[index, turn, slot] = first_id + len(made)
                    value = event.size[0] * sizes[turn] + event.size[1]
                    slot += 1
                elif event.kind == EventKind.FREE:
                    loop, its_slot = event.what
                    ref = made[index if loop < 0 else loop, turn, its_slot]
                elif event.kind == EventKind.KERNEL:
                    ref = tables.index(with_size(event.what, sizes[turn]))
                else:
                    ref = event.what
                out.append((event.kind, event.flags, event.stream, ref, value))
    return out


def merge(first: Sequence[Item], second: Sequence[Item]) -> list[Item] | None:
    """One pattern from those of two ranks, with the lists that both allow; None when they differ in more.

    What a rank cannot tell apart (all fragments and those counted in the norm, on the first tensor-parallel rank)
    another one can.
    """
    mine, other = (_without_free(items) for items in (first, second))
    if len(mine) != len(other):
        return None
    merged: list[Item] = []
    for a, b in zip(mine, other, strict=True):
        if isinstance(a, Literal) or isinstance(b, Literal):
            if type(a) is not type(b) or (a.event[0], a.event[2]) != (b.event[0], b.event[2]):
                return None
            merged.append(a)
            continue
        names = tuple(name for name in a.names if name in b.names)
        same = type(a) is type(b) and (
            _block_key(a) == _block_key(b)
            if isinstance(a, Loop)
            else op_key(a.signature) == op_key(b.signature)
        )
        if not same or not names:
            return None
        merged.append(a._replace(names=names))
    return merged


def is_free(item: Item) -> bool:
    """Host events may stand anywhere."""
    return isinstance(item, Literal) and item.event[0] == EventKind.HOST


def _without_free(items: Sequence[Item]) -> list[Item]:
    place: dict[int, int] = {}
    kept: list[Item] = []
    for number, item in enumerate(items):
        if not is_free(item):
            place[number] = len(kept)
            kept.append(renumbered(item, place) if isinstance(item, Loop) else item)
    return kept


def _block_key(loop: Loop) -> tuple:
    return (
        loop.backward,
        *((*e[:3], op_key(e.what) if e.kind == EventKind.KERNEL else e.what, e.size) for e in loop.block),
    )


def renumbered(loop: Loop, place: Mapping[int, int]) -> Loop:
    """The loop with its references to earlier loops moved to where those are."""
    block = tuple(
        event._replace(what=(place[event.what[0]], event.what[1]))
        if event.kind == EventKind.FREE and event.what[0] >= 0
        else event
        for event in loop.block
    )
    return loop._replace(block=block)


def resolve(names: tuple[tuple, ...], lists: Lists) -> tuple[int, ...]:
    """The sizes of the list meant. Raises :class:`CannotDeriveError` when several are possible, or there is none."""

    found = {lists[name] for name in names if name in lists}
    if len(found) != 1:
        raise CannotDeriveError(
            f"a loop runs over one of the lists {', '.join(map(str, names))}, which differ on another rank"
            if found
            else f"another rank has no list {names[0]}"
        )
    return found.pop()
