"""Fused routing of experts, and padding of their token blocks.

Source: transformer_engine/pytorch/csrc/extensions/router.cpp, padding.cpp. Which expert a token goes to is written into
the routing map by the Megatron integration (``--prism-moe-load``).
"""

from __future__ import annotations

from typing import Any

import torch

from prism_plugins.integration.kernels import empty, record
from prism_plugins.integrations.transformer_engine.calls import Call, implements


@implements("fused_topk_with_score_function_fwd")
def _topk_fwd(call: Call) -> tuple[torch.Tensor, ...]:
    logits = call.logits
    probs = empty(logits.shape, logits.dtype)
    return _routed(call, probs)


@implements("fused_score_for_moe_aux_loss_fwd")
def _score_fwd(call: Call) -> tuple[torch.Tensor, ...]:
    return _routed(call, empty(call.logits.shape, torch.float32))


def _routed(call: Call, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    routing_map = empty(call.logits.shape, torch.bool)
    intermediate = empty(call.logits.shape, torch.float32)
    record(f"te::{call.name}", [call.logits], [probs, routing_map, intermediate], topk=int(call.topk))
    return probs, routing_map, intermediate


@implements("fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_bwd")
def _router_bwd(call: Call) -> torch.Tensor | None:
    """Up to 2.12 the gradient is returned, from 2.13 on it is written where the caller says."""
    intermediate = call.intermediate_output
    grad_in: Any = call.grad_probs if call.grad_probs is not None else call.grad_scores
    grad = call.grad_logits
    result = grad if grad is not None else empty(intermediate.shape, grad_in.dtype)
    record(f"te::{call.name}", [grad_in, intermediate], [result])
    return None if grad is not None else result


@implements("fused_moe_aux_loss_fwd")
def _aux_loss_fwd(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    loss, constant = empty([], call.probs.dtype), empty([], torch.float32)
    record("te::fused_moe_aux_loss_fwd", [call.probs, call.tokens_per_expert], [loss, constant])
    return loss, constant


@implements("fused_moe_aux_loss_bwd")
def _aux_loss_bwd(call: Call) -> torch.Tensor:
    grad = empty([call.num_rows, call.num_cols], call.grad_aux_loss.dtype)
    record("te::fused_moe_aux_loss_bwd", [call.tokens_per_expert, call.grad_aux_loss], [grad])
    return grad


@implements("fused_multi_row_padding", "fused_multi_row_unpadding")
def _padding(call: Call) -> None:
    record(f"te::{call.name}", [call.input], [call.output])
