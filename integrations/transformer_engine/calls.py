"""Calls of the compiled module: implementations by name, arguments by name, ops recorded with their geometry.

An implementation takes one :class:`Call` and allocates on the virtual device what the C++ of the same name allocates,
in the same order: outputs, tensors saved for backward, workspaces that live while it runs. It records one op for each
kernel that runs, and computes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from prism_plugins.capture.recorder import get_recorder, tensor_spec
from prism_plugins.device.tensors import host_view, is_shape_only, mark_synthesized
from prism_plugins.program.model import OpSignature, TensorSpec

Implementation = Callable[["Call"], Any]

IMPLEMENTATIONS: dict[str, Implementation] = {}
_told: list[Callable[[str], None]] = []


def tell_assumptions_to(sink: Callable[[str], None]) -> None:
    """Where :func:`assume` lines go; the slice's own list."""
    _told[:] = [sink]


def assume(text: str) -> None:
    """Say what was assumed; lines that were said before may come again."""
    for sink in _told:
        sink(text)


def implements(*names: str) -> Callable[[Implementation], Implementation]:
    """Register the implementation of functions of the compiled module."""

    def register(function: Implementation) -> Implementation:
        for name in names:
            IMPLEMENTATIONS[name] = function
        return function

    return register


class Call:
    """One call: ``call.name`` is the function, every other attribute an argument, in the order of the signature; None
    where none was given."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.__dict__ = {"name": name, **arguments}

    def __getattr__(self, name: str) -> Any:
        return None

    def first(self) -> Any:
        """The first argument, whatever the version calls it."""
        return next(value for key, value in self.__dict__.items() if key != "name")


def bound(name: str, parameters: Sequence[str], implementation: Implementation) -> Callable[..., Any]:
    """The function of the module: binds arguments by the names that this version gives them.

    Raises TypeError for arguments that the signature does not have, as pybind does.
    """
    allowed = set(parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(parameters) or not allowed.issuperset(kwargs):
            surplus = sorted(set(kwargs) - allowed) or f"{len(args)} positional ones"
            raise TypeError(f"{name}() does not take {surplus}; it takes {', '.join(parameters)}")
        given = dict(zip(parameters, args, strict=False)) | kwargs
        return implementation(Call(name, {p: given[p] for p in parameters if p in given}))

    function.__name__ = function.__qualname__ = name
    return function


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
