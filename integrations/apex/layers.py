"""Apex's layer norm functions, for where its Python is not installed: the same tensors saved, the same calls below.

Sources: ``apex/contrib/layer_norm/layer_norm.py``, ``apex/normalization/fused_layer_norm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def fill_fast(module: ModuleType) -> None:
    """``apex.contrib.layer_norm.layer_norm``."""
    import fast_layer_norm

    class FastLayerNormFN(torch.autograd.Function):
        """Persistent layer norm over the last dimension."""

        @staticmethod
        def forward(
            ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
        ) -> Tensor:
            """``x`` of any shape (..., hidden) to the same."""
            ctx.x_shape, ctx.memory_efficient = x.shape, memory_efficient
            gamma, beta = gamma.contiguous(), beta.contiguous()
            rows = x.contiguous().view((-1, gamma.numel()))
            out, mean, rsigma = fast_layer_norm.ln_fwd(rows, gamma, beta, epsilon)
            if memory_efficient:
                ctx.save_for_backward(out, gamma, None, rsigma, beta)
            else:
                ctx.save_for_backward(rows, gamma, mean, rsigma, None)
            return out.view(x.shape)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple:
            """Gradients of input, gamma and beta."""
            rows, gamma, mean, rsigma, beta = ctx.saved_tensors
            grad = grads[0].contiguous().view(rows.shape)
            dx, dgamma, dbeta, *_ = fast_layer_norm.ln_bwd(
                grad, rows, mean, rsigma, gamma, beta, ctx.memory_efficient
            )
            return dx.view(ctx.x_shape), dgamma, dbeta, None, None

    module.FastLayerNormFN = FastLayerNormFN


def fill_fused(module: ModuleType) -> None:
    """``apex.normalization.fused_layer_norm``."""
    import fused_layer_norm_cuda

    class FusedLayerNormAffineFunction(torch.autograd.Function):
        """Layer norm over the last dimensions, with weight and bias."""

        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            weight: Tensor,
            bias: Tensor,
            normalized_shape: Sequence[int],
            eps: float,
            memory_efficient: bool = False,
        ) -> Tensor:
            """``x`` to the same shape."""
            ctx.settings = (normalized_shape, eps, memory_efficient)
            x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
            out, mean, invvar = fused_layer_norm_cuda.forward_affine(x, normalized_shape, weight, bias, eps)
            saved = (out, weight, bias, None, invvar) if memory_efficient else (x, weight, bias, mean, invvar)
            ctx.save_for_backward(*saved)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple:
            """Gradients of input, weight and bias."""
            rows, weight, bias, mean, invvar = ctx.saved_tensors
            shape, eps, memory_efficient = ctx.settings
            found = fused_layer_norm_cuda.backward_affine(
                grads[0].contiguous(), mean, invvar, rows, shape, weight, bias, eps, memory_efficient
            )
            return (*found, None, None, None)

    module.FusedLayerNormAffineFunction = FusedLayerNormAffineFunction
