"""Mixture-of-experts blocks that are the model's own (Hugging Face's, remote code): routed by ``--prism-moe-load``.

A block is a module with a child ``experts``: a ``ModuleList``, or one module that knows its ``num_experts``. While it
runs, the choice of its router (``topk`` or ``argmax`` over the experts) is overwritten, and tensors of integers and
booleans, which tell which token goes where, have real values: what an expert is given has the size the policy says.

Under ZeRO-3 a ``ModuleList`` of experts is gathered expert by expert when they are called. A block that calls only
the experts which got tokens gathers other parameters on each rank, and the job hangs. Whether a block does is tried
out in its first call: one expert is left without tokens there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.moe_load import describe_moe_load, expert_choice
from prism_plugins.program.prediction import Finding


def route_blocks(session: Session, engine: Any) -> None:
    """Have the blocks of an engine's model follow the policy. Call after the engine was made."""
    sharded = bool(engine.zero_optimization_partition_weights())
    tried: set[type] = set()
    for name, block, num_experts in find_blocks(engine.module):
        experts = block.experts if sharded and _gathered_one_by_one(engine.module, name, block) else None
        if experts is not None and type(block) not in tried:
            tried.add(type(block))
            trial = _Trial(session, name, block, num_experts)
        else:
            trial = None
        block.forward = _routed(session, block.forward, name, num_experts, trial)


def find_blocks(model: Any) -> Iterator[tuple[str, Any, int]]:
    """(name, module, number of experts) of each block of the model; DeepSpeed's own layers are none."""
    import torch

    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(module, torch.nn.ModuleList) or type(module).__module__.startswith("deepspeed."):
            continue
        if isinstance(experts, torch.nn.ModuleList):
            number = len(experts)
        elif isinstance(experts, torch.nn.Module):
            number = getattr(experts, "num_experts", 0)
        else:
            continue
        if isinstance(number, int) and number > 1:
            yield name, module, number


def _gathered_one_by_one(model: Any, name: str, block: Any) -> bool:
    """Whether ZeRO-3 gathers the block's experts when each is called: a list of them, inside no leaf module."""
    import torch
    from deepspeed.utils import z3_leaf_module

    path = name.split(".") if name else []
    around = [model, *(model.get_submodule(".".join(path[: i + 1])) for i in range(len(path)))]
    sharded = any(hasattr(param, "ds_tensor") for param in block.experts.parameters())
    is_list = isinstance(block.experts, torch.nn.ModuleList)
    return is_list and sharded and not any(z3_leaf_module(module) for module in around)


class _Trial:
    """The first call of a block, in which the last expert gets no token."""

    def __init__(self, session: Session, name: str, block: Any, num_experts: int) -> None:
        self.load = "tokens:" + ",".join(["1"] * (num_experts - 1) + ["0"])
        self._session = session
        self._name, self._block = name, block
        self._called = False
        self._hook = block.experts[num_experts - 1].register_forward_pre_hook(self._expert_called)

    def _expert_called(self, module: Any, args: Any) -> None:
        self._called = True

    def ended(self, *, routed: bool) -> None:
        """The block ran."""
        self._hook.remove()
        if routed and not self._called:
            self._session.context.finding(unequal_gathers(self._name, type(self._block).__name__))


def unequal_gathers(name: str, block: str) -> Finding:
    """The finding about a block that gathers only the experts its rank's tokens go to."""
    return Finding(
        kind="hang",
        severity="error",
        ranks="",
        phase="forward",
        message=(
            f"{name} ({block}) calls only the experts that got tokens, and ZeRO-3 gathers an expert when it is called: "
            "ranks whose tokens go to different experts run different all_gathers and wait for each other forever. "
            f"Before deepspeed.initialize: deepspeed.utils.set_z3_leaf_modules(model, [{block}])"
        ),
    )


def _routed(session: Session, forward: Any, name: str, num_experts: int, trial: _Trial | None) -> Any:
    pending = [trial]

    @functools.wraps(forward)
    def routed_forward(*args: Any, **kwargs: Any) -> Any:
        first, pending[0] = pending[0], None
        spec = session.context.spec
        policy = _policy_mode()(spec.device, spec.moe_load if first is None else first.load, num_experts)
        with policy:
            result = forward(*args, **kwargs)
        if policy.routed:
            session.context.assume(describe_moe_load(spec.moe_load, num_experts))
        else:
            session.context.assume(
                f"{name} chooses among {num_experts} experts in a way that is not known: what they are given follows "
                "synthesized values"
            )
        if first is not None:
            first.ended(routed=policy.routed)
        return result

    return routed_forward


@functools.cache
def _policy_mode() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    from prism_plugins.device.real_values import real_values_up_to, write_values

    choosing = {torch.topk: 1, torch.Tensor.topk: 1, torch.argmax: None, torch.Tensor.argmax: None}
    """Function → index of the chosen experts in its result (None: the result itself)."""

    class BlockPolicy(TorchFunctionMode):
        """Overwrites the choice among ``num_experts`` and keeps what follows from it real."""

        def __init__(self, device: str, load: str, num_experts: int) -> None:
            super().__init__()
            self.routed = False
            self._device, self._load, self._num_experts = device, load, num_experts
            self._limit = 0
            """Bytes of the largest tensor that tells which token goes where: a one-hot map, int64."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            position = choosing.get(func, -1)
            if position != -1 and self._is_choice(args, kwargs):
                return self._choose(func, position, args, kwargs)
            if self.routed and _tells_routing(args, kwargs):
                with real_values_up_to(self._device, self._limit):
                    return func(*args, **kwargs)
            return func(*args, **kwargs)

        def _is_choice(self, args: Any, kwargs: Any) -> bool:
            scores = args[0] if args else kwargs["input"]
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            return scores.ndim > 0 and scores.shape[-1] == self._num_experts and dim in (-1, scores.ndim - 1)

        def _choose(self, func: Any, position: int | None, args: Any, kwargs: Any) -> Any:
            scores = args[0] if args else kwargs["input"]
            topk = 1 if position is None else int(kwargs.get("k", args[1] if len(args) > 1 else 1))
            num_tokens = scores.numel() // self._num_experts
            self._limit = max(self._limit, 8 * num_tokens * topk * (self._num_experts + 1))
            with real_values_up_to(self._device, 8 * num_tokens * topk):
                result = func(*args, **kwargs)
            indices = result if position is None else result[position]
            choice = expert_choice(self._load, num_tokens, self._num_experts, topk)
            write_values(indices, choice.reshape(tuple(indices.shape)))
            self.routed = True
            return result

    def _tells_routing(args: Any, kwargs: Any) -> bool:
        """Whether a call has tensors of integers or booleans and no others, or is asked for such a result."""
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype):
            return not (dtype.is_floating_point or dtype.is_complex)
        tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
        return bool(tensors) and not any(t.is_floating_point() or t.is_complex() for t in tensors)

    return BlockPolicy


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
