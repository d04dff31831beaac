"""The program of a rank that owns another partition of the flat buffers (ZeRO 1 and 2), from that of a sliced rank.

Data-parallel ranks run the same program but for what they do with the parameter fragments in their partition:

* after each reduction of a bucket of gradients they copy their fragments back and the whole gradients of the parameters
  they own something of into a buffer of their own;
* after the last one they add those up (gradient accumulation);
* in the optimizer phase they check the gradients of their fragments, take norms and join them.

The first follows from which parameters are in the bucket, the others are loops over lists (:mod:`.shard_loops`). Ranks
whose loops have one turn, several, or none do different things around them (nothing is joined where there is one
fragment): a rank is derived from one of its own form (:func:`form_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import compare_programs
from prism_plugins.program.fragment_signatures import Size
from prism_plugins.program.model import (
    DTYPE_BYTES,
    EVENT_DTYPE,
    EventKind,
    OpSignature,
    Phase,
    Program,
    TensorSpec,
)
from prism_plugins.program.parse_loops import parse_joined
from prism_plugins.program.shard_loops import Item, Lists, Row, Tables, issue
from prism_plugins.program.slices import FlatPartitions, PartitionFragment

Form = tuple[tuple[int, int, int, tuple[tuple[int, ...], ...]], ...]
"""By group: fragments (0, 1 or 2 for more), elements of padding, fragments counted in the norm (likewise), shapes of the
parameters without a gradient it owns something of."""
Span = tuple[Phase, int, int]
"""A phase, where it begins and where it ends."""
_LONGEST_TURN = 40
"""Events per fragment; DeepSpeed 0.19 checks a gradient for overflow in 36."""


def without_gradient(partitions: FlatPartitions, buckets: Sequence[Sequence[int]]) -> frozenset[int]:
    """Parameters that are in no bucket of reduced gradients: zeros are filled in where a rank owns something of them
    (``DeepSpeedZeroOptimizer.get_all_grad_tensors``)."""
    reduced = {parameter for bucket in buckets for parameter in bucket}
    return frozenset(range(len(partitions.shapes))) - reduced if reduced else frozenset()


def form_of(partitions: FlatPartitions, kind: int, gradless: frozenset[int] = frozenset()) -> Form:
    """What the programs of two kinds must have in common to be derived from each other; ``gradless`` are the parameters of
    :func:`without_gradient`."""
    lists = _lists(partitions, kind)
    form = []
    for group, size in enumerate(partitions.sizes):
        fragments = lists["fragments", group]
        padding = size - sum(fragments)
        zeros = tuple(
            partitions.shapes[f.parameter]
            for f in _of_group(partitions, kind, group)
            if f.parameter in gradless
        )
        form.append((min(len(fragments), 2), padding, min(len(lists["counted", group]), 2), zeros))
    return tuple(form)


def shows(partitions: FlatPartitions, kind: int) -> tuple[bool, ...]:
    """By group: whether a rank of this kind owns the whole, and a part, of a parameter that has a shape. What is done
    with such tensors cannot be learnt from a rank without them."""
    shown: list[bool] = []
    for group in range(len(partitions.sizes)):
        sizes = _fragments(partitions, kind, group)
        shown.append(any(isinstance(size, Size) and len(size.shape) > 1 for size in sizes))
        shown.append(any(len(partitions.shapes[f.parameter]) > 1 for f in _of_group(partitions, kind, group)))
    return tuple(shown)


def richness(partitions: FlatPartitions, kind: int) -> tuple[int, int, int]:
    """Of several kinds of one form the richest is the one to learn from."""
    sizes = [f.numel for f in partitions.owned[kind]]
    return sum(shows(partitions, kind)), len(set(sizes)), len(sizes)


def work_of(partitions: FlatPartitions, kind: int) -> tuple:
    """Equal for kinds whose programs are equal wherever the bucket is the same."""
    return tuple(
        (f.group, f.parameter, f.numel == math.prod(partitions.shapes[f.parameter]), f.start == 0, f.numel)
        for f in partitions.owned[kind]
    )


def weight(partitions: FlatPartitions, kind: int) -> int:
    """Bytes that ranks of one role differ in most: the buffer of whole gradients (2 bytes an element) and the copy that the
    norm makes of the largest fragment (8)."""
    largest = max((f.numel for f in partitions.owned[kind]), default=0)
    return 2 * gradient_buffer(partitions, kind) + 8 * largest


def gradient_buffer(partitions: FlatPartitions, kind: int) -> int:
    """Elements of the buffer for the whole gradients of the parameters that a rank owns something of."""
    return sum(math.prod(partitions.shapes[f.parameter]) for f in partitions.owned[kind])


def _of_group(partitions: FlatPartitions, kind: int, group: int) -> list[PartitionFragment]:
    return [fragment for fragment in partitions.owned[kind] if fragment.group == group]


def _fragments(partitions: FlatPartitions, kind: int, group: int) -> list[int]:
    sizes: list[int] = []
    for fragment in _of_group(partitions, kind, group):
        shape = partitions.shapes[fragment.parameter]
        sizes.append(Size(shape) if fragment.numel == math.prod(shape) else fragment.numel)
    return sizes


def _lists(partitions: FlatPartitions, kind: int) -> dict[tuple, tuple[int, ...]]:
    """What the loops of the optimizer phase run over."""
    lists: dict[tuple, tuple[int, ...]] = {}
    uncounted = set(partitions.uncounted)
    for group, size in enumerate(partitions.sizes):
        fragments = _fragments(partitions, kind, group)
        owned = _of_group(partitions, kind, group)
        padding = size - sum(fragments)
        lists["fragments", group] = tuple(fragments)
        lists["gradients", group] = (*fragments, *((padding,) if padding else ()))
        lists["counted", group] = tuple(
            n for n, f in zip(fragments, owned, strict=True) if f.parameter not in uncounted
        )
    return lists


def _owned_lists(partitions: FlatPartitions, kind: int) -> dict[tuple, tuple[int, ...]]:
    """What the loops over accumulated gradients run over."""
    return {
        ("owned", group): tuple(
            Size(partitions.shapes[f.parameter]) for f in _of_group(partitions, kind, group)
        )
        for group in range(len(partitions.sizes))
    }


class _Own(NamedTuple):
    """What a rank copies of one bucket."""

    back: tuple[int, ...]
    """Elements of each copy out of what was reduced."""
    whole: tuple[int, ...]
    """Elements of each gradient copied into the rank's buffer."""


