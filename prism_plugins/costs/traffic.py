"""Which bytes an op moves, from its signature."""

from __future__ import annotations

from prism_plugins.costs.families import is_inplace
from prism_plugins.program.model import DTYPE_BYTES, OpSignature, TensorSpec


def footprint(t: TensorSpec) -> float:
    """Bytes a kernel touches: broadcast dimensions (stride 0) count once."""
    n = 1
    for size, stride in zip(t.shape, t.strides or (1,) * len(t.shape), strict=False):
        n *= 1 if stride == 0 and size else size
    return float(n * DTYPE_BYTES.get(t.dtype, 4))


def operands_read(s: OpSignature) -> tuple[TensorSpec, ...]:
    """Inputs without the destinations of an ``out=`` overload, which come last and are not read."""
    overload = s.op.rsplit("::", 1)[-1].partition(".")[2]
    if s.outputs and (overload == "out" or overload.endswith("_out") or overload == "grad_input"):
        count = len(s.outputs)
        if len(s.inputs) > count and s.inputs[-count:] == s.outputs:
            return s.inputs[:-count]
        # The last input is the destination even where its strides were recorded differently.
        if len(s.inputs) > count and all(
            a.shape == b.shape for a, b in zip(s.inputs[-count:], s.outputs, strict=True)
        ):
            return s.inputs[:-count]
    return s.inputs


def traffic(s: OpSignature) -> float:
    """Every input read once, every output written once; an in-place op without recorded outputs writes its input."""
    read = sum(footprint(t) for t in operands_read(s))
    written = sum(footprint(t) for t in s.outputs)
    if not s.outputs and is_inplace(s.op) and s.inputs:
        written = footprint(s.inputs[0])
    return read + written


def destination(s: OpSignature) -> TensorSpec | None:
    """The tensor an op writes."""
    if s.outputs:
        return s.outputs[0]
    return s.inputs[0] if s.inputs else None


def largest(s: OpSignature) -> TensorSpec | None:
    """The tensor with most elements."""
    return max((*s.inputs, *s.outputs), key=lambda t: t.numel, default=None)


def is_dense(t: TensorSpec) -> bool:
    """Whether the elements fill a block of memory in some dimension order."""
    if not t.strides:
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(t.strides, t.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_vectorised(operands: tuple[TensorSpec, ...]) -> bool:
    """Whether TensorIterator takes its vectorised path: equal shapes, dtypes and dense equal strides."""
    big = [t for t in operands if t.numel > 1]
    if not big:
        return True
    first = big[0]
    return is_dense(first) and all(
        t.shape == first.shape and t.dtype == first.dtype and t.strides == first.strides for t in big[1:]
    )


def scalar(s: OpSignature, name: str) -> object:
    """A non-tensor argument, None when it was not recorded."""
    for key, value in s.scalars:
        if key == name:
            return value
    return None
