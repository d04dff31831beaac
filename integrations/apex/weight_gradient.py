"""Apex's weight gradient kernel, which Megatron's output layer uses by default, beside Transformer Engine too.

Source: apex csrc/megatron/fused_weight_gradient_dense.cpp: ``main_grad += grad_output.t() @ input`` in one GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from prism_plugins.integration.kernels import dtype_name, matrix, record, synthesized


def fill_weight_gradient(module: ModuleType, on_use: Callable[[], None] = lambda: None) -> None:
    """``fused_weight_gradient_mlp_cuda``, the functions that Megatron calls; ``on_use`` is called at each."""

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        on_use()
        _accumulate(total_input, grad_output, main_grad)

    module.wgrad_gemm_accum_fp32 = accumulate
    module.wgrad_gemm_accum_fp16 = accumulate


def _accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    rows, columns = main_grad.shape
    tokens = total_input.numel() // columns
    operands = [
        matrix(rows, tokens, dtype_name(grad_output.dtype), transposed=True),
        matrix(tokens, columns, dtype_name(total_input.dtype)),
    ]
    record("apex::wgrad_gemm_accum", operands, [main_grad], layout="NT", accumulate=True)
    synthesized(main_grad)
