"""DeepSpeed's pipeline engine: iterations, the instructions of its schedule as phases, the schedule of every stage.

``PipelineEngine._exec_schedule`` looks each instruction of a ``PipeSchedule`` up in a table of methods. Real run and
dry run both turn an instruction into its phase by :class:`Instructions`, so the two cannot disagree.
"""

from __future__ import annotations

import functools
from collections import Counter
from types import ModuleType
from typing import Any

import msgspec

from prism_plugins.errors import PrismError
from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.model import Phase

_PHASES = {
    "LoadMicroBatch": "load_microbatch",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "send_forward",
    "RecvActivation": "recv_forward",
    "SendGrad": "send_backward",
    "RecvGrad": "recv_backward",
    "CommitP2P": "commit_p2p",
    "ReduceTiedGrads": "reduce_tied_grads",
    "ReduceGrads": "reduce_grads",
    "OptimizerStep": "optimizer",
}
"""Name of a DeepSpeed instruction → kind of its phase; the others keep their name."""
_ONCE = ("reduce_tied_grads", "reduce_grads", "optimizer")


class Instructions:
    """The instructions of one iteration of one stage, turned into phases in their order."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def phase(self, name: str, arguments: dict[str, Any]) -> Phase:
        """The phase of the next instruction: its class name and what it is called with.

        The k-th forward pass of a stage (of one of its two halves in DualPipeV) works on micro-batch k, likewise
        the k-th backward pass.
        """
        kind = _PHASES.get(name, name)
        if kind in _ONCE:
            return Phase(kind=kind)
        half = arguments.get("phase", -1)
        part = kind if half < 0 else f"{kind}_{half}"
        ordinal = self._counts[part]
        self._counts[part] += 1
        parts = ((part, ordinal),)
        if kind in ("forward", "backward"):
            return Phase(kind=kind, microbatch=ordinal, chunk=half, parts=parts)
        return Phase(kind=kind, chunk=half, parts=parts)


def stage_schedules(engine: Any) -> tuple[tuple[Phase, ...], ...]:
    """The phases of one iteration on each pipeline stage, from the engine's own schedule run dry."""
    return tuple(_dry_run(engine, stage) for stage in range(engine.num_stages))


def _dry_run(engine: Any, stage: int) -> tuple[Phase, ...]:
    instructions = Instructions()
    schedule = type(engine)._train_schedule(_AsStage(engine, stage))
    return tuple(
        instructions.phase(type(command).__name__, command.kwargs) for step in schedule for command in step
    )


class _AsStage:
    """An engine as it would answer on another stage."""

    def __init__(self, engine: Any, stage: int) -> None:
        self._engine = engine
        self.stage_id = stage
        self.prev_stage = stage - 1
        self.next_stage = stage + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _train_batch(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.training_begins(self)
        try:
            result = original(self, *args, **kwargs)
        except AssertionError as error:
            if "bwd_microstep timer has already been started" not in str(error):
                raise
            raise PrismError(
                'DeepSpeed\'s pipeline engine cannot train with "wall_clock_breakdown": true, also on real GPUs: every '
                f"stage but the last fails with '{error}'; set it to false"
            ) from error
        report_headers(session, self.stage_id)
        session.optimizer_stepped()
        return result

    return train_batch


def _send_tensor_meta(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def send_tensor_meta(self: Any, buffer: Any, recv_stage: int) -> None:
        if recv_stage > self.stage_id:  # DualPipeV sends both ways
            session.sends = _describe(buffer)
        original(self, buffer, recv_stage)

    return send_tensor_meta


def _recv_tensor_meta(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def recv_tensor_meta(self: Any, send_stage: int) -> Any:
        buffers = original(self, send_stage)
        if send_stage < self.stage_id:
            session.receives = _describe(buffers)
        return buffers

    return recv_tensor_meta


def _describe(buffers: Any) -> str:
    """``float32[2x64x128], int64[2x64]``."""
    tensors = buffers if isinstance(buffers, (tuple, list)) else [buffers]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{'x'.join(map(str, t.shape))}]" for t in tensors)


def report_headers(session: Session, stage: int) -> None:
    """Add what this stage received and sent to the facts, once that is known."""
    facts = session.context.facts
    info = facts.stages[stage]
    if (info.receives, info.sends) != (session.receives, session.sends):
        info = msgspec.structs.replace(info, receives=session.receives, sends=session.sends)
        stages = (*facts.stages[:stage], info, *facts.stages[stage + 1 :])
        session.context.set_facts(msgspec.structs.replace(facts, stages=stages))


def _eval_batch(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def eval_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.training_pauses()
        return original(self, *args, **kwargs)

    return eval_batch


def _exec_schedule(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def exec_schedule(self: Any, pipe_schedule: Any) -> Any:
        instructions = Instructions()
        # The engine's own table, not its class's: subclasses have other ones.
        self._INSTRUCTION_MAP = {
            instruction: _phased(session, instructions, instruction.__name__, method)
            for instruction, method in type(self)._INSTRUCTION_MAP.items()
        }
        try:
            return original(self, pipe_schedule)
        finally:
            del self._INSTRUCTION_MAP

    return exec_schedule


def _phased(session: Session, instructions: Instructions, name: str, method: Any) -> Any:
    @functools.wraps(method)
    def phased(self: Any, **kwargs: Any) -> Any:
        phase = instructions.phase(name, kwargs)
        return session.tracker.run(phase, lambda: method(self, **kwargs))

    return phased


_ENGINE = "deepspeed.runtime.pipe.engine"
HOOKS = (
    Hook(_ENGINE, "PipelineEngine.train_batch", _train_batch, "iterations"),
    Hook(_ENGINE, "PipelineEngine._send_tensor_meta", _send_tensor_meta, "headers between stages"),
    Hook(_ENGINE, "PipelineEngine._recv_tensor_meta", _recv_tensor_meta, "headers between stages"),
    Hook(_ENGINE, "PipelineEngine.eval_batch", _eval_batch, "evaluation between iterations"),
    Hook(_ENGINE, "PipelineEngine._exec_schedule", _exec_schedule, "phases of the pipeline"),
)
