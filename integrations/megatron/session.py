"""One Megatron job inside a slice: what was learnt about it so far, and where its iterations begin and end."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from prism_plugins.integration import SliceContext
from prism_plugins.integration.phase_tracker import PhaseTracker, SinkWhile, wrap_sync
from prism_plugins.integrations.megatron.layout import ParallelSizes
from prism_plugins.program.model import MemoryCategory


class BatchShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration of this rank works through."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int


class Session:
    """State that the hooks share. One per slice."""

    def __init__(self, context: SliceContext) -> None:
        self.context = context
        self.sizes = ParallelSizes()
        self.optimizers: list[Any] = []
        """Megatron optimizers that hold parameters, in the order they were built."""
        self.layer_wise_optimizer = False
        """An optimizer was built that gives whole layers to data-parallel ranks."""
        self.in_training_loop = False
        """``megatron.training`` runs the loop: iterations are its ``train_step`` calls."""
        self.tracker = PhaseTracker(SinkWhile(context, lambda: self.iterating))
        self.iterating = False
        self._facts_sent = False
        self._iterations = 0

    def begin_iteration(self, model: list[Any], config: Any, batch: BatchShape) -> None:
        """A training iteration starts. The first one reports the facts of the job."""
        if not self._facts_sent:
            from prism_plugins.integrations.megatron.facts import job_facts

            self._facts_sent = True
            self.context.set_facts(job_facts(self, model, config, batch))
        # State of the inner optimizer appears during the first steps.
        if self._iterations < 3:
            self._tag(model)
        self._iterations += 1
        self.iterating = False
        self.context.begin_iteration()
        self.tracker.new_iteration()
        self.iterating = True

    def end_iteration(self) -> None:
        """The training iteration that is open, if any, ended."""
        if self.iterating:
            self.iterating = False
            self.context.end_iteration()

    def phase_syncs(self, config: Any) -> None:
        """Make gradient and parameter synchronisation that the scheduler calls into phases."""
        tracker = self.tracker
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func = wrap_sync(
                tracker, config.finalize_model_grads_func, "grad_sync"
            )
        for name, kind in (("grad_sync_func", "start_grad_sync"), ("param_sync_func", "start_param_sync")):
            function = getattr(config, name, None)
            if isinstance(function, list):
                wrapped = [wrap_sync(tracker, f, kind, chunk=i) for i, f in enumerate(function)]
                setattr(config, name, wrapped)
            elif function is not None:
                setattr(config, name, wrap_sync(tracker, function, kind))

    def _tag(self, model: list[Any]) -> None:
        for chunk in model:
            tag_model(self.context, chunk)
        for optimizer in self.optimizers:
            tag_optimizer(self.context, optimizer)
        scratch = getattr(sys.modules.get("megatron.core.parallel_state"), "_GLOBAL_MEMORY_BUFFER", None)
        for buffer in scratch.buffer.values() if scratch is not None else ():
            self.context.tag(buffer, MemoryCategory.WORKSPACE)


def tag_model(context: SliceContext, chunk: Any) -> None:
    """Parameters and gradient buffers of a model chunk (a DDP wrapper or the bare model)."""
    for param in chunk.parameters():
        context.tag(param.data, MemoryCategory.PARAMETERS)
        for name in ("main_grad", "grad"):
            if getattr(param, name, None) is not None:
                context.tag(getattr(param, name), MemoryCategory.GRADIENTS)
    buffers = [getattr(chunk, name, ()) for name in ("buffers", "expert_parallel_buffers")]
    # On a bare model `buffers` is a method of torch.nn.Module.
    for buffer in (b for group in buffers if not callable(group) for b in group):
        for name, category in (
            ("param_data", MemoryCategory.PARAMETERS),
            ("grad_data", MemoryCategory.GRADIENTS),
        ):
            if getattr(buffer, name, None) is not None:
                context.tag(getattr(buffer, name), category)


def tag_optimizer(context: SliceContext, optimizer: Any) -> None:
    """Main parameters and moments of a Megatron or torch optimizer."""
    torch = sys.modules["torch"]
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is None:
        return
    is_mixed = inner is not optimizer
    for group in inner.param_groups:
        for param in group["params"]:
            # Without separate main parameters these are the model's own, tagged as such.
            if is_mixed and param.dtype == torch.float32 and not hasattr(param, "main_grad"):
                context.tag(param, MemoryCategory.OPTIMIZER_STATE)
            for value in inner.state.get(param, {}).values():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    context.tag(value, MemoryCategory.OPTIMIZER_STATE)
