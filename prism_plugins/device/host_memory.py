"""Methods of tensors and storages that would touch the reserved pages of shape-only host tensors.

Large floating-point CPU tensors are shape only (``csrc/host_memory.h``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from prism_plugins.device.library import call, function


def is_host_shape_only(storage: torch.UntypedStorage) -> bool:
    """Whether a CPU storage has reserved pages that nobody is to touch."""
    return bool(function("is_host_shape_only")(storage._cdata))


@contextlib.contextmanager
def real_host_tensors() -> Iterator[None]:
    """CPU tensors that this thread allocates inside are real, whatever their size."""
    call("real_host", 1)
    try:
        yield
    finally:
        call("real_host", -1)


_new = torch.Tensor.new
_new_tensor = torch.Tensor.new_tensor
_clone_storage = torch.UntypedStorage.clone
_share_storage = torch.UntypedStorage.share_memory_


@functools.wraps(_new)
def new(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """``Tensor.new``, which derives the device from dispatch keys."""
    return _new(_plain(self), *arguments, **options)


@functools.wraps(_new_tensor)
def new_tensor(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """``Tensor.new_tensor``, which derives the device from dispatch keys."""
    return _new_tensor(_plain(self), *arguments, **options)


@functools.wraps(_clone_storage)
def clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """``UntypedStorage.clone`` (``copy.deepcopy`` of a tensor)."""
    if not is_host_shape_only(self):
        return _clone_storage(self)
    return torch.ops.prism.host_bytes(self.nbytes()).untyped_storage()


@functools.wraps(_share_storage)
def share_storage(self: torch.UntypedStorage, *arguments: Any) -> torch.UntypedStorage:
    """``UntypedStorage.share_memory_``: shape-only memory stays where it is."""
    return self if is_host_shape_only(self) else _share_storage(self, *arguments)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """An empty real tensor in place of a shape-only host tensor."""
    on_host = t.device.type == "cpu" and torch._C._has_storage(t)
    return t.new_empty(0) if on_host and is_host_shape_only(t.untyped_storage()) else t
