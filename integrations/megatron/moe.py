"""Balanced expert routing, and what mixture-of-experts layers need without Transformer Engine.

Which expert a token goes to is decided by values that a virtual device does not have. Under
``SliceSpec.moe_load == "balanced"`` token t of a rank goes to experts ``(t * topk + j) % num_experts``: every
expert gets the same number of tokens, to one. The probabilities stay as Megatron computes them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
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


@contextlib.contextmanager
def real_values_up_to(session: Session, nbytes: int) -> Iterator[None]:
    """Give real memory to device tensors of up to ``nbytes`` that are allocated inside."""
    from prism_plugins.device.load import REAL_LIMIT_BYTES, set_real_limit

    if session.context.spec.device != "virtual" or nbytes <= REAL_LIMIT_BYTES:
        yield
        return
    previous = set_real_limit(nbytes)
    try:
        yield
    finally:
        set_real_limit(previous)


def balance(routing_map: Any, topk: int) -> Any:
    """``routing_map`` (bool, shape (num_tokens, num_experts)) with the balanced contents, in the same memory."""
    from prism_plugins.device.tensors import host_view, mark_real

    values = balanced_map(routing_map.shape[0], routing_map.shape[1], topk)
    host_view(routing_map).copy_(values)
    mark_real(routing_map)
    return routing_map


def map_bytes(num_tokens: int, num_experts: int, topk: int) -> int:
    """Size of the largest tensor that tells which token goes where: the map, or the sorted token indices (int64)."""
    return num_tokens * max(num_experts, 8 * topk)


def _topk_routing(session: Session, original: Any, module: ModuleType) -> Any:
    if session.context.spec.moe_load != "balanced":
        return original

    @functools.wraps(original)
    def topk_routing_with_score_function(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        session.context.assume(BALANCED)
        with real_values_up_to(session, map_bytes(*logits.shape, topk)):
            probs, routing_map = original(logits, topk, *args, **kwargs)
        return probs, balance(routing_map, topk)

    return topk_routing_with_score_function


def _aux_loss_routing(session: Session, original: Any, module: ModuleType) -> Any:
    if session.context.spec.moe_load != "balanced":
        return original

    @functools.wraps(original)
    def compute_routing_scores_for_aux_loss(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        with real_values_up_to(session, map_bytes(*logits.shape, topk)):
            routing_map, scores = original(logits, topk, *args, **kwargs)
        return balance(routing_map, topk), scores

    return compute_routing_scores_for_aux_loss


def _permute(session: Session, original: Any, module: ModuleType) -> Any:
    """Sizes of what is permuted follow from the map, which may be larger than what has real memory by default."""

    @functools.wraps(original)
    def permute(tokens: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        num_tokens, num_experts = routing_map.shape
        # At most every token goes to every local expert.
        with real_values_up_to(session, map_bytes(num_tokens, num_experts, num_experts)):
            return original(tokens, routing_map, *args, **kwargs)

    return permute


def _gathered_map(session: Session, original: Any, module: ModuleType) -> Any:
    """The dispatcher that gathers the tokens of all tensor- and expert-parallel ranks gathers their maps too."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        num_tokens, num_experts = self.routing_map.shape
        members = self.tp_size * self.ep_size
        with real_values_up_to(
            session, map_bytes(num_tokens * members, num_experts, len(self.local_expert_indices))
        ):
            return original(self, *args, **kwargs)

    return method


def _router_gating(session: Session, original: Any, module: ModuleType) -> Any:
    """``router_gating_linear`` reads ``te_general_gemm``, which only an import of Transformer Engine defines."""
    if hasattr(module, "te_general_gemm"):
        return original
    module.te_general_gemm = None

    @functools.wraps(original)
    def router_gating_linear(*args: Any, **kwargs: Any) -> Any:
        session.context.assume(NO_TE_GEMM)
        return original(*args, **kwargs)

    return router_gating_linear


_MODULE = "megatron.core.transformer.moe.moe_utils"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"

HOOKS = (
    (_MODULE, "topk_routing_with_score_function", _topk_routing, "balanced routing"),
    (_MODULE, "compute_routing_scores_for_aux_loss", _aux_loss_routing, "balanced routing"),
    (_MODULE, "permute", _permute, "sizes that follow from the routing map"),
    *(
        (
            _DISPATCHER,
            f"MoEAllGatherTokenDispatcher.{name}",
            _gathered_map,
            "sizes that follow from the routing map",
        )
        for name in ("token_dispatch", "dispatch_postprocess")
    ),
    (_MODULE, "router_gating_linear", _router_gating, "te_general_gemm undefined without Transformer Engine"),
)
"""(module, attribute, wrapper, why)."""
