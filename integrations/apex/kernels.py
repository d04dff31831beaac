"""Apex's compiled modules on the virtual device: what their C++ allocates, one recorded op for each kernel.

Sources, of github.com/NVIDIA/apex: ``csrc/megatron/scaled_*_softmax_cuda.cu``, ``csrc/multi_tensor_*.cu``,
``apex/contrib/csrc/layer_norm/ln_api.cpp``, ``csrc/layer_norm_cuda.cpp``. Values are synthesized, not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prism_plugins.errors import PrismError
from prism_plugins.integration.kernels import (
    empty,
    empty_like,
    record,
    record_adam,
    record_scale,
    record_sgd,
    synthesized,
    zeros,
)

LONGEST_ROW = 16384
"""Keys that the fused softmax kernels take (``TORCH_INTERNAL_ASSERT(key_seq_len <= 16384)``)."""
_PARTIAL_SUMS = 320
"""Of a norm over lists (``csrc/multi_tensor_l2norm_kernel.cu``)."""
_WEIGHT_PARTS = 16
"""Partial weight gradients of a layer norm (``part_size`` in ``csrc/layer_norm_cuda_kernel.cu``)."""


# ── softmax ──────────────────────────────────────────────────────────────────────────────────────────────────


def fill_causal_softmax(module: ModuleType) -> None:
    """``scaled_upper_triang_masked_softmax_cuda``: scores of shape (batch x heads, queries, keys); backward in place."""
    module.forward = lambda scores, scale: _softmax("scaled_upper_triang_masked_softmax", [scores])
    module.backward = lambda grads, probabilities, scale: _softmax_backward(
        "scaled_upper_triang_masked_softmax", grads, probabilities, in_place=True
    )


def fill_masked_softmax(module: ModuleType) -> None:
    """``scaled_masked_softmax_cuda``: scores of shape (batch, heads, queries, keys) and a mask."""
    module.forward = lambda scores, mask, scale: _softmax("scaled_masked_softmax", [scores, mask])
    module.backward = lambda grads, probabilities, scale: _softmax_backward(
        "scaled_masked_softmax", grads, probabilities
    )
    module.get_batch_per_block = _batch_per_block


def fill_softmax(module: ModuleType) -> None:
    """``scaled_softmax_cuda``: no mask."""
    module.forward = lambda scores, scale: _softmax("scaled_softmax", [scores])
    module.backward = lambda grads, probabilities, scale: _softmax_backward(
        "scaled_softmax", grads, probabilities
    )


def _softmax(name: str, operands: Sequence[Tensor]) -> Tensor:
    scores = operands[0].contiguous()
    if scores.shape[-1] > LONGEST_ROW:
        raise RuntimeError(f"{name}: {scores.shape[-1]} keys; the kernel takes {LONGEST_ROW}")
    out = empty_like(scores)
    record(f"apex::{name}_forward", [scores, *operands[1:]], [out])
    return out


def _softmax_backward(name: str, grads: Tensor, probabilities: Tensor, *, in_place: bool = False) -> Tensor:
    grads, probabilities = grads.contiguous(), probabilities.contiguous()
    out = grads if in_place else empty_like(grads)
    record(f"apex::{name}_backward", [grads, probabilities], [out])
    return synthesized(out)


def _batch_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """Rows a thread block works on: ``get_batch_per_block`` of ``csrc/megatron/scaled_masked_softmax.h``."""
    elements = 1 << max(0, keys - 1).bit_length()
    warp = min(elements, 32)
    return 128 // warp * (2 if elements <= 128 else 1)


# ── lists of tensors ─────────────────────────────────────────────────────────────────────────────────────────


def fill_multi_tensor(module: ModuleType) -> None:
    """``amp_C``: norms, scaling, optimizers over lists of tensors. Other names raise when they are called."""
    module.multi_tensor_l2norm = _l2norm
    module.multi_tensor_scale = _scale
    module.multi_tensor_adam = _adam
    module.multi_tensor_sgd = _sgd
    module.__getattr__ = _missing


def _missing(name: str) -> Any:
    if not name.startswith("multi_tensor_"):
        raise AttributeError(f"module 'amp_C' has no attribute {name!r}")

    def call(*args: Any) -> None:
        raise PrismError(f"Apex calls {name}, which prism does not emulate: train without it")

    return call


def _l2norm(
    chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    (tensors,) = lists
    partial = zeros([_PARTIAL_SUMS], torch.float32)
    if per_tensor:
        chunks = max(-(-t.numel() // chunk_size) for t in tensors)
        parts = zeros([len(tensors) * chunks], torch.float32)
    else:
        parts = empty([0], torch.float32)
    each = empty([len(tensors) if per_tensor else 0], torch.float32)
    record("apex::multi_tensor_l2norm", tensors)
    total = empty([1], torch.float32)
    del partial, parts
    return total, each


def _scale(chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    record_scale("apex::multi_tensor_scale", lists)


def _adam(chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *settings: Any) -> None:
    record_adam("apex::multi_tensor_adam", lists)


def _sgd(chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *settings: Any) -> None:
    record_sgd("apex::multi_tensor_sgd", lists)


# ── layer norm ───────────────────────────────────────────────────────────────────────────────────────────────


def fill_fast_layer_norm(module: ModuleType) -> None:
    """``fast_layer_norm``: rows of a matrix."""

    def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> list[Tensor]:
        out = empty(x.shape, gamma.dtype)
        return [out, *_norm_forward(x, gamma, beta, out)]

    def ln_bwd(
        dz: Tensor,
        x_or_z: Tensor,
        mu: Tensor | None,
        rsigma: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        memory_efficient: bool,
    ) -> list[Tensor]:
        dx, dgamma, dbeta = empty_like(x_or_z), empty_like(gamma), empty_like(gamma)
        sms = torch.cuda.get_device_properties(dz.device).multi_processor_count
        parts = [empty([sms, gamma.numel()], torch.float32) for _ in range(2)]
        saved = [t for t in (mu, rsigma, gamma, beta) if t is not None]
        record("apex::layer_norm_bwd", [dz, x_or_z, *saved], [dx, dgamma, dbeta])
        return [dx, dgamma, dbeta, *parts]

    module.ln_fwd, module.ln_bwd = ln_fwd, ln_bwd


def fill_layer_norm(module: ModuleType) -> None:
    """``fused_layer_norm_cuda``, its affine layer norm."""

    def forward_affine(
        x: Tensor, shape: Sequence[int], gamma: Tensor, beta: Tensor, epsilon: float
    ) -> list[Tensor]:
        out = empty_like(x)
        return [out, *_norm_forward(x, gamma, beta, out)]

    def backward_affine(
        dz: Tensor,
        mean: Tensor | None,
        invvar: Tensor,
        x_or_z: Tensor,
        shape: Sequence[int],
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> list[Tensor]:
        dx, dgamma, dbeta = empty_like(x_or_z), empty_like(gamma), empty_like(beta)
        parts = [empty([_WEIGHT_PARTS, gamma.numel()], torch.float32) for _ in range(2)]
        saved = [t for t in (mean, invvar, gamma) if t is not None]
        record("apex::layer_norm_bwd", [dz, x_or_z, *saved], [dx, dgamma, dbeta])
        del parts
        return [dx, dgamma, dbeta]

    module.forward_affine, module.backward_affine = forward_affine, backward_affine


def _norm_forward(x: Tensor, gamma: Tensor, beta: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // gamma.numel()
    mean, rsigma = empty([rows], torch.float32), empty([rows], torch.float32)
    record("apex::layer_norm_fwd", [x, gamma, beta], [out, mean, rsigma])
    return mean, rsigma
