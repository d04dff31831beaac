"""Loops and list ops found in a stretch of one rank's events (:mod:`.shard_loops` says what they are)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import op_key
from prism_plugins.program.fragment_signatures import (
    FRAGMENT,
    gather,
    gather_tensors,
    has_fragment,
    map_outputs,
    map_tensors,
    spread,
    takes_lists,
    with_size,
    without_count,
    without_sizes,
)
from prism_plugins.program.model import EventFlag, EventKind, OpSignature
from prism_plugins.program.shard_loops import (
    AbstractEvent,
    Counted,
    Item,
    ListOp,
    Lists,
    Literal,
    Loop,
    Row,
    is_free,
    renumbered,
    resolve,
)

_MAX_BLOCK = 16
SMALLEST_FRAGMENT = 32
"""Elements below which a single fragment cannot be told from other small tensors."""


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
            inputs = gather_tensors(signature.inputs, sizes) if sizes else None
            if inputs is None or len(inputs) != 1:
                continue
            count = len(sizes)
            if inputs[0].shape != (FRAGMENT,):
                before = self._before()
                if count == 1 or not isinstance(before, Loop) or not _depends(before.block):
                    continue
                if resolve(before.names, self._lists) != sizes:
                    continue
                names = list(before.names)
                self._joined = tuple(names), count, signature.outputs[0].dtype
            joined = msgspec.structs.replace(signature, inputs=inputs)
            if inputs[0].shape != (FRAGMENT,):
                self._count_allocation(signature)
                joined = map_outputs(joined, lambda t, n=count: without_count(t, n))
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
        return Counted(names, row, map_tensors(signature, lambda t: without_count(t, count)), 0)

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
            if is_free(item):
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
            sizes = resolve(item.names, self._lists)
            if isinstance(item, ListOp):
                if sizes:
                    expected = op_key(spread(item.signature, sizes))
                    if at >= len(self._rows) or self._kernel_key(at) != expected:
                        raise CannotDeriveError("the optimizer phase has other list ops than another slice's")
                    at += 1
                self._items.append(item)
                continue
            item = renumbered(item, place)
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
                    fits = op_key(self._signatures[ref]) == op_key(with_size(event.what, sizes[turn]))
                if not fits:
                    raise CannotDeriveError("a loop of the optimizer phase differs from another slice's")

    def _kernel_key(self, at: int) -> object:
        kind, _, _, ref, _ = self._rows[at]
        return op_key(self._signatures[ref]) if kind == EventKind.KERNEL else None

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
            gathered = gather(self._signatures[ref], sizes) if sizes else None
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
                if before is not None and len(resolve(before.names, self._lists)) == len(sizes):
                    return Loop(before.names, block, backward)
            if len(sizes) == 1 and length == 1 and frees:
                return Loop(self._items[max(frees)].names, block, self._release_order())
        return None

    def _release_order(self) -> bool | None:
        """The order of the last loop that only releases and had several fragments; a list goes as others do."""
        for item in reversed(self._items):
            releases = isinstance(item, Loop) and all(e.kind == EventKind.FREE for e in item.block)
            if releases and len(resolve(item.names, self._lists)) > 1:
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
        return gather(self._signatures[ref], sizes) is not None

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
                what = without_sizes(ops, _turned(sizes, backward))
                if what is None:
                    if len({op_key(op) for op in ops}) != 1:
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


def _linear(values: list[int], sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """(bytes per element, constant) that gives these values for these sizes."""
    for per_element in (4, 2, 8):
        if all(value == per_element * n for value, n in zip(values, sizes, strict=True)):
            return (per_element, 0)
    return (0, values[0]) if len(set(values)) == 1 else None


def _turned(sizes: tuple[int, ...], backward: bool) -> tuple[int, ...]:
    return sizes[::-1] if backward else sizes


def _depends(block: Sequence[AbstractEvent]) -> bool:
    """True when a block's events depend on the fragment's size."""
    return any(e.size[0] or (e.kind == EventKind.KERNEL and has_fragment(e.what)) for e in block)
