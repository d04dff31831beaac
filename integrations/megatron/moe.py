"""Expert routing as ``--prism-moe-load`` says, and what mixture-of-experts layers need without Transformer Engine.

Which expert a token goes to is decided by values that a virtual device does not have, so the routing map is written
by :mod:`prism_plugins.moe_load`. The probabilities stay as Megatron computes them.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np

from prism_plugins.integrations.megatron.session import Session
from prism_plugins.moe_load import BALANCED, describe_moe_load, expert_choice, expert_counts
from prism_plugins.program.kinds import MAX_SLICED_IF_ALL
from prism_plugins.world.layout import Layout

UNSLICED_EXPERTS = (
    "experts are unevenly loaded, and not every expert-parallel rank is sliced: those that are not are taken to work "
    "on as many tokens as a sliced one (--prism-ranks slices them)"
)
NO_TE_GEMM = (
    "moe_utils.te_general_gemm, undefined without Transformer Engine in megatron-core 0.16, is taken as None"
)
SINKHORN = "sinkhorn routing repeats its normalization as often as it does for normally distributed logits"
DROPPED = (
    "experts beyond their capacity drop the tokens that come last, not those with the smallest probabilities"
)


@functools.lru_cache(maxsize=16)
def _routing_map(load: str, num_tokens: int, num_experts: int, topk: int) -> Any:
    """The routing map of the policy on the CPU, bool, shape (num_tokens, num_experts)."""
    import torch

    choice = torch.tensor(expert_choice(load, num_tokens, num_experts, topk))
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, choice, True)


@functools.lru_cache(maxsize=16)
def _map_within_capacity(
    load: str, num_tokens: int, num_experts: int, topk: int, capacity: int, *, padded: bool
) -> Any:
    """The policy's routing map after every expert kept its first ``capacity`` tokens, on the CPU, bool, shape
    (num_tokens, num_experts). ``padded``: an expert that has fewer takes the first tokens that were not its own."""
    wanted = _routing_map(load, num_tokens, num_experts, topk)
    kept = wanted & (wanted.cumsum(0) <= capacity)
    if padded:
        kept |= ~wanted & ((~wanted).cumsum(0) <= capacity - kept.sum(0))
    return kept


class _Rounds:
    """A tolerance that ``error > tolerance`` compares with; ``of`` rounds exceed it, or those that really do."""

    def __init__(self, tolerance: float, of: int | None = None) -> None:
        self.tolerance, self.of, self.count = tolerance, of, 0

    def __lt__(self, error: Any) -> bool:
        exceeds = bool(error > self.tolerance)  # Reads the error from the device, as the comparison would.
        exceeds = exceeds if self.of is None else self.count < self.of
        self.count += exceeds
        return exceeds


def sinkhorn_rounds(original: Any, num_tokens: int, num_experts: int, tolerance: float) -> int:
    """Rounds that Megatron's ``sinkhorn`` takes for logits of the standard normal distribution."""
    import torch

    rounds = _Rounds(tolerance)
    generator = torch.Generator("cpu").manual_seed(1)
    original(torch.randn(num_tokens, num_experts, generator=generator, device="cpu"), rounds)
    return rounds.count


