"""Fused rotary embeddings. Source: transformer_engine/pytorch/csrc/extensions/apply_rope.cpp."""

from __future__ import annotations

import torch

from prism_plugins.integration.kernels import empty, empty_like, record
from prism_plugins.integrations.transformer_engine.calls import Call, implements


@implements("fused_rope_forward", "fused_rope_backward")
def _rope(call: Call) -> torch.Tensor:
    x = call.first()
    out = empty_like(x)
    record(f"te::{call.name}", [x, call.freqs], [out])
    return out


@implements("fused_qkv_rope_forward")
def _qkv_rope_forward(call: Call) -> tuple[torch.Tensor, ...]:
    qkv, widths = call.first(), list(call.qkv_split_arg_list)
    leading, groups = list(qkv.shape[:2]), qkv.shape[2]
    query = empty([*leading, groups * widths[0] // widths[1], widths[1]], qkv.dtype)
    key = empty([*leading, groups, widths[1]], qkv.dtype)
    value = empty([*leading, groups, widths[2]], qkv.dtype)
    record("te::fused_qkv_rope_forward", [qkv, call.q_freqs, call.k_freqs], [query, key, value])
    return query, key, value


@implements("fused_qkv_rope_backward")
def _qkv_rope_backward(call: Call) -> torch.Tensor:
    grads = list(vars(call).values())[1:4]
    total = sum(call.qkv_split_arg_list)
    heads = sum(grad.shape[2] for grad in grads) * grads[0].shape[3] // total
    out = empty([*grads[0].shape[:2], heads, total], grads[0].dtype)
    record("te::fused_qkv_rope_backward", [*grads, call.q_freqs, call.k_freqs], [out])
    return out
