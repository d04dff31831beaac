"""Activations, dropout and the softmax kernels of unfused attention.

Source: transformer_engine/pytorch/csrc/extensions/activation.cpp, bias.cpp, dropout.cpp, softmax.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from prism_plugins.integration.kernels import empty, empty_like, record, synthesized
from prism_plugins.integrations.transformer_engine.calls import Call, assume, implements
from prism_plugins.integrations.transformer_engine.quantize import (
    CURRENT,
    DELAYED,
    MXFP8,
    create,
    is_fused_with,
    kind,
    quantized_specs,
    run,
)

_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "glu")
_GRADIENTS = {f"d{name}" for name in (*_PLAIN, *_GATED)} - {"dclamped_swiglu"} | {"clamped_dswiglu"}


@implements(*_PLAIN, *_GATED)
def _activation(call: Call) -> Any:
    x = call.input.contiguous()
    shape = [*x.shape[:-1], x.shape[-1] // (2 if call.name in _GATED else 1)]
    return _through(call, [x], shape, x.dtype)


@implements(*sorted(_GRADIENTS))
def _activation_grad(call: Call) -> Any:
    x = call.fwd_input.contiguous()
    return _through(call, [call.grad.contiguous(), x], list(x.shape), x.dtype)


def _through(call: Call, inputs: list[torch.Tensor], shape: list[int], dtype: torch.dtype) -> Any:
    """The activation, and the quantization of its result where it does not do that itself."""
    quantizer = call.quantizer
    out = create(quantizer, shape, dtype)
    if is_fused_with(quantizer, mxfp8=True):
        written = [out] if quantizer is None else quantized_specs(quantizer, shape)
        record(f"te::{call.name}", inputs, written)
        return out
    result = empty(shape, dtype)
    record(f"te::{call.name}", inputs, [result])
    run(quantizer, shape, dtype, compute_amax=kind(quantizer) != CURRENT)
    return out


@implements(*(f"dbias_d{name}" for name in _PLAIN))
def _bias_and_activation_grad(call: Call) -> list[Any]:
    grad, x, quantizer = call.grad.contiguous(), call.fwd_input.contiguous(), call.quantizer
    out = create(quantizer, x.shape, grad.dtype)
    bias_grad = empty([x.shape[-1]], grad.dtype)
    if kind(quantizer) in (DELAYED, MXFP8):
        record(f"te::{call.name}", [grad, x], [*quantized_specs(quantizer, x.shape), bias_grad])
        return [bias_grad, out]
    result = out if quantizer is None else empty(x.shape, grad.dtype)
    record(f"te::{call.name.removeprefix('dbias_')}", [grad, x], [result])
    record("te::bias_grad", [result], [bias_grad])
    if quantizer is not None:
        run(quantizer, x.shape, grad.dtype, compute_amax=kind(quantizer) != CURRENT)
    return [bias_grad, out]


@implements("dropout_fwd")
def _dropout_fwd(call: Call) -> list[torch.Tensor]:
    out = call.out if call.out is not None else empty_like(call.input)
    mask = empty([call.input.numel() // 8], torch.uint8)
    record("te::dropout_fwd", [call.input], [out, mask])
    return [out, mask]


@implements("dropout_bwd")
def _dropout_bwd(call: Call) -> torch.Tensor:
    grad = call.grad_input if call.grad_input is not None else empty_like(call.grad_output)
    record("te::dropout_bwd", [call.grad_output, call.mask], [grad])
    return grad


_SOFTMAX = ("softmax", "masked_softmax", "upper_triang_masked_softmax", "aligned_causal_masked_softmax")


@implements(*(f"scaled_{name}_forward" for name in _SOFTMAX))
def _softmax_forward(call: Call) -> torch.Tensor:
    assume(
        "attention runs unfused (two batched GEMMs and a softmax): as asked for, or no fused kernel takes it"
    )
    scores = call.first().contiguous()
    out = empty_like(scores)
    record(f"te::{call.name}", [scores] if call.mask is None else [scores, call.mask], [out])
    return out


@implements(*(f"scaled_{name}_backward" for name in _SOFTMAX))
def _softmax_backward(call: Call) -> torch.Tensor:
    """In place: the gradient of the scores overwrites that of the probabilities."""
    given = list(vars(call).values())[1:3]
    grad, probabilities = (tensor.contiguous() for tensor in given)
    record(f"te::{call.name}", [grad, probabilities], [grad])
    return synthesized(grad)