def _own_of_bucket(partitions: FlatPartitions, kind: int, bucket: Sequence[int]) -> _Own:
    """Fragments that follow each other in the bucket are copied back as one
    (``DeepSpeedZeroOptimizer.average_tensor``)."""
    fragment_of = {f.parameter: f for f in partitions.owned[kind]}
    back: list[int] = []
    whole: list[int] = []
    follows = False
    for parameter in bucket:
        fragment = fragment_of.get(parameter)
        if fragment is None:
            follows = False
            continue
        numel = math.prod(partitions.shapes[parameter])
        if follows and fragment.start == 0:
            back[-1] += fragment.numel
        else:
            back.append(fragment.numel)
        whole.append(numel)
        follows = fragment.start + fragment.numel == numel
    return _Own(tuple(back), tuple(whole))


class _Copies(NamedTuple):
    """The stretch after the reduction of a bucket."""

    begin: int
    end: int
    bucket: tuple[int, ...]
    between: tuple[Row, ...]
    """Released when the fragments were copied back: what was reduced, where it is not the bucket itself."""
    phase: int
    """Number of the phase: each has a buffer of its own for whole gradients."""


class _Copy(NamedTuple):
    """A flat copy, whatever its size."""

    event: Row
    signature: OpSignature


class _Loops(NamedTuple):
    """A stretch of loops over lists."""

    begin: int
    end: int
    items: list[Item]
    over_owned: bool


