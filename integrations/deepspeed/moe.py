"""Expert routing of ``deepspeed.moe`` as ``--prism-moe-load`` says.

A gate's choices are decided by values that a virtual device does not have. While one of DeepSpeed's gating functions
runs, what it computes of them is overwritten: the experts of each token (``argmax`` and ``topk`` over the experts)
and the tokens of each expert (the sum of the routing mask). Everything that follows from them is then right: with
``drop_tokens=False`` the capacity, which is the largest count over the experts and over the ranks of the
expert-parallel group, and with it the bytes of both all-to-alls.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import ModuleType
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.moe_load import describe_moe_load, expert_choice, expert_counts
from prism_plugins.program.prediction import Finding
from prism_plugins.slice_env import HASH_SEED_CHOSEN

NO_TUTEL = (
    "use_tutel without Tutel installed here: the layer dispatches its tokens as DeepSpeed does without it"
)


def _gating(topk: int | None, session: Session, original: Any, module: ModuleType) -> Any:
    """A gating function; ``topk`` None: it is its argument ``k``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def gating(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        num_tokens, num_experts = values["logits"].shape
        policy = _policy_mode()(
            session.context.spec.moe_load, num_tokens, num_experts, topk or int(values["k"])
        )
        with policy:
            result = original(*args, **kwargs)
        if not policy.counted:
            raise PrismError(
                f"this DeepSpeed's {original.__name__} counts the tokens of experts in a way prism does not know; "
                "deepspeed 0.19 is supported"
            )
        session.context.assume(describe_moe_load(session.context.spec.moe_load, num_experts))
        return result

    return gating


@functools.cache
def _policy_mode() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    from prism_plugins.device.real_values import write_values
    from prism_plugins.device.tensors import is_shape_only

    class RoutingPolicy(TorchFunctionMode):
        """Overwrites what a gating function computes of the routing of (num_tokens, num_experts) logits."""

        def __init__(self, load: str, num_tokens: int, num_experts: int, topk: int) -> None:
            super().__init__()
            self.counted = False
            self._shape = (num_tokens, num_experts)
            self._load, self._topk = load, topk
            self._num_argmax = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            if func is torch.argmax and self._is_over_experts(args, kwargs):
                self._write_choice(result, slice(self._num_argmax, self._num_argmax + 1))
                self._num_argmax += 1
            elif func is torch.topk and self._is_over_experts(args, kwargs):
                self._write_choice(result[1], slice(None))
            elif func is torch.sum and self._is_count(args, kwargs):
                self.counted = True
                write_values(result, expert_counts(self._load, *self._shape, self._topk))
            return result

        def _is_over_experts(self, args: Any, kwargs: Any) -> bool:
            return args[0].shape == self._shape and kwargs.get("dim") == 1

        def _is_count(self, args: Any, kwargs: Any) -> bool:
            mask = args[0]
            over_tokens = kwargs.get("dim") == 0 and not kwargs.get("keepdim")
            return mask.shape == self._shape and over_tokens and not mask.dtype.is_floating_point

        def _write_choice(self, indices: Any, columns: slice) -> None:
            if not is_shape_only(indices):
                choice = expert_choice(self._load, *self._shape, self._topk)[:, columns]
                write_values(indices, choice.reshape(tuple(indices.shape)))

    return RoutingPolicy


def _optimizer_groups(session: Session, original: Any, module: ModuleType) -> Any:
    """DeepSpeed 0.19 collects the names of expert groups in a set: with several of them the order of the optimizer's
    parameter groups, and of their collectives, is that of the strings' hashes."""

    @functools.wraps(original)
    def split_params_into_different_moe_groups_for_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        names = sorted({group["name"] for group in result if group.get("moe")})
        # Experts that no other rank holds are neither reduced nor gathered.
        names = [name for name in names if name != f"ep_size_{session.context.spec.world_size}"]
        if len(names) > 1 and os.environ.get(HASH_SEED_CHOSEN):
            session.context.finding(unequal_groups(names))
        return result

    return split_params_into_different_moe_groups_for_optimizer


def unequal_groups(names: list[str]) -> Finding:
    """The finding about parameter groups of experts whose order is left to Python's hash seed."""
    return Finding(
        kind="hang",
        severity="error",
        ranks="",
        phase="optimizer",
        message=(
            f"the optimizer's groups {', '.join(names)} are in the order of a set of strings, which Python's hash seed "
            "decides: ranks reduce and gather them in different orders and wait for each other forever. Set "
            "PYTHONHASHSEED to the same number on all ranks (emulated with 0)"
        ),
    )


def _moe_layer(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, use_tutel: bool = False, **kwargs: Any) -> None:
        if use_tutel and module.TUTEL_INSTALLED:
            raise PrismError(
                "use_tutel is not emulated: Tutel launches CUDA kernels of its own; leave it out of the MoE layer"
            )
        if use_tutel:
            session.context.assume(NO_TUTEL)
        original(self, *args, use_tutel=use_tutel, **kwargs)

    return init


def _auto_ep(session: Session, original: Any, module: ModuleType) -> Any:
    """``expert_parallel`` of ds_config: replaces the MoE blocks of a Hugging Face model."""

    @functools.wraps(original)
    def parse_autoep_config(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        if config.enabled and not session.context.spec.real_ranks:
            raise PrismError(
                "ds_config's expert_parallel (AutoEP) is not emulated: it dispatches tokens by Triton kernels; "
                "deepspeed.moe.layer.MoE is emulated"
            )
        return config

    return parse_autoep_config


_MODULE = "deepspeed.moe.sharded_moe"

HOOKS = (
    Hook(_MODULE, "top1gating", functools.partial(_gating, 1), "routing by --prism-moe-load"),
    Hook(_MODULE, "top2gating", functools.partial(_gating, 2), "routing by --prism-moe-load"),
    Hook(_MODULE, "topkgating", functools.partial(_gating, None), "routing by --prism-moe-load"),
    Hook(
        "deepspeed.moe.utils",
        "split_params_into_different_moe_groups_for_optimizer",
        _optimizer_groups,
        "the order of expert groups",
    ),
    Hook(_MODULE, "MOELayer.__init__", _moe_layer, "Tutel is not emulated"),
    Hook(
        "deepspeed.module_inject.auto_ep_config",
        "parse_autoep_config",
        _auto_ep,
        "AutoEP is not emulated",
        required=False,
    ),
)
