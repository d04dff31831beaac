"""Which stretch of an iteration is which phase: one tracker for the real run and for the dry run of a scheduler.

A phase says what a stage does in terms that are equal on all stages (``Phase.parts``): the k-th ``forward``,
the k-th ``send_forward`` and so on, counted per iteration. The real run gives the tracker to the slice's
recorder, the dry run gives it to a list; both go through the same code, so the two cannot disagree.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prism_plugins.program.model import Phase


class PhaseSink(Protocol):
    """Where phases go: the slice context, or a :class:`PhaseList`."""

    def begin_phase(self, phase: Phase) -> None:
        """Open a phase."""
        ...

    def end_phase(self) -> None:
        """Close the open phase."""
        ...


class PhaseList:
    """A sink that keeps the phases in order."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def begin_phase(self, phase: Phase) -> None:
        """Append a phase."""
        self.phases.append(phase)

    def end_phase(self) -> None:
        """Nothing to do: phases do not nest."""


class SinkWhile:
    """A sink that passes phases on to another one only while ``is_on`` says so (evaluation runs the same code)."""

    def __init__(self, sink: PhaseSink, is_on: Callable[[], bool]) -> None:
        self._sink = sink
        self._is_on = is_on

    def begin_phase(self, phase: Phase) -> None:
        """Open a phase, if on."""
        if self._is_on():
            self._sink.begin_phase(phase)

    def end_phase(self) -> None:
        """Close the open phase, if on."""
        if self._is_on():
            self._sink.end_phase()


class PhaseTracker:
    """Opens and closes phases and counts their parts. Phases do not nest: an inner one is part of the outer one."""

    def __init__(self, sink: PhaseSink) -> None:
        self._sink = sink
        self._counts: Counter[str] = Counter()
        self._open = False
        self._forward_of: dict[int, tuple[int, int]] = {}

    def new_iteration(self) -> None:
        """Start counting parts from zero."""
        self._counts.clear()
        self._forward_of.clear()
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether a phase is open."""
        return self._open

    def begin(self, phase: Phase) -> None:
        """Open a phase that :meth:`end` closes; none may be open."""
        self._open = True
        self._sink.begin_phase(phase)

    def end(self) -> None:
        """Close the phase that :meth:`begin` opened."""
        self._open = False
        self._sink.end_phase()

    def parts(self, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """The next ordinals of ``names``; nothing inside an open phase, where they would not be seen."""
        if self._open:
            return ()
        return tuple((name, self._next(name)) for name in names)

    def run(self, phase: Phase, body: Callable[[], Any]) -> Any:
        """Run ``body`` as a phase, or as part of the phase that is open."""
        if self._open:
            return body()
        self.begin(phase)
        try:
            return body()
        finally:
            self.end()

    def forward(self, body: Callable[[], Any], *, microbatch: int, chunk: int, checkpointed: bool) -> Any:
        """Run one forward step; ``checkpointed``: the scheduler asked for activation checkpoints of this one."""
        kind = "forward_checkpointed" if checkpointed else "forward"
        phase = Phase(kind=kind, microbatch=microbatch, chunk=chunk, parts=self.parts(("forward",)))
        result = self.run(phase, body)
        self._forward_of[id(result[0])] = (microbatch, chunk)
        return result

    def backward(self, body: Callable[[], Any], output_tensor: Any) -> Any:
        """Run the backward step of the forward step that returned ``output_tensor``."""
        microbatch, chunk = self._forward_of.pop(id(output_tensor), (-1, -1))
        phase = Phase(kind="backward", microbatch=microbatch, chunk=chunk, parts=self.parts(("backward",)))
        return self.run(phase, body)

    def _next(self, name: str) -> int:
        ordinal = self._counts[name]
        self._counts[name] = ordinal + 1
        return ordinal


def wrap_sync(tracker: PhaseTracker, function: Callable, kind: str, *, chunk: int = -1) -> Callable:
    """A gradient or parameter synchronisation function as a phase; wrapping twice changes nothing."""
    if getattr(function, "_prism_kind", None) == kind:
        return function
    name = kind if chunk < 0 else f"{kind}_{chunk}"

    @functools.wraps(function)
    def phased(*args: Any, **kwargs: Any) -> Any:
        phase = Phase(kind=kind, chunk=chunk, parts=tracker.parts((name,)))
        return tracker.run(phase, lambda: function(*args, **kwargs))

    phased._prism_kind = kind
    return phased
