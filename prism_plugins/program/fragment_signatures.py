"""Op signatures without the sizes of the fragments they work on: marks in shapes, taken out and put in again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import op_key
from prism_plugins.program.model import OpSignature, TensorSpec

FRAGMENT = -1
"""Stands for the number of elements of the fragment in the shape of a tensor."""


_FLAT, _SHAPED = -3, -4
"""The same, where it was seen that the tensor is flat, or that it has the shape of its fragment."""


_CONSTANT = -2
"""Marks a tensor of constant shape that appears once per fragment (an optimizer's step counts)."""


COUNT = -5
"""Stands for the number of fragments in the shape of a tensor."""


class Size(int):
    """Elements of a fragment whose tensors may have a shape of their own: a whole parameter. Compares as the number."""

    shape: tuple[int, ...]

    def __new__(cls, shape: tuple[int, ...]) -> Size:
        """The number of elements of this shape."""
        size = super().__new__(cls, math.prod(shape))
        size.shape = shape
        return size


def takes_lists(op: str) -> bool:
    """Ops whose tensor arguments are lists of one tensor per parameter."""
    return "_foreach_" in op or "_fused_adam" in op or "_fused_sgd" in op or "multi_tensor" in op


def map_tensors(signature: OpSignature, change) -> OpSignature:
    """The signature with every tensor changed."""

    return msgspec.structs.replace(
        signature,
        inputs=tuple(change(t) for t in signature.inputs),
        outputs=tuple(change(t) for t in signature.outputs),
    )


def map_outputs(signature: OpSignature, change) -> OpSignature:
    """The signature with its outputs changed."""

    return msgspec.structs.replace(signature, outputs=tuple(change(t) for t in signature.outputs))


def _shape(size: int) -> tuple[int, ...]:
    return size.shape if isinstance(size, Size) else (size,)


def without_sizes(ops: Sequence[OpSignature], sizes: Sequence[int]) -> OpSignature | None:
    """One signature for the same op on fragments of these sizes; None where the ops differ in more."""
    first = ops[0]
    if any(op_key(_without_shapes(op)) != op_key(_without_shapes(first)) for op in ops[1:]):
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
    return map_tensors(signature, lambda t: TensorSpec(t.dtype, (), t.strides))


def with_size(signature: OpSignature, size: int) -> OpSignature:
    """The signature on a fragment of this many elements.

    Raises :class:`CannotDeriveError` for a whole parameter when it was not seen whether it keeps its shape.
    """

    def fill(t: TensorSpec) -> TensorSpec:
        if t.shape == (FRAGMENT,) and len(_shape(size)) != 1:
            raise CannotDeriveError("whether a whole parameter keeps its shape was not seen")
        if t.shape in ((FRAGMENT,), (_FLAT,)):
            return TensorSpec(t.dtype, (int(size),), t.strides)
        return TensorSpec(t.dtype, _shape(size), t.strides) if t.shape == (_SHAPED,) else t

    return map_tensors(signature, fill)


def has_fragment(signature: OpSignature) -> bool:
    """True when a shape depends on the fragment's size."""

    marks = ((FRAGMENT,), (_FLAT,), (_SHAPED,))
    return any(t.shape in marks for t in (*signature.inputs, *signature.outputs))


def without_count(t: TensorSpec, count: int) -> TensorSpec:
    """The tensor with :data:`COUNT` as its shape, if it has one element per fragment."""

    return TensorSpec(t.dtype, (COUNT,), t.strides) if t.shape == (count,) else t


def with_count(signature: OpSignature, count: int) -> OpSignature:
    """The signature for this many fragments."""

    return map_tensors(
        signature, lambda t: TensorSpec(t.dtype, (count,), t.strides) if t.shape == (COUNT,) else t
    )


def gather(signature: OpSignature, sizes: tuple[int, ...]) -> OpSignature | None:
    """The signature with each run of the list replaced by one tensor; None when it does not consist of such runs."""
    inputs, outputs = (gather_tensors(ts, sizes) for ts in (signature.inputs, signature.outputs))
    if inputs is None or outputs is None or not inputs:
        return None
    return msgspec.structs.replace(signature, inputs=inputs, outputs=outputs)


def gather_tensors(tensors: tuple[TensorSpec, ...], sizes: tuple[int, ...]) -> tuple[TensorSpec, ...] | None:
    """One tensor in place of each run of the list; None when the tensors are no such runs."""

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


def spread(signature: OpSignature, sizes: tuple[int, ...]) -> OpSignature:
    """The inverse of :func:`gather` for a list of these sizes."""

    def each(tensors: tuple[TensorSpec, ...]) -> Iterator[TensorSpec]:
        for t in tensors:
            for n in sizes:
                yield TensorSpec(t.dtype, (int(n),) if t.shape == (FRAGMENT,) else t.shape[1:], t.strides)

    if signature.op == "aten::cat":
        joined = msgspec.structs.replace(signature, inputs=tuple(each(signature.inputs)))
        return with_count(joined, len(sizes))
    return msgspec.structs.replace(
        signature, inputs=tuple(each(signature.inputs)), outputs=tuple(each(signature.outputs))
    )
