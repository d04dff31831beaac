"""Every place where the integration hooks DeepSpeed, as one table."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed import autotp, moe, offload, pipeline
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.model import Phase

SUPPORTED = "deepspeed 0.19"


def hook_table() -> list[Hook]:
    """The table. Where two hooks name the same attribute, the later one wraps the earlier."""
    engine = "deepspeed.runtime.engine"
    return [
        Hook(engine, "DeepSpeedEngine.forward", _forward, "iterations and phase forward"),
        Hook(engine, "DeepSpeedEngine.backward", _backward, "phase backward"),
        Hook(engine, "DeepSpeedEngine.step", _step, "phase optimizer"),
        *pipeline.HOOKS,
        *offload.HOOKS,
        *moe.HOOKS,
        *autotp.HOOKS,
    ]


def _forward(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not (self.training and torch.is_grad_enabled()):
            session.training_pauses()
            return original(self, *args, **kwargs)
        session.training_begins(self)
        phase = Phase(
            kind="forward", microbatch=session.microbatch, parts=session.tracker.parts(("forward",))
        )
        return session.tracker.run(phase, lambda: original(self, *args, **kwargs))

    return forward


def _backward(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        phase = Phase(
            kind="backward", microbatch=session.microbatch, parts=session.tracker.parts(("backward",))
        )
        return session.tracker.run(phase, lambda: original(self, *args, **kwargs))

    return backward


def _step(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        boundary = self.is_gradient_accumulation_boundary()
        kind = "optimizer" if boundary else "accumulate"
        result = session.tracker.run(
            Phase(kind=kind, microbatch=-1 if boundary else session.microbatch),
            lambda: original(self, *args, **kwargs),
        )
        session.microbatch += 1
        if boundary:
            session.optimizer_stepped()
        return result

    return step
