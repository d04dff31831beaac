"""Virtual kernels of extensions: allocation as their C++ does it, ops recorded with their geometry; nothing is computed.

For integrations that put something under the Python of a package whose compiled part needs a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from prism_plugins.capture.recorder import get_recorder, tensor_spec
from prism_plugins.device.tensors import host_view, is_shape_only, mark_synthesized
from prism_plugins.program.model import OpSignature, TensorSpec

# --- allocation ---


def empty(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """An output or workspace on the current device. Its values, where it has memory, are 1 and count as synthesized."""
    return synthesized(torch.empty(tuple(shape), dtype=dtype, device="cuda"))


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """:func:`empty` with the shape and dtype of a tensor, contiguous."""
    return empty(tensor.shape, tensor.dtype)


def synthesized(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor after a kernel wrote it that is not computed: finite values where it has memory."""
    if tensor.numel() and not is_shape_only(tensor):
        host_view(tensor).fill_(1 if tensor.dtype.is_floating_point else 0)
        mark_synthesized(tensor)
    return tensor


def zeros(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that the C++ makes by ``at::zeros``: the fill is a kernel of its own."""
    return torch.zeros(tuple(shape), dtype=dtype, device="cuda")


# --- recording ---


Operand = torch.Tensor | TensorSpec


def record(op: str, inputs: Sequence[Operand], outputs: Sequence[Operand] = (), **scalars: Any) -> None:
    """Record a device op. Operands are tensors, or the geometry that the kernel sees them with."""
    recorder = get_recorder()
    if recorder.recording:
        recorder.launch(
            _intern(op, tuple(map(spec, inputs)), tuple(map(spec, outputs)), tuple(scalars.items()))
        )


def record_adam(op: str, lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """One launch over lists of tensors: gradients, which stay, parameters, moments and, where there are, master parameters."""
    gradients, parameters, *rest = lists
    record(op, [*parameters, *gradients, *itertools.chain(*rest)])
    _written(parameters, *rest)


def record_sgd(op: str, lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """The same: gradients, which stay, parameters and momenta."""
    record(op, [*itertools.chain(*lists)])
    _written(*lists[1:])


def record_scale(op: str, lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """One launch over lists of sources and of targets."""
    sources, targets = lists
    record(op, sources, targets)
    _written(targets)


def _written(*lists: Sequence[torch.Tensor]) -> None:
    for tensor in itertools.chain(*lists):
        synthesized(tensor)


@functools.lru_cache(maxsize=16384)
def _intern(
    op: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    scalars: tuple[tuple[str, Any], ...],
) -> int:
    return get_recorder().intern(OpSignature(op=op, inputs=inputs, outputs=outputs, scalars=scalars))


def spec(operand: Operand) -> TensorSpec:
    """The geometry of an operand."""
    return operand if isinstance(operand, TensorSpec) else tensor_spec(operand)


def matrix(rows: int, columns: int, dtype: str, *, transposed: bool = False) -> TensorSpec:
    """A matrix of (rows, columns) that a kernel reads; ``transposed``: it lies in memory as (columns, rows)."""
    return TensorSpec(dtype, (rows, columns), (1, rows) if transposed else ())


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def product(sizes: Iterable[int]) -> int:
    """Of all sizes."""
    result = 1
    for size in sizes:
        result *= size
    return result
