"""Balanced expert routing, and what mixture-of-experts layers need without Transformer Engine.

Which expert a token goes to is decided by values that a virtual device does not have. Under
``SliceSpec.moe_load == "balanced"`` token t of a rank goes to experts ``(t * topk + j) % num_experts``: every
expert gets the same number of tokens, to one. The probabilities stay as Megatron computes them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.integrations.megatron.session import Session

BALANCED = "experts are equally loaded (token t goes to experts t*topk .. t*topk+topk-1, modulo their number)"
NO_TE_GEMM = (
    "moe_utils.te_general_gemm, undefined without Transformer Engine in megatron-core 0.16, is taken as None"
)


@functools.lru_cache(maxsize=16)
def balanced_map(num_tokens: int, num_experts: int, topk: int) -> Any:
    """The balanced routing map on the CPU, bool, shape (num_tokens, num_experts)."""
    import torch

    first = torch.arange(num_tokens).unsqueeze(1) * topk
    experts = (first + torch.arange(topk)) % num_experts
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, experts, True)


def balance(routing_map: Any, topk: int) -> Any:
    """``routing_map`` (bool, shape (num_tokens, num_experts)) with the balanced contents."""
    from prism_plugins.device.tensors import is_virtual, realize

    values = balanced_map(routing_map.shape[0], routing_map.shape[1], topk)
    if not is_virtual(routing_map):
        return values.to(routing_map.dtype)
    realize(routing_map, values.to(routing_map.dtype))
    return routing_map


def _topk_routing(session: Session, original: Any, module: ModuleType) -> Any:
    if session.context.spec.moe_load != "balanced":
        return original

    @functools.wraps(original)
    def topk_routing_with_score_function(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        session.context.assume(BALANCED)
        probs, routing_map = original(logits, topk, *args, **kwargs)
        return probs, balance(routing_map, topk)

    return topk_routing_with_score_function


def _aux_loss_routing(session: Session, original: Any, module: ModuleType) -> Any:
    if session.context.spec.moe_load != "balanced":
        return original

    @functools.wraps(original)
    def compute_routing_scores_for_aux_loss(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        routing_map, scores = original(logits, topk, *args, **kwargs)
        return balance(routing_map, topk), scores

    return compute_routing_scores_for_aux_loss


def _router_gating(session: Session, original: Any, module: ModuleType) -> Any:
    """``router_gating_linear`` reads ``te_general_gemm``, which only an import of Transformer Engine defines."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
        session.context.assume(NO_TE_GEMM)
    return original


_MODULE = "megatron.core.transformer.moe.moe_utils"

HOOKS = (
    (_MODULE, "topk_routing_with_score_function", _topk_routing, "balanced routing"),
    (_MODULE, "compute_routing_scores_for_aux_loss", _aux_loss_routing, "balanced routing"),
    (_MODULE, "router_gating_linear", _router_gating, "te_general_gemm undefined without Transformer Engine"),
)
"""(module, attribute, wrapper, why)."""
