"""LayerNorm and RMSNorm, quantizing their output where the layer that follows wants FP8.

Source: transformer_engine/pytorch/csrc/extensions/normalization.cpp; workspaces as TE's own kernels ask for them
(common/normalization: partial sums of the weight gradients in float32, one row for each SM).
"""

from __future__ import annotations

from typing import Any

import torch

from prism_plugins.integration.kernels import empty, empty_like, product, record
from prism_plugins.integrations.transformer_engine.calls import Call, implements
from prism_plugins.integrations.transformer_engine.dtypes import torch_dtype
from prism_plugins.integrations.transformer_engine.quantize import (
    CURRENT,
    create,
    is_fused_with,
    kind,
    quantized_specs,
    run,
)


@implements("layernorm_fwd", "rmsnorm_fwd")
def _norm_fwd(call: Call) -> list[Any]:
    x, quantizer = call.input, call.quantizer
    rows = product(x.shape[:-1])
    dtype = torch_dtype(call.otype if call.otype is not None else call.out_dtype)
    mean = empty([rows], torch.float32) if call.name == "layernorm_fwd" else None
    rsigma = empty([rows], torch.float32)
    out = call.ln_out if call.ln_out is not None else call.out
    if out is None:
        out = create(quantizer, x.shape, dtype)
    fused = is_fused_with(quantizer)
    result = out if fused else empty(x.shape, dtype)
    saved = [rsigma] if mean is None else [mean, rsigma]
    inputs = [x, call.weight] if call.bias is None else [x, call.weight, call.bias]
    written = quantized_specs(quantizer, x.shape) if fused and quantizer is not None else [result]
    record(f"te::{call.name}", inputs, [*written, *saved])
    if not fused:
        run(quantizer, x.shape, dtype, compute_amax=kind(quantizer) != CURRENT)
    return [out, mean, rsigma]


@implements("layernorm_bwd")
def _layernorm_bwd(call: Call) -> list[torch.Tensor]:
    dx, dgamma, dbeta = empty_like(call.x), empty_like(call.gamma), empty_like(call.gamma)
    workspace = _weight_partials(call.gamma, 2)
    record("te::layernorm_bwd", [call.dz, call.x, call.mu, call.rsigma, call.gamma], [dx, dgamma, dbeta])
    del workspace
    return [dx, dgamma, dbeta]


@implements("rmsnorm_bwd", "rmsnorm_bwd_add")
def _rmsnorm_bwd(call: Call) -> list[torch.Tensor]:
    dx, dgamma = empty_like(call.x), empty_like(call.gamma)
    workspace = _weight_partials(call.gamma, 1)
    added = [call.add] if call.add is not None else []
    record(f"te::{call.name}", [call.dz, call.x, call.rsigma, call.gamma, *added], [dx, dgamma])
    del workspace
    return [dx, dgamma]


def _weight_partials(gamma: torch.Tensor, count: int) -> torch.Tensor:
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return empty([count, sms, gamma.numel()], torch.float32)
