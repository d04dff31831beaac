"""Questions about a slice's tensors: where they live and whether their values are real. On a real GPU all are."""

from __future__ import annotations

import torch

from prism_plugins.device.library import function, is_loaded


def is_virtual(t: torch.Tensor) -> bool:
    """Whether the tensor lives on the virtual CUDA device."""
    return t.is_cuda and is_loaded()


def is_shape_only(t: torch.Tensor) -> bool:
    """Whether the tensor has no memory behind it."""
    return _state(t) & 1 == 0


def is_synthesized(t: torch.Tensor) -> bool:
    """Whether the values are not real: no memory behind them, or computed from such values."""
    return _state(t) & 2 != 0


def mark_synthesized(t: torch.Tensor) -> None:
    """Say that the values of the tensor's storage are not real. No-op off the virtual device."""
    if is_virtual(t):
        function("set_synthesized")(t.untyped_storage()._cdata, 1)


def mark_real(t: torch.Tensor) -> None:
    """Say that the values of the tensor's storage are real. Shape-only storages stay synthesized."""
    if is_virtual(t):
        function("set_synthesized")(t.untyped_storage()._cdata, 0)


def host_view(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory; it keeps the storage alive. CPU tensors pass through, and so do those of a
    real GPU.

    Raises:
        RuntimeError: the tensor is shape only.
    """
    return torch.ops.prism.host_view(t.detach()) if is_virtual(t) else t.detach()


def allocation_id(t: torch.Tensor) -> int:
    """Id of the device allocation behind the tensor (the ``ref`` of its ALLOC event); -1 when there is none."""
    return function("allocation_id")(t.untyped_storage()._cdata) if is_virtual(t) else -1


def _state(t: torch.Tensor) -> int:
    """Bit 0: real memory; bit 1: synthesized. Host and empty tensors are real."""
    if not is_virtual(t):
        return 1
    state = function("storage_state")(t.untyped_storage()._cdata)
    return 1 if state < 0 else state
