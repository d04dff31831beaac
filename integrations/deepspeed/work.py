"""What an iteration gets done: tokens, and model FLOPs by the usual estimate.

A token costs 2 FLOPs a parameter in the forward pass and 4 in the backward pass (2 where the parameter is not trained),
recomputation not counted; attention's part that grows with the sequence is left out (Kaplan et al. 2020, section 2.1).
Parameters are those a token meets: of experts the ``topk`` it goes to, of embeddings none unless they are the output
layer as well.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from prism_plugins.integrations.deepspeed.routed_blocks import find_blocks
from prism_plugins.world.layout import Layout

_TOPK_NAMES = ("top_k", "topk", "num_experts_per_tok", "num_selected_experts")


def tokens_of_batch(inputs: Any) -> int:
    """Tokens of a micro-batch, from what the model is called with: elements of ``input_ids``, else of the first tensor
    of integers; 0 if there is none."""
    named = [value for name, value in _leaves(inputs) if name == "input_ids"]
    others = [value for _, value in _leaves(inputs)]
    return next((n for n in map(_numel_of_integers, [*named, *others]) if n), 0)


def tokens_of_iteration(layout: Layout, microbatch_tokens: int) -> int:
    """Tokens of the whole job. With sequence parallelism every rank is given its own part of a sequence."""
    return microbatch_tokens * layout.num_microbatches * layout.dp * layout.cp


def flops_per_token(model: Any, *, tp: int = 1) -> float:
    """Model FLOPs a token costs in forward and backward pass, all ranks that share the token together; 0: unknown.

    ``model`` is this rank's part of the model or of its pipeline stage; ZeRO-3's shards count as a whole.
    """
    met: dict[int, tuple[Any, float]] = {}
    try:
        shares = dict(_expert_shares(model))
    except LookupError:
        return 0.0
    for module in model.modules():
        if not _is_embedding(module):
            for param in module.parameters(recurse=False):
                met[id(param)] = param, shares.get(id(param), 1.0)
    met |= {id(param): (param, 1.0) for param in _tied_outputs(model)}
    return sum((6 if param.requires_grad else 4) * share * _numel(param, tp) for param, share in met.values())


def _tied_outputs(model: Any) -> Iterator[Any]:
    """Tied weights of a pipeline stage that are used by a function of their own: an embedding as output layer."""
    functions = [f for f in getattr(model, "forward_funcs", ()) if isinstance(f, functools.partial)]
    for key, module in getattr(model, "tied_modules", {}).items():
        if any(module in function.args for function in functions):
            for name in model.tied_weight_attrs[key]:
                yield operator.attrgetter(name)(module)


def _expert_shares(model: Any) -> Iterator[tuple[int, float]]:
    """(id of a parameter of an expert, share of the rank's experts of that layer a token meets). DeepSpeed's layers
    hold a part of the experts on each rank; a token meets ``topk`` wherever they are.

    Raises:
        LookupError: how many experts a token meets is unknown.
    """
    from deepspeed.moe.sharded_moe import MOELayer

    for module in model.modules():
        if isinstance(module, MOELayer):
            for param in module.experts.parameters():
                yield id(param), module.gate.k / module.num_local_experts
    config = getattr(model, "config", None)
    for _, block, num_experts in find_blocks(model):
        topk = _topk(block, config)
        for param in block.experts.parameters():
            yield id(param), topk / num_experts


def _topk(block: Any, config: Any) -> int:
    for holder in (block, getattr(block, "gate", None), getattr(block, "router", None), config):
        for name in _TOPK_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    raise LookupError("topk")


def _is_embedding(module: Any) -> bool:
    import torch

    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))


def _numel(param: Any, tp: int) -> int:
    whole = getattr(param, "ds_numel", None)  # ZeRO-3
    numel = param.numel() if whole is None else int(whole)
    return numel * (tp if getattr(param, "tensor_model_parallel", False) else 1)


def _numel_of_integers(value: Any) -> int:
    import torch

    integers = (torch.int64, torch.int32)
    return value.numel() if isinstance(value, torch.Tensor) and value.dtype in integers else 0


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What nested containers hold, with the key it is under (empty in sequences)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield name, value
