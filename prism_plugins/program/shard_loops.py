"""Loops over parameter fragments in a stretch of events: found in one rank's program, issued again for another's.

An optimizer visits its fragments in loops (a block of events per fragment: allocate, multiply, copy, release) and
hands whole lists of them to ``_foreach_`` and fused ops, or joins what it made of them (``cat``). Given the lists a rank has, a stretch of its events is
parsed into literal events, loops and list ops; given another rank's lists it is issued again. A loop needs two
turns to be seen, so lists of one fragment are read with the help of a pattern parsed elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import EventFlag, EventKind, OpSignature, TensorSpec

Row = tuple[int, int, int, int, int]
"""An event as a tuple: kind, flags, stream, ref, value."""
Lists = Mapping[tuple, tuple[int, ...]]
"""Fragment sizes in elements, by the name of the list."""

FRAGMENT = -1
"""Stands for the number of elements of the fragment in the shape of a tensor."""
_FLAT, _SHAPED = -3, -4
"""The same, where it was seen that the tensor is flat, or that it has the shape of its fragment."""
_MAX_BLOCK = 16
SMALLEST_FRAGMENT = 32
"""Elements below which a single fragment cannot be told from other small tensors."""


class Size(int):
    """Elements of a fragment whose tensors may have a shape of their own: a whole parameter. Compares as the number."""

    shape: tuple[int, ...]

    def __new__(cls, shape: tuple[int, ...]) -> Size:
        """The number of elements of this shape."""
        size = super().__new__(cls, math.prod(shape))
        size.shape = shape
        return size


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
    """KERNEL: the op, with :data:`_COUNT` as the shape of such tensors."""
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
        self._index = {_key(s): i for i, s in enumerate(self.signatures)}

    def copy(self) -> Tables:
        """Tables that grow on their own."""
        tables = Tables(())
        tables.signatures, tables._index = list(self.signatures), dict(self._index)
        return tables

    def index(self, signature: OpSignature) -> int:
        """Index of a signature, appended if it is new."""
        key = _key(signature)
        if key not in self._index:
            self._index[key] = len(self.signatures)
            self.signatures.append(signature)
        return self._index[key]


def parse(
    rows: Sequence[Row], signatures: Sequence[OpSignature], lists: Lists, pattern: Sequence[Item] = ()
) -> list[Item]:
    """Literal events, loops and list ops of a stretch of events.

    With ``pattern``, the items of another rank's equal stretch, each is looked for in turn, so that lists of one
    or no fragment are read as well. Raises :class:`CannotDeriveError` when the stretch does not follow the pattern.
    """
    parser = _Parser(rows, signatures, lists)
    return parser.follow(pattern) if pattern else parser.find()


def parse_joined(
    rows: Sequence[Row], signatures: Sequence[OpSignature], lists: Lists, *, max_block: int
) -> list[Item]:
    """As :func:`parse` without a pattern, of an optimizer that joins what its loops make by ``cat``, and whose loops
    have up to ``max_block`` events a turn."""
    return _Parser(rows, signatures, lists, max_block=max_block, joins=True).find()


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
        sizes = _resolve(item.names, lists)
        if isinstance(item, ListOp):
            if sizes:
                kind, flags, stream, _, value = item.event
                out.append((kind, flags, stream, tables.index(_spread(item.signature, sizes)), value))
            continue
        if isinstance(item, Counted):
            kind, flags, stream, ref, _ = item.event
            if item.signature is None:
                out.append((kind, flags, stream, ref, item.itemsize * len(sizes)))
            else:
                signature = _with_count(item.signature, len(sizes))
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
                    ref = tables.index(_with_size(event.what, sizes[turn]))
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
            _block_key(a) == _block_key(b) if isinstance(a, Loop) else _key(a.signature) == _key(b.signature)
        )
        if not same or not names:
            return None
        merged.append(a._replace(names=names))
    return merged


def _is_free(item: Item) -> bool:
    """Host events may stand anywhere."""
    return isinstance(item, Literal) and item.event[0] == EventKind.HOST


def _without_free(items: Sequence[Item]) -> list[Item]:
    place: dict[int, int] = {}
    kept: list[Item] = []
    for number, item in enumerate(items):
        if not _is_free(item):
            place[number] = len(kept)
            kept.append(_renumbered(item, place) if isinstance(item, Loop) else item)
    return kept


def _block_key(loop: Loop) -> tuple:
    return (
        loop.backward,
        *((*e[:3], _key(e.what) if e.kind == EventKind.KERNEL else e.what, e.size) for e in loop.block),
    )


class _Parser:
    def __init__(
        self,
        rows: Sequence[Row],
        signatures: Sequence[OpSignature],
        lists: Lists,
        *,
        max_block: int = _MAX_BLOCK,
        joins: bool = False,
    ) -> None:
        self._rows = rows
        self._signatures = signatures
        self._lists = lists
        self._max_block = max_block
        self._joins = joins
        self._joined: tuple[tuple[tuple, ...], int, str] | None = None
        """Of the last ``cat`` of results: lists, how many there are, dtype."""
        by_sizes: dict[tuple[int, ...], list[tuple]] = {}
        for name, sizes in lists.items():
            by_sizes.setdefault(sizes, []).append(name)
        self._by_sizes = by_sizes
        self._made_in: dict[int, tuple[int, int, int]] = {}
        """Allocation id → (item, turn, slot) of the loop that made it."""
        self._items: list[Item] = []

    def find(self) -> list[Item]:
        """Look for loops: at each place the one that covers most events."""
        at = 0
        while at < len(self._rows):
            found = (self._join(at) if self._joins else self._list_op(at)) or self._loop(at)
            if found is None:
                self._items.append(self._counted(at) or Literal(self._rows[at]))
                at += 1
            else:
                item, length = found
                if isinstance(item, Loop):
                    self._remember(at, item, length)
                self._items.append(item)
                at += length
        return self._items

    def _join(self, at: int) -> tuple[ListOp, int] | None:
        """A ``cat`` of the fragments, or of what the loop just before made of each of several."""
        kind, _, _, ref, _ = row = self._rows[at]
        if kind != EventKind.KERNEL or self._signatures[ref].op != "aten::cat":
            return None
        signature = self._signatures[ref]
        for sizes, names in sorted(self._by_sizes.items(), key=lambda item: -len(item[0])):
            inputs = _gather_tensors(signature.inputs, sizes) if sizes else None
            if inputs is None or len(inputs) != 1:
                continue
            count = len(sizes)
            if inputs[0].shape != (FRAGMENT,):
                before = self._before()
                if count == 1 or not isinstance(before, Loop) or not _depends(before.block):
                    continue
                if _resolve(before.names, self._lists) != sizes:
                    continue
                names = list(before.names)
                self._joined = tuple(names), count, signature.outputs[0].dtype
            joined = msgspec.structs.replace(signature, inputs=inputs)
            if inputs[0].shape != (FRAGMENT,):
                self._count_allocation(signature)
                joined = _map_outputs(joined, lambda t, n=count: _without_count(t, n))
            return ListOp(tuple(names), row, joined), 1
        return None

    def _before(self) -> Item | None:
        """The item before, but for allocations and host events."""
        free = (EventKind.HOST, EventKind.ALLOC)
        return next(
            (i for i in reversed(self._items) if not isinstance(i, Literal) or i.event[0] not in free), None
        )

    def _counted(self, at: int) -> Counted | None:
        """An op on the joined results."""
        kind, _, _, ref, _ = row = self._rows[at]
        if self._joined is None or kind != EventKind.KERNEL:
            return None
        names, count, dtype = self._joined
        signature = self._signatures[ref]
        if not any(t.shape == (count,) and t.dtype == dtype for t in (*signature.inputs, *signature.outputs)):
            return None
        self._count_allocation(signature)
        return Counted(names, row, _map_tensors(signature, lambda t: _without_count(t, count)), 0)

    def _count_allocation(self, signature: OpSignature) -> None:
        """The allocation just before is of this op's result, one element per fragment."""
        names, count, _ = self._joined
        last = self._items[-1] if self._items else None
        sized = [t for t in signature.outputs if t.shape == (count,)]
        allocates = isinstance(last, Literal) and last.event[0] == EventKind.ALLOC
        if sized and allocates and last.event[4] == sized[0].nbytes:
            self._items[-1] = Counted(names, last.event, None, sized[0].nbytes // count)

    def follow(self, pattern: Sequence[Item]) -> list[Item]:
        """Read the stretch item by item as the pattern says."""
        at = self._skip_free(0)
        # Where the pattern's items are in ours: host events stand in other places.
        place: dict[int, int] = {}
        for number, item in enumerate(pattern):
            if _is_free(item):
                continue
            at = self._skip_free(at)
            place[number] = len(self._items)
            if isinstance(item, Literal):
                if at >= len(self._rows) or not self._alike(self._rows[at], item.event):
                    raise CannotDeriveError(
                        "the optimizer phase does not follow the pattern of another slice"
                    )
                self._items.append(Literal(self._rows[at]))
                at += 1
                continue
            sizes = _resolve(item.names, self._lists)
            if isinstance(item, ListOp):
                if sizes:
                    expected = _key(_spread(item.signature, sizes))
                    if at >= len(self._rows) or self._kernel_key(at) != expected:
                        raise CannotDeriveError("the optimizer phase has other list ops than another slice's")
                    at += 1
                self._items.append(item)
                continue
            item = _renumbered(item, place)
            length = len(sizes) * len(item.block)
            self._check_loop(at, item, sizes)
            self._remember(at, item, length)
            self._items.append(item)
            at += length
        if self._skip_free(at) != len(self._rows):
            raise CannotDeriveError("the optimizer phase goes on where another slice's ends")
        return self._items

    def _skip_free(self, at: int) -> int:
        while at < len(self._rows) and self._rows[at][0] == EventKind.HOST:
            self._items.append(Literal(self._rows[at]))
            at += 1
        return at

    def _alike(self, mine: Row, other: Row) -> bool:
        return mine[0] == other[0] and mine[2] == other[2]

    def _check_loop(self, at: int, item: Loop, sizes: tuple[int, ...]) -> None:
        index, count, length = len(self._items), len(sizes), len(item.block)
        if at + count * length > len(self._rows):
            raise CannotDeriveError("the optimizer phase ends within a loop")
        local: dict[int, tuple[int, int]] = {}
        for i in range(count):
            turn = count - 1 - i if item.backward else i
            slot = 0
            for event, row in zip(item.block, self._rows[at + i * length :], strict=False):
                kind, _, stream, ref, value = row
                fits = (kind, stream) == (event.kind, event.stream)
                if fits and kind == EventKind.ALLOC:
                    fits = value == event.size[0] * sizes[turn] + event.size[1]
                    local[ref] = (turn, slot)
                    slot += 1
                elif fits and kind == EventKind.FREE:
                    loop, its_slot = event.what
                    wanted = (index if loop < 0 else loop, turn, its_slot)
                    mine = (index, *local[ref]) if ref in local else self._made_in.get(ref)
                    fits = mine == wanted
                elif fits and kind == EventKind.KERNEL:
                    fits = _key(self._signatures[ref]) == _key(_with_size(event.what, sizes[turn]))
                if not fits:
                    raise CannotDeriveError("a loop of the optimizer phase differs from another slice's")

    def _kernel_key(self, at: int) -> object:
        kind, _, _, ref, _ = self._rows[at]
        return _key(self._signatures[ref]) if kind == EventKind.KERNEL else None

    def _remember(self, at: int, item: Loop, length: int) -> None:
        block = len(item.block)
        count = length // block if block else 0
        for i in range(count):
            turn = count - 1 - i if item.backward else i
            slot = 0
            for row in self._rows[at + i * block : at + (i + 1) * block]:
                if row[0] == EventKind.ALLOC:
                    self._made_in[row[3]] = (len(self._items), turn, slot)
                    slot += 1

    def _list_op(self, at: int) -> tuple[ListOp, int] | None:
        kind, _, _, ref, _ = row = self._rows[at]
        if kind != EventKind.KERNEL or not takes_lists(self._signatures[ref].op):
            return None
        for sizes, names in sorted(self._by_sizes.items(), key=lambda item: -len(item[0])):
            gathered = _gather(self._signatures[ref], sizes) if sizes else None
            if gathered is not None:
                return ListOp(tuple(names), row, gathered), 1
        raise CannotDeriveError(f"{self._signatures[ref].op} takes another list than the rank's fragments")

    def _loop(self, at: int) -> tuple[Loop, int] | None:
        """The loop that starts here: one that depends on the sizes before one that only repeats, then the one that
        covers most events."""
        best: tuple[tuple[bool, int], Loop] | None = None
        for sizes, names in self._by_sizes.items():
            longest = (
                self._max_block if len(sizes) > 1 else len(sizes)
            )  # one turn does not show where it ends
            for length in range(1, longest + 1):
                covered = length * len(sizes)
                if at + covered > len(self._rows) or (best is not None and (True, covered) <= best[0]):
                    continue
                loop = self._as_loop(at, length, sizes, tuple(names))
                if loop is not None and (best is None or (_depends(loop.block), covered) > best[0]):
                    best = ((_depends(loop.block), covered), loop)
        return None if best is None else (best[1], best[0][1])

    def _as_loop(self, at: int, length: int, sizes: tuple[int, ...], names: tuple[tuple, ...]) -> Loop | None:
        for backward in (False, True):
            block = self._block(at, length, sizes, backward)
            if block is None:
                continue
            depends = _depends(block)
            if depends and (len(sizes) > 1 or length == 1) and self._made_for_list(at, block, sizes):
                return Loop(names, block, backward)
            frees = {event.what[0] for event in block if event.kind == EventKind.FREE} - {-1}
            if len(sizes) > 1 and not depends:
                # Nothing here tells the list but the loop before it.
                before = self._items[max(frees)] if frees else self._loop_before()
                if self._joins and not frees:
                    continue
                if before is not None and len(_resolve(before.names, self._lists)) == len(sizes):
                    return Loop(before.names, block, backward)
            if len(sizes) == 1 and length == 1 and frees:
                return Loop(self._items[max(frees)].names, block, self._release_order())
        return None

    def _release_order(self) -> bool | None:
        """The order of the last loop that only releases and had several fragments; a list goes as others do."""
        for item in reversed(self._items):
            releases = isinstance(item, Loop) and all(e.kind == EventKind.FREE for e in item.block)
            if releases and len(_resolve(item.names, self._lists)) > 1:
                return item.backward
        return None

    def _made_for_list(self, at: int, block: Sequence[AbstractEvent], sizes: tuple[int, ...]) -> bool:
        """Allocations may have the sizes of a list by chance. Those before a list op are its results."""
        if any(event.kind != EventKind.ALLOC for event in block):
            return len(sizes) > 1 or sizes[0] >= SMALLEST_FRAGMENT
        after = at + len(sizes) * len(block)
        kind, _, _, ref, _ = self._rows[after] if after < len(self._rows) else (EventKind.HOST, 0, 0, 0, 0)
        if kind != EventKind.KERNEL or not takes_lists(self._signatures[ref].op):
            return len(sizes) > 1
        return _gather(self._signatures[ref], sizes) is not None

    def _loop_before(self) -> Loop | None:
        return next((item for item in reversed(self._items) if isinstance(item, Loop)), None)

    def _block(
        self, at: int, length: int, sizes: tuple[int, ...], backward: bool
    ) -> tuple[AbstractEvent, ...] | None:
        """The abstract block, if the events here repeat with the fragments' sizes."""
        block = []
        slots: list[dict[int, int]] = [{} for _ in sizes]
        for offset in range(length):
            column = [self._rows[at + i * length + offset] for i in range(len(sizes))]
            kind, flags, stream, _, _ = column[0]
            if any((k, s) != (kind, stream) for k, _, s, _, _ in column):
                return None
            if kind in (EventKind.PHASE_BEGIN, EventKind.PHASE_END, EventKind.COMM, EventKind.EVENT_RECORD):
                return None
            if any((f ^ flags) & ~EventFlag.SYNTHESIZED for _, f, _, _, _ in column):
                return None
            size: tuple[int, int] | None = (0, 0)
            what: object = 0
            if kind == EventKind.ALLOC:
                for i, row in enumerate(column):
                    slots[i][row[3]] = len(slots[i])
                size = _linear([row[4] for row in column], _turned(sizes, backward))
            elif kind == EventKind.FREE:
                targets = set()
                for i, row in enumerate(column):
                    turn = len(sizes) - 1 - i if backward else i
                    if row[3] in slots[i]:
                        targets.add((-1, slots[i][row[3]]))
                    else:
                        made = self._made_in.get(row[3])
                        if made is None or made[1] != turn:
                            return None
                        targets.add((made[0], made[2]))
                what = targets.pop()
                if targets:
                    return None
            elif kind == EventKind.KERNEL:
                ops = [self._signatures[row[3]] for row in column]
                what = _without_sizes(ops, _turned(sizes, backward))
                if what is None:
                    if len({_key(op) for op in ops}) != 1:
                        return None
                    what = ops[0]
            else:
                if len({row[3:] for row in column}) != 1:
                    return None
                what, size = column[0][3], (0, column[0][4])
            if size is None:
                return None
            block.append(AbstractEvent(kind, flags, stream, what, size))
        return tuple(block)


def _depends(block: Sequence[AbstractEvent]) -> bool:
    """True when a block's events depend on the fragment's size."""
    return any(e.size[0] or (e.kind == EventKind.KERNEL and _has_fragment(e.what)) for e in block)


def takes_lists(op: str) -> bool:
    """Ops whose tensor arguments are lists of one tensor per parameter."""
    return "_foreach_" in op or "_fused_adam" in op or "_fused_sgd" in op or "multi_tensor" in op


def _renumbered(loop: Loop, place: Mapping[int, int]) -> Loop:
    """The loop with its references to earlier loops moved to where those are."""
    block = tuple(
        event._replace(what=(place[event.what[0]], event.what[1]))
        if event.kind == EventKind.FREE and event.what[0] >= 0
        else event
        for event in loop.block
    )
    return loop._replace(block=block)


def _turned(sizes: tuple[int, ...], backward: bool) -> tuple[int, ...]:
    return sizes[::-1] if backward else sizes


def _linear(values: list[int], sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """(bytes per element, constant) that gives these values for these sizes."""
    for per_element in (4, 2, 8):
        if all(value == per_element * n for value, n in zip(values, sizes, strict=True)):
            return (per_element, 0)
    return (0, values[0]) if len(set(values)) == 1 else None


def _resolve(names: tuple[tuple, ...], lists: Lists) -> tuple[int, ...]:
    found = {lists[name] for name in names if name in lists}
    if len(found) != 1:
        raise CannotDeriveError(
            f"a loop runs over one of the lists {', '.join(map(str, names))}, which differ on another rank"
            if found
            else f"another rank has no list {names[0]}"
        )
    return found.pop()


def _map_tensors(signature: OpSignature, change) -> OpSignature:
    return msgspec.structs.replace(
        signature,
        inputs=tuple(change(t) for t in signature.inputs),
        outputs=tuple(change(t) for t in signature.outputs),
    )


def _map_outputs(signature: OpSignature, change) -> OpSignature:
    return msgspec.structs.replace(signature, outputs=tuple(change(t) for t in signature.outputs))


def _shape(size: int) -> tuple[int, ...]:
    return size.shape if isinstance(size, Size) else (size,)


def _without_sizes(ops: Sequence[OpSignature], sizes: Sequence[int]) -> OpSignature | None:
    """One signature for the same op on fragments of these sizes; None where the ops differ in more."""
    first = ops[0]
    if any(_key(_without_shapes(op)) != _key(_without_shapes(first)) for op in ops[1:]):
        return None
    inputs, outputs = (
        [_without_size(tensors, sizes) for tensors in zip(*columns, strict=True)]
        for columns in ([op.inputs for op in ops], [op.outputs for op in ops])
    )
    if None in inputs or None in outputs:
        return None
    return msgspec.structs.replace(first, inputs=tuple(inputs), outputs=tuple(outputs))


def _without_size(tensors: Sequence[TensorSpec], sizes: Sequence[int]) -> TensorSpec | None:
    first = tensors[0]
    flat = all(t.shape == (n,) for t, n in zip(tensors, sizes, strict=True))
    shaped = all(t.shape == _shape(n) for t, n in zip(tensors, sizes, strict=True))
    if flat or shaped:
        mark = FRAGMENT if flat and shaped else _FLAT if flat else _SHAPED
        return TensorSpec(first.dtype, (mark,), first.strides)
    return first if all(t.shape == first.shape for t in tensors) else None


def _without_shapes(signature: OpSignature) -> OpSignature:
    return _map_tensors(signature, lambda t: TensorSpec(t.dtype, (), t.strides))


def _with_size(signature: OpSignature, size: int) -> OpSignature:
    def fill(t: TensorSpec) -> TensorSpec:
        if t.shape == (FRAGMENT,) and len(_shape(size)) != 1:
            raise CannotDeriveError("whether a whole parameter keeps its shape was not seen")
        if t.shape in ((FRAGMENT,), (_FLAT,)):
            return TensorSpec(t.dtype, (int(size),), t.strides)
        return TensorSpec(t.dtype, _shape(size), t.strides) if t.shape == (_SHAPED,) else t

    return _map_tensors(signature, fill)


def _has_fragment(signature: OpSignature) -> bool:
    marks = ((FRAGMENT,), (_FLAT,), (_SHAPED,))
    return any(t.shape in marks for t in (*signature.inputs, *signature.outputs))


_COUNT = -5
"""Stands for the number of fragments in the shape of a tensor."""


def _without_count(t: TensorSpec, count: int) -> TensorSpec:
    return TensorSpec(t.dtype, (_COUNT,), t.strides) if t.shape == (count,) else t


def _with_count(signature: OpSignature, count: int) -> OpSignature:
    return _map_tensors(
        signature, lambda t: TensorSpec(t.dtype, (count,), t.strides) if t.shape == (_COUNT,) else t
    )


_CONSTANT = -2
"""Marks a tensor of constant shape that appears once per fragment (an optimizer's step counts)."""


def _gather(signature: OpSignature, sizes: tuple[int, ...]) -> OpSignature | None:
    """The signature with each run of the list replaced by one tensor; None when it does not consist of such runs."""
    inputs, outputs = (_gather_tensors(ts, sizes) for ts in (signature.inputs, signature.outputs))
    if inputs is None or outputs is None or not inputs:
        return None
    return msgspec.structs.replace(signature, inputs=inputs, outputs=outputs)


def _gather_tensors(tensors: tuple[TensorSpec, ...], sizes: tuple[int, ...]) -> tuple[TensorSpec, ...] | None:
    count = len(sizes)
    if len(tensors) % count:
        return None
    gathered = []
    for start in range(0, len(tensors), count):
        run = tensors[start : start + count]
        if len({(t.dtype, t.strides) for t in run}) != 1:
            return None
        if all(t.shape == (n,) for t, n in zip(run, sizes, strict=True)):
            gathered.append(TensorSpec(run[0].dtype, (FRAGMENT,), run[0].strides))
        elif len({t.shape for t in run}) == 1 and math.prod(run[0].shape) == 1:
            gathered.append(TensorSpec(run[0].dtype, (_CONSTANT, *run[0].shape), run[0].strides))
        else:
            return None
    return tuple(gathered)


def _spread(signature: OpSignature, sizes: tuple[int, ...]) -> OpSignature:
    def spread(tensors: tuple[TensorSpec, ...]) -> Iterator[TensorSpec]:
        for t in tensors:
            for n in sizes:
                yield TensorSpec(t.dtype, (int(n),) if t.shape == (FRAGMENT,) else t.shape[1:], t.strides)

    if signature.op == "aten::cat":
        joined = msgspec.structs.replace(signature, inputs=tuple(spread(signature.inputs)))
        return _with_count(joined, len(sizes))
    return msgspec.structs.replace(
        signature, inputs=tuple(spread(signature.inputs)), outputs=tuple(spread(signature.outputs))
    )


def _key(signature: OpSignature) -> tuple:
    return (
        signature.op,
        signature.inputs,
        signature.outputs,
        signature.scalars,
        tuple(sorted(signature.attrs.items())),
    )
