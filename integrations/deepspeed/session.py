"""One DeepSpeed job inside a slice: its engine, what was learnt about it, where its iterations begin and end."""

from __future__ import annotations

from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.integration.phase_tracker import PhaseTracker, SinkWhile
from prism_plugins.program.model import Phase


class Session:
    """State that the hooks share. One per slice."""

    def __init__(self, context: SliceContext) -> None:
        self.context = context
        self.engine: Any = None
        """The engine that trains: the first one to run a training forward."""
        self.iterating = False
        """An iteration is recorded."""
        self.microbatch = -1
        """Micro-batch of the iteration that is at work; -1 before its first forward pass."""
        self.receives = self.sends = ""
        """Tensors that the pipeline stage before announced to this one, and this one to the next."""
        self.tracker = PhaseTracker(SinkWhile(context, lambda: self.iterating))
        self._iterations = 0
        self._stepped = False
        self._work_told = False
        self._in_loss_backward = False
        self._last_span = (0, 0)

    def engine_made(self, *, trains: bool) -> None:
        """``deepspeed.initialize`` made an engine, with an optimizer if it ``trains``; nothing was trained yet."""
        without = "" if trains else ", and it has no optimizer"
        self.context.not_trained_yet(
            "deepspeed.initialize made an engine, but no training forward pass went through it (engine(batch), with "
            f"gradients, in training mode){without}"
        )

    def training_begins(self, engine: Any) -> None:
        """An engine is about to run a training forward pass. The first one reports the facts of the job and begins
        the first iteration; later ones last from the end of one optimizer step to the end of the next."""
        if self.engine is None:
            from prism_plugins.integrations.deepspeed.facts import job_facts

            self.engine = engine
            self.context.set_facts(job_facts(self, engine))
            self.context.not_trained_yet("a forward pass went through the engine, but no engine.step() came")
        if not self.iterating:
            self._tag(engine)
            self.iterating = True
            self.context.begin_iteration(ends_by_next=True)
            self._new_iteration()
        elif self._stepped:
            self._stepped = False
            self.context.stop_if_enough()

    def batch_seen(self, engine: Any, inputs: Any) -> None:
        """A micro-batch of a training iteration; the first one tells the work of an iteration."""
        facts = self.context.facts
        if self._work_told or facts is None:
            return
        self._work_told = True
        from prism_plugins.integrations.deepspeed.facts import with_work

        self.context.set_facts(with_work(facts, engine.module, inputs))

    def optimizer_stepped(self) -> None:
        """The optimizer step of an iteration ended, and with it the iteration."""
        if self.iterating:
            self._tag(self.engine)
            self.context.next_iteration()
            self._new_iteration()
            self._stepped = True

    def next_microbatch(self) -> None:
        """A training forward pass begins. Counted here because not every micro-batch ends in ``engine.step()``."""
        self.loss_backward_ends()
        if not self.tracker.is_open:
            self.microbatch += 1

    def loss_backward_begins(self, phase: Phase) -> None:
        """A backward pass that the script started by ``loss.backward()``, not through the engine."""
        if self.iterating and not self.tracker.is_open:
            self._in_loss_backward = True
            self.tracker.begin(phase)

    def loss_backward_ends(self) -> None:
        """All gradients of that backward pass are there (or its phase was left open by an error)."""
        if self._in_loss_backward:
            self._in_loss_backward = False
            self.tracker.end()

    def timer_stopped(self, name: str, begin: int, end: int) -> None:
        """One of DeepSpeed's timers measured a span between two CUDA events."""
        self._last_span = (begin, end)
        if self.iterating:
            self.context.timer(name, begin, end)

    def timed_call(self, name: str) -> None:
        """The span measured last is also known by another name."""
        if self.iterating:
            self.context.timer(name, *self._last_span)

    def training_pauses(self) -> None:
        """The script does something else between two iterations: evaluates, saves."""
        if self.iterating:
            self.iterating = False
            self.context.drop_iteration()

    def gradients_made(self, engine: Any) -> None:
        """A backward pass ended, or the optimizer is about to step."""
        if self.iterating:
            from prism_plugins.integrations.deepspeed.memory import tag_gradients

            tag_gradients(self.context, engine)

    def _tag(self, engine: Any) -> None:
        from prism_plugins.integrations.deepspeed.memory import tag_engine

        tag_engine(self.context, engine)

    def _new_iteration(self) -> None:
        self._iterations += 1
        self.microbatch = -1
        self.tracker.new_iteration()
