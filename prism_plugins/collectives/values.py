"""Where tensor values live and whether they are real: the only place that asks the device layer.

A tensor of the virtual device has either real host memory behind it or only a shape. Collectives write values
through :func:`real_view`, a CPU tensor over the same memory, so that these writes are not recorded as kernels. On a real
GPU that is the tensor itself, and made-up values have the distribution of real ones: arithmetic on zeros draws less
power, and a GPU held at its power cap would clock higher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prism_plugins.device import tensors as _device
from prism_plugins.program.model import DTYPE_BYTES

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_BYTES if hasattr(torch, name)}
"""torch dtype → the name used in :class:`~prism_plugins.program.model.CommSignature`."""


def real_view(tensor: Tensor) -> Tensor | None:
    """A detached CPU tensor over the memory of ``tensor``; None where only its shape exists."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    if _device.is_shape_only(tensor):
        return None
    return _device.host_view(tensor)


def real_views(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """:func:`real_view` of each; None as soon as one has no memory."""
    views = []
    for tensor in tensors:
        view = real_view(tensor)
        if view is None:
            return None
        views.append(view)
    return views


def is_synthesized(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` are made up."""
    return tensor.device.type != "cpu" and _device.is_synthesized(tensor)


def mark_synthesized(tensor: Tensor) -> None:
    """Say that the values just written to ``tensor`` are made up."""
    if tensor.device.type != "cpu":
        _device.mark_synthesized(tensor)


def mark_real(tensor: Tensor) -> None:
    """Say that the values just written to ``tensor`` are what a real run would hold.

    Only a tensor that covers its whole storage is marked; the rest of a storage may still be synthesized.
    """
    if (
        tensor.device.type != "cpu"
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    ):
        _device.mark_real(tensor)


def copy_provenance(target: Tensor, source: Tensor) -> None:
    """After values went from ``source`` to ``target``: made-up values stay made up."""
    if target.device.type == "cpu":
        return
    if is_synthesized(source):
        _device.mark_synthesized(target)
    else:
        mark_real(target)


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor lives on a real GPU: reading its values waits, and memory taken for them is not the job's."""
    return tensor.is_cuda and not _device.is_virtual(tensor)


def fill_plausible(tensor: Tensor, view: Tensor, *, scale: float = 1.0) -> None:
    """Fill with finite values nobody sent (1 for floats, 0 for integers) and mark them synthesized. On a real GPU floats
    are normal with standard deviation ``scale``."""
    if on_gpu(view) and view.dtype.is_floating_point and view.element_size() > 1:
        view.normal_(0.0, scale)
        return
    view.fill_(1 if view.dtype.is_floating_point or view.dtype.is_complex else 0)
    mark_synthesized(tensor)
