"""Every place where the integration hooks DeepSpeed, as one table."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed import (
    autotp,
    checks,
    compat,
    log,
    loops,
    memory,
    moe,
    offload,
    overflow,
    partitions,
    pipeline,
)
from prism_plugins.integrations.deepspeed.routed_blocks import route_blocks
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.model import Phase

SUPPORTED = "deepspeed 0.19"


def hook_table() -> list[Hook]:
    """The table. Where two hooks name the same attribute, the later one wraps the earlier."""
    engine = "deepspeed.runtime.engine"
    return [
        Hook(engine, "DeepSpeedEngine.__init__", _engine_init, "routing by --prism-moe-load"),
        Hook(
            "deepspeed.runtime.zero.partition_parameters",
            "InsertPostInitMethodToModuleSubClasses.__enter__",
            _zero_init_begins,
            "shape functions of ops on meta tensors",
        ),
        Hook(engine, "DeepSpeedEngine.forward", _forward, "iterations and phase forward"),
        Hook(engine, "DeepSpeedEngine.backward", _backward, "phase backward"),
        Hook(engine, "DeepSpeedEngine._backward_prologue", _backward_prologue, "phase of loss.backward()"),
        Hook(engine, "DeepSpeedEngine._backward_epilogue", _backward_epilogue, "phase of loss.backward()"),
        Hook(engine, "DeepSpeedEngine.step", _step, "phase optimizer"),
        Hook("torch.nn.modules.module", "Module.train", _train, "evaluation between iterations"),
        *pipeline.HOOKS,
        *loops.HOOKS,
        *memory.HOOKS,
        *offload.HOOKS,
        *overflow.HOOKS,
        *partitions.HOOKS,
        *moe.HOOKS,
        *autotp.HOOKS,
        *compat.HOOKS,
        *checks.HOOKS,
        *log.HOOKS,
    ]


def _zero_init_begins(session: Session, original: Any, module: ModuleType) -> Any:
    """``zero.Init`` replaces ``torch.Tensor.__new__``, under which torch cannot import Dynamo. Shape functions of some
    ops import it when they are first called."""

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        importlib.import_module("torch._dynamo")
        return original(self)

    return enter


def _engine_init(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        route_blocks(session, self)

    return init


def _forward(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not (self.training and torch.is_grad_enabled()):
            session.training_pauses()
            return original(self, *args, **kwargs)
        session.training_begins(self)
        session.batch_seen(self, [kwargs, args])
        session.next_microbatch()
        phase = Phase(
            kind="forward", microbatch=session.microbatch, parts=session.tracker.parts(("forward",))
        )
        return session.tracker.run(phase, lambda: original(self, *args, **kwargs))

    return forward


def _backward(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = session.tracker.run(_backward_phase(session), lambda: original(self, *args, **kwargs))
        session.gradients_made(self)
        return result

    return backward


def _backward_phase(session: Session) -> Phase:
    return Phase(kind="backward", microbatch=session.microbatch, parts=session.tracker.parts(("backward",)))


def _backward_prologue(session: Session, original: Any, module: ModuleType) -> Any:
    """Runs when the gradient reaches the engine's output: with ``loss.backward()`` the phase begins here."""

    @functools.wraps(original)
    def prologue(self: Any) -> Any:
        session.loss_backward_begins(_backward_phase(session))
        return original(self)

    return prologue


def _backward_epilogue(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def epilogue(self: Any) -> Any:
        result = original(self)
        session.loss_backward_ends()
        session.gradients_made(self)
        return result

    return epilogue


def _train(session: Session, original: Any, module: ModuleType) -> Any:
    """``eval()`` is ``train(False)``. Evaluation need not go through the engine: Hugging Face's Trainer calls the
    model itself."""

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        if not mode and session.engine is not None and self is session.engine.module:
            session.training_pauses()
        return original(self, mode)

    return train


def _step(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.loss_backward_ends()
        boundary = not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary()
        kind = "optimizer" if boundary else "accumulate"
        result = session.tracker.run(
            Phase(kind=kind, microbatch=-1 if boundary else session.microbatch),
            lambda: original(self, *args, **kwargs),
        )
        if boundary:
            session.optimizer_stepped()
        return result

    return step