class PartitionedProgram:
    """A sliced (or derived) program prepared for the partitions of other ranks. Raises :class:`CannotDeriveError` where
    it is not understood, which includes not being able to give itself back.

    Args:
        program: The program.
        partitions: What ranks of each kind own.
        kind: The kind of the program's rank.
        buckets: Parameters reduced together, in order.
    """

    def __init__(
        self, program: Program, partitions: FlatPartitions, kind: int, buckets: Sequence[Sequence[int]]
    ) -> None:
        self.program = program
        self._partitions = partitions
        self._gradless = without_gradient(partitions, buckets)
        self._form = form_of(partitions, kind, self._gradless)
        self._tables = Tables(program.signatures)
        self._rows: list[Row] = program.events.tolist()
        self._back: _Copy | None = None
        self._into: _Copy | None = None
        self._buffer_of_phase: dict[int, Row] = {}
        self._itemsize = 0
        self._next_id = _next_id(program)
        phases = list(program.iter_phases())
        copies = self._read_buckets(kind, buckets, phases)
        self._stretches: list[_Copies | _Loops] = [*copies, *self._read_sums(kind, copies, phases)]
        lists = _lists(partitions, kind)
        for phase, begin, end in phases:
            if phase.kind == "optimizer":
                self._stretches.append(self._loops(begin + 1, end, lists, over_owned=False))
        self._stretches.sort(key=lambda stretch: stretch.begin)
        again = self.program_for(kind)
        if not do_the_same(again, program):
            raise CannotDeriveError("what was found of parameter fragments does not give the program back")

    def check(self, kind: int) -> None:
        """Raise :class:`CannotDeriveError` unless :meth:`program_for` can serve this kind."""
        self._issue(kind, self._tables.copy())

    def program_for(self, kind: int) -> Program:
        """The program of a rank of another kind. Raises :class:`CannotDeriveError`."""
        source = self.program
        tables = self._tables.copy()
        pieces: list[np.ndarray] = []
        at = 0
        for stretch, rows in zip(self._stretches, self._issue(kind, tables), strict=True):
            pieces += [source.events[at : stretch.begin], np.array(rows, dtype=EVENT_DTYPE)]
            at = stretch.end
        pieces.append(source.events[at:])
        return msgspec.structs.replace(
            source, events=np.concatenate(pieces), signatures=tables.signatures, source="derived"
        )

    def _issue(self, kind: int, tables: Tables) -> list[list[Row]]:
        """The events of each stretch."""
        if form_of(self._partitions, kind, self._gradless) != self._form:
            raise CannotDeriveError("no slice of a rank with as many fragments")
        lists, owned = _lists(self._partitions, kind), _owned_lists(self._partitions, kind)
        issued: list[list[Row]] = []
        next_id = self._next_id
        has_buffer: set[int] = set()
        for stretch in self._stretches:
            if isinstance(stretch, _Loops):
                issued.append(issue(stretch.items, owned if stretch.over_owned else lists, tables, next_id))
                next_id += len(issued[-1])
            else:
                issued.append(self._copies(stretch, kind, tables, has_buffer))
        return issued

    def _copies(self, stretch: _Copies, kind: int, tables: Tables, has_buffer: set[int]) -> list[Row]:
        own = _own_of_bucket(self._partitions, kind, stretch.bucket)
        rows = [self._sized(self._back, n, tables) for n in own.back]
        rows += stretch.between
        if own.whole and stretch.phase not in has_buffer:
            has_buffer.add(stretch.phase)
            buffer = self._buffer_of_phase.get(stretch.phase)
            if buffer is None:
                raise CannotDeriveError("no buffer for the gradients of a partition was seen")
            rows.append((*buffer[:4], gradient_buffer(self._partitions, kind) * self._itemsize))
        return rows + [self._sized(self._into, n, tables) for n in own.whole]

    def _sized(self, copy: _Copy | None, numel: int, tables: Tables) -> Row:
        if copy is None:
            raise CannotDeriveError("no copy of a gradient was seen")
        kind, flags, stream, _, value = copy.event
        return (kind, flags, stream, tables.index(_with_numel(copy.signature, numel)), value)

    def _read_buckets(self, kind: int, buckets: Sequence[Sequence[int]], phases: list[Span]) -> list[_Copies]:
        """The copies after each reduction."""
        found: list[_Copies] = []
        at = 0
        for bucket in buckets:
            numel = sum(math.prod(self._partitions.shapes[parameter]) for parameter in bucket)
            at = self._reduction(at, numel)
            phase = next((i for i, (_, begin, end) in enumerate(phases) if begin < at < end), -1)
            own = _own_of_bucket(self._partitions, kind, bucket)
            begin = at = at + 1
            for size in own.back:
                self._back = self._copy(at, size, self._back)
                at += 1
            between = []
            # What was reduced is released, unless it was the bucket itself: then the next release is that of another.
            nbytes = numel * self._itemsize_of(begin - 1)
            if self._kind(at) == EventKind.FREE and self._made(begin, self._rows[at][3]) == nbytes:
                between.append(self._rows[at])
                at += 1
            if own.whole and phase not in self._buffer_of_phase:
                row = self._rows[at] if self._kind(at) == EventKind.ALLOC else None
                total = gradient_buffer(self._partitions, kind)
                if row is None or row[4] % total:
                    raise CannotDeriveError(
                        "no buffer for the gradients of a partition where one was expected"
                    )
                self._buffer_of_phase[phase], self._itemsize = row, row[4] // total
                at += 1
            for size in own.whole:
                self._into = self._copy(at, size, self._into)
                at += 1
            found.append(_Copies(begin, at, tuple(bucket), tuple(between), phase))
        return found

    def _read_sums(self, kind: int, copies: Sequence[_Copies], phases: list[Span]) -> list[_Loops]:
        """Loops over accumulated gradients, between the last copies of a phase and its end."""
        last = {stretch.phase: stretch.end for stretch in copies}
        lists = _owned_lists(self._partitions, kind)
        return [
            self._loops(begin, phases[phase][2], lists, over_owned=True)
            for phase, begin in last.items()
            if phase >= 0
        ]

    def _loops(self, begin: int, end: int, lists: Lists, *, over_owned: bool) -> _Loops:
        rows = self._rows[begin:end]
        items = parse_joined(rows, self.program.signatures, lists, max_block=_LONGEST_TURN)
        return _Loops(begin, end, items, over_owned)

    def _reduction(self, at: int, numel: int) -> int:
        """Where the next reduction of so many elements is issued."""
        for i in range(at, len(self._rows)):
            if self._rows[i][0] == EventKind.COMM:
                comm = self.program.comms[self._rows[i][3]]
                if comm.kind == "all_reduce" and comm.in_numel == numel:
                    return i
        raise CannotDeriveError(f"no reduction of {numel} gradients was seen")

    def _itemsize_of(self, at: int) -> int:
        return DTYPE_BYTES[self.program.comms[self._rows[at][3]].dtype]

    def _made(self, before: int, allocation: int) -> int:
        """Bytes of an allocation of the last few events before; -1 for others."""
        for kind, _, _, ref, value in self._rows[max(before - 16, 0) : before]:
            if kind == EventKind.ALLOC and ref == allocation:
                return value
        return -1

    def _kind(self, at: int) -> int:
        return self._rows[at][0] if at < len(self._rows) else -1

    def _copy(self, at: int, numel: int, known: _Copy | None) -> _Copy:
        """The flat copy that is expected here."""
        if self._kind(at) == EventKind.KERNEL:
            row = self._rows[at]
            signature = self.program.signatures[row[3]]
            tensors = (*signature.inputs, *signature.outputs)
            if signature.op == "aten::copy_" and all(t.shape == (numel,) for t in tensors):
                copy = _Copy(row, signature)
                if known is None or known.event[:3] == row[:3]:
                    return copy
        raise CannotDeriveError(f"no copy of {numel} gradients where one was expected")


def _with_numel(signature: OpSignature, numel: int) -> OpSignature:
    def fill(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t.dtype, (numel,), t.strides) for t in tensors)

    return msgspec.structs.replace(signature, inputs=fill(signature.inputs), outputs=fill(signature.outputs))


def do_the_same(derived: Program, program: Program) -> bool:
    """Whether two ranks' programs are equal op by op, whatever groups they communicate in."""
    moved = msgspec.structs.replace(derived, comms=program.comms, groups=program.groups)
    return len(derived.comms) == len(program.comms) and compare_programs(moved, program) is None


def _next_id(program: Program) -> int:
    kinds = program.events["kind"]
    ids = program.events["ref"][(kinds == EventKind.ALLOC) | (kinds == EventKind.FREE)]
    return max([int(ids.max(initial=0)), *(a.id for a in program.initial)]) + 1