def expert_kinds(
    session: Session, layout: Layout, config: Any
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """``JobFacts.shard_kinds`` and ``kind_of`` where ranks that hold other experts work on other numbers of tokens: a
    kind for each expert-parallel rank, its size the load of its experts. Empty where all are loaded alike.
    """
    load = session.context.spec.moe_load
    if load == BALANCED or layout.ep == 1 or not getattr(config, "num_moe_experts", None):
        return (), ()
    if layout.ep > MAX_SLICED_IF_ALL or layout.etp != layout.tp:
        session.context.assume(UNSLICED_EXPERTS)
        return (), ()
    counts = expert_counts(load, 1_000_000, config.num_moe_experts, config.moe_router_topk)
    kinds = tuple((int(part.sum()),) for part in np.split(counts, layout.ep))
    axes = list(reversed(layout.sizes()))
    grid = np.moveaxis(layout.grid(), (axes.index("pp"), axes.index("tp")), (0, 1))
    members = np.sort(grid[0, 0].ravel()).tolist()
    return kinds, tuple(layout.coords(rank, expert=True)["ep"] for rank in members)


def _route(session: Session, routing_map: Any, topk: int) -> Any:
    """``routing_map`` (bool, shape (num_tokens, num_experts)) with the policy's contents, in the same memory."""
    from prism_plugins.device.real_values import write_values

    load = session.context.spec.moe_load
    session.context.assume(describe_moe_load(load, routing_map.shape[1]))
    return write_values(routing_map, _routing_map(load, *routing_map.shape, topk))


def _real_values_up_to(session: Session, nbytes: int) -> Any:
    from prism_plugins.device.real_values import real_values_up_to

    return real_values_up_to(session.context.spec.device, nbytes)


def map_bytes(num_tokens: int, num_experts: int, topk: int) -> int:
    """Size of the largest tensor that tells which token goes where: the map, or the sorted token indices (int64)."""
    return num_tokens * max(num_experts, 8 * topk)


def _topk_routing(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def topk_routing_with_score_function(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        with _real_values_up_to(session, map_bytes(*logits.shape, topk)):
            probs, routing_map = original(logits, topk, *args, **kwargs)
        return probs, _route(session, routing_map, topk)

    return topk_routing_with_score_function


def _aux_loss_routing(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def compute_routing_scores_for_aux_loss(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        with _real_values_up_to(session, map_bytes(*logits.shape, topk)):
            routing_map, scores = original(logits, topk, *args, **kwargs)
        return _route(session, routing_map, topk), scores

    return compute_routing_scores_for_aux_loss


def _sinkhorn(session: Session, original: Any, module: ModuleType) -> Any:
    """It normalizes until its result changes no more, which a virtual device cannot tell."""
    rounds_of = functools.lru_cache(maxsize=16)(functools.partial(sinkhorn_rounds, original))

    @functools.wraps(original)
    def sinkhorn(cost: Any, tol: float = 1e-4) -> Any:
        session.context.assume(SINKHORN)
        return original(cost, _Rounds(tol, of=rounds_of(*cost.shape, tol)))

    return sinkhorn


def _sinkhorn_routing(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def sinkhorn_load_balancing(self: Any, logits: Any) -> Any:
        with _real_values_up_to(session, map_bytes(*logits.shape, self.topk)):
            scores, routing_map = original(self, logits)
        return scores, _route(session, routing_map, self.topk)

    return sinkhorn_load_balancing


def _drop(session: Session, original: Any, module: ModuleType) -> Any:
    """Which tokens exceed an expert's capacity follows from the routing map; the original goes by probabilities."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply_router_token_dropping(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        topk, padded = given.arguments["router_topk"], given.arguments["pad_to_capacity"]
        num_tokens, num_experts = given.arguments["routing_map"].shape
        capacity = module.get_capacity(
            num_tokens=num_tokens * topk,
            num_experts=num_experts,
            capacity_factor=given.arguments["capacity_factor"],
        )
        with _real_values_up_to(session, map_bytes(num_tokens, num_experts, topk)):
            probs, routing_map = original(*args, **kwargs)
        from prism_plugins.device.real_values import write_values

        session.context.assume(DROPPED)
        load = session.context.spec.moe_load
        return probs, write_values(
            routing_map,
            _map_within_capacity(load, num_tokens, num_experts, topk, capacity, padded=padded),
        )

    return apply_router_token_dropping


def _padded_map(session: Session, original: Any, module: ModuleType) -> Any:
    """How many tokens an expert lacks to a multiple is computed from the map, in int64 running sums."""

    @functools.wraps(original)
    def pad_routing_map(routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        with _real_values_up_to(session, 8 * routing_map.numel()):
            return original(routing_map, *args, **kwargs)

    return pad_routing_map


def _permute(session: Session, original: Any, module: ModuleType) -> Any:
    """Sizes of what is permuted follow from the map, which may be larger than what has real memory by default."""

    @functools.wraps(original)
    def permute(tokens: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        num_tokens, num_experts = routing_map.shape
        # At most every token goes to every local expert.
        with _real_values_up_to(session, map_bytes(num_tokens, num_experts, num_experts)):
            return original(tokens, routing_map, *args, **kwargs)

    return permute


def _gathered_map(session: Session, original: Any, module: ModuleType) -> Any:
    """The dispatcher that gathers the tokens of all tensor- and expert-parallel ranks gathers their maps too."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        num_tokens, num_experts = self.routing_map.shape
        members = self.tp_size * self.ep_size
        with _real_values_up_to(
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
_ROUTER = "megatron.core.transformer.moe.router"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"

HOOKS = (
    (_MODULE, "topk_routing_with_score_function", _topk_routing, "routing by --prism-moe-load"),
    (_MODULE, "compute_routing_scores_for_aux_loss", _aux_loss_routing, "routing by --prism-moe-load"),
    (_ROUTER, "TopKRouter.sinkhorn_load_balancing", _sinkhorn_routing, "routing by --prism-moe-load"),
    (_MODULE, "sinkhorn", _sinkhorn, "rounds that follow from values"),
    (_MODULE, "apply_router_token_dropping", _drop, "dropping by --prism-moe-load"),
    (_MODULE, "pad_routing_map", _padded_map, "sizes that follow from the routing map"),
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
