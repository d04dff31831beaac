"""Where the iterations of a plain script begin and end, and what is told about it."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import ModuleType
from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.program.model import MemoryCategory, Phase
from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.layout import Layout

_FRAMEWORKS = ("megatron.core", "deepspeed")


class Session:
    """An iteration lasts from the end of one optimizer step to the end of the next one of the same optimizer; what
    comes before the first step's end is start-up."""

    def __init__(self, context: SliceContext) -> None:
        self._context = context
        self._optimizer: Any = None
        """The one whose steps end iterations: the first that steps."""
        self._stepping = False

    def watch_optimizers(self, module: ModuleType) -> None:
        """Hook every ``step`` through torch's own hooks."""
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)

    def watch_loaders(self, module: ModuleType) -> None:
        """Note how many batches a loader has when it begins to be read."""
        from prism_plugins.capture.recorder import get_recorder
        from prism_plugins.collectives.call_site import call_site

        original = module.DataLoader.__iter__

        @functools.wraps(original)
        def begin(loader: Any) -> Any:
            with contextlib.suppress(TypeError):  # an iterable data set of unknown length
                get_recorder().startup.loader(call_site(), len(loader))
            return original(loader)

        self._context.patch(module.DataLoader, "__iter__", begin, why="how many batches each rank has")

    def _is_ours(self) -> bool:
        if self._optimizer is not None:
            return True
        facts = self._context.facts
        return facts is None and not any(name in sys.modules for name in _FRAMEWORKS)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer is not None:
            self._context.stop_if_enough()
            self._stepping = True
            self._context.begin_phase(Phase(kind="optimizer"))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping:
            self._stepping = False
            self._context.end_phase()
        if not self._is_ours():
            return
        if self._optimizer is None:
            self._optimizer = optimizer
            self._context.set_facts(_facts(self._context.spec.world_size))
            self._context.assume(
                "no framework tells which ranks of this script run alike: every rank is sliced; an iteration lasts from the "
                "end of one optimizer step to the end of the next"
            )
            self._tag(optimizer)
            self._context.begin_iteration(ends_by_next=True)
        elif optimizer is self._optimizer:
            self._context.next_iteration()
            self._tag(optimizer)

    def _tag(self, optimizer: Any) -> None:
        torch = sys.modules["torch"]
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._context.tag(param.data, MemoryCategory.PARAMETERS)
                if param.grad is not None:
                    self._context.tag(param.grad, MemoryCategory.GRADIENTS)
                for value in optimizer.state.get(param, {}).values():
                    if isinstance(value, torch.Tensor):
                        self._context.tag(value, MemoryCategory.OPTIMIZER_STATE)


def _facts(world_size: int) -> JobFacts:
    return JobFacts(
        framework="torch.distributed",
        layout=Layout(world_size=world_size, dp=world_size),
        stages=(StageInfo(fingerprint="the whole script"),),
        independent_ranks=True,
    )
