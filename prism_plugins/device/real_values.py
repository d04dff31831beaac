"""Give tensors of the virtual device contents that are known although nothing computed them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from prism_plugins.device.load import REAL_LIMIT_BYTES, set_real_limit
from prism_plugins.device.tensors import host_view, mark_real


@contextlib.contextmanager
def real_values_up_to(device: str, nbytes: int) -> Iterator[None]:
    """Give real memory to device tensors of up to ``nbytes`` that are allocated inside. ``device`` is the slice's:
    elsewhere than on ``virtual`` every tensor has it."""
    if device != "virtual" or nbytes <= REAL_LIMIT_BYTES:
        yield
        return
    previous = set_real_limit(nbytes)
    try:
        yield
    finally:
        set_real_limit(previous)


def write_values(tensor: torch.Tensor, values: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Write ``values`` (broadcast to its shape) into ``tensor``, without recording a kernel, and return it. Its
    values then count as computed.

    Raises:
        RuntimeError: the tensor is shape only.
    """
    source = torch.tensor(values) if isinstance(values, np.ndarray) else values
    host_view(tensor.data).copy_(source)  # .data: what autograd saved of the tensor stays valid.
    mark_real(tensor)
    return tensor
