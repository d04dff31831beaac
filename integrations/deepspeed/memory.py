"""What the device memory of a DeepSpeed engine is for.

What lives across iterations is tagged between them (:func:`tag_engine`); what is made in each iteration when it was
made: buckets and gathered parameters by hooks, gradients after a backward pass and before the optimizer's step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.model import MemoryCategory

_MASTER = (
    "single_partition_of_fp32_groups",  # ZeRO 1 and 2
    "fp32_partitioned_groups_flat",  # ZeRO 3
    "fp32_groups_flat_partition",  # BF16_Optimizer
    "fp32_groups_flat",  # FP16_Optimizer
    "fp32_groups",  # FP16_UnfusedOptimizer
)
_GRADIENTS = (
    "averaged_gradients",  # ZeRO 1 and 2
    "all_grad_tensors",
    "grad_partitions_flat_buffer",  # ZeRO 3
    "fp32_groups_gradients_flat",  # BF16_Optimizer
    "fp32_groups_gradients",
)
_PARAMETERS = ("bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat", "lp_param_buffer")


def tag_engine(context: SliceContext, engine: Any) -> None:
    """Tag parameters, the optimizer's master copy and state, gradients and buckets that live on."""
    optimizer = engine.optimizer
    for param in engine.module.parameters():
        context.tag(param.data, MemoryCategory.PARAMETERS)
        for shard in ("ds_tensor", "ds_secondary_tensor"):
            _tag_all(context, getattr(param, shard, None), MemoryCategory.PARAMETERS)
    for buffer in engine.module.buffers():
        context.tag(buffer, MemoryCategory.PARAMETERS)
    for name in _PARAMETERS:
        _tag_all(context, getattr(optimizer, name, None), MemoryCategory.PARAMETERS)
    for name in _MASTER:
        _tag_all(context, getattr(optimizer, name, None), MemoryCategory.OPTIMIZER_STATE)
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in getattr(inner, "state", {}).values():
        _tag_all(context, state, MemoryCategory.OPTIMIZER_STATE)
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        _tag_all(context, bucket.buffer, MemoryCategory.COMMUNICATION)
    tag_gradients(context, engine)


def tag_gradients(context: SliceContext, engine: Any) -> None:
    """Tag the gradients that are there: of parameters, unless they lie in a bucket, and of partitions."""
    optimizer = engine.optimizer
    buckets = {
        buffer.untyped_storage()._cdata
        for bucket in getattr(optimizer, "ipg_buckets", {}).values()
        for buffer in _tensors(bucket.buffer)
    }
    for param in engine.module.parameters():
        for grad in (param.grad, getattr(param, "grad_accum", None)):
            if grad is not None and grad.untyped_storage()._cdata not in buckets:
                context.tag(grad, MemoryCategory.GRADIENTS)
    for name in _GRADIENTS:
        _tag_all(context, getattr(optimizer, name, None), MemoryCategory.GRADIENTS)


def _tag_all(context: SliceContext, value: Any, category: MemoryCategory) -> None:
    for tensor in _tensors(value):
        context.tag(tensor, category)


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in nested lists and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _setup_buckets(session: Session, original: Any, module: ModuleType) -> Any:
    """ZeRO 1 and 2 make their buckets anew for every backward pass."""

    @functools.wraps(original)
    def setup_buckets(self: Any) -> Any:
        result = original(self)
        for bucket in self.ipg_buckets.values():
            _tag_all(session.context, bucket.buffer, MemoryCategory.COMMUNICATION)
        return result

    return setup_buckets


def _gathered(session: Session, original: Any, module: ModuleType) -> Any:
    """ZeRO 3 makes a parameter whole for as long as its module works."""

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        session.context.tag(self._AllGatherHandle__param.data, MemoryCategory.PARAMETERS)
        return result

    return wait


def _take_model_step(session: Session, original: Any, module: ModuleType) -> Any:
    """The step of any engine: gradients that a pipeline accumulated are there."""

    @functools.wraps(original)
    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.gradients_made(self)
        return original(self, *args, **kwargs)

    return take_model_step


HOOKS = (
    Hook(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._take_model_step",
        _take_model_step,
        "memory of gradients",
    ),
    Hook(
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.setup_buckets",
        _setup_buckets,
        "memory of buckets",
    ),
    Hook(
        "deepspeed.runtime.zero.partition_parameters",
        "AllGatherHandle.wait",
        _gathered,
        "memory of gathered parameters",
    ),
)
