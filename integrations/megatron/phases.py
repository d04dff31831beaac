"""Which stretch of an iteration is which phase: one tracker for the real run and for the dry run of the scheduler.

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


def wrap_forward_step(tracker: PhaseTracker, forward_step: Callable) -> Callable:
    """``schedules.forward_step`` as a phase."""

    @functools.wraps(forward_step)
    def phased(*args: Any, **kwargs: Any) -> Any:
        microbatch = kwargs.get("current_microbatch")
        chunk = kwargs.get("vp_stage")
        return tracker.forward(
            lambda: forward_step(*args, **kwargs),
            microbatch=-1 if microbatch is None else microbatch,
            chunk=-1 if chunk is None else chunk,
            checkpointed=bool(kwargs.get("checkpoint_activations_microbatch")),
        )

    return phased


def wrap_backward_step(tracker: PhaseTracker, backward_step: Callable) -> Callable:
    """``schedules.backward_step`` as a phase."""

    @functools.wraps(backward_step)
    def phased(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tracker.backward(
            lambda: backward_step(input_tensor, output_tensor, *args, **kwargs), output_tensor
        )

    return phased


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


def _unless(flag: str, *names: str) -> Callable[[dict[str, Any]], tuple[str, ...]]:
    return lambda arguments: () if arguments[flag] else names


def _sent_and_received(
    sent: dict[str, str], received: dict[str, str]
) -> Callable[[dict[str, Any]], tuple[str, ...]]:
    def parts(arguments: dict[str, Any]) -> tuple[str, ...]:
        names = [name for argument, name in sent.items() if arguments[argument] is not None]
        names += [name for argument, name in received.items() if arguments[argument]]
        return tuple(names)

    return parts


P2P_METHODS: dict[str, Callable[[dict[str, Any]], tuple[str, ...]]] = {
    "recv_forward": _unless("is_first_stage", "recv_forward"),
    "recv_backward": _unless("is_last_stage", "recv_backward"),
    "send_forward": _unless("is_last_stage", "send_forward"),
    "send_backward": _unless("is_first_stage", "send_backward"),
    "send_forward_recv_backward": _unless("is_last_stage", "send_forward", "recv_backward"),
    "send_backward_recv_forward": _unless("is_first_stage", "send_backward", "recv_forward"),
    "send_forward_recv_forward": _sent_and_received(
        {"output_tensor": "send_forward"}, {"recv_prev": "recv_forward"}
    ),
    "send_backward_recv_backward": _sent_and_received(
        {"input_tensor_grad": "send_backward"}, {"recv_next": "recv_backward"}
    ),
    "send_forward_backward_recv_forward_backward": _sent_and_received(
        {"output_tensor": "send_forward", "input_tensor_grad": "send_backward"},
        {"recv_prev": "recv_forward", "recv_next": "recv_backward"},
    ),
}
"""``P2PCommunicator`` method → the parts of a call, from its arguments by name."""

HANDLE_PARTS = {
    "send_next": "send_forward",
    "send_prev": "send_backward",
    "recv_prev": "recv_forward",
    "recv_next": "recv_backward",
}
"""Key of a wait handle that an overlapped p2p call returns → the part it waits for."""


def wrap_p2p(tracker: PhaseTracker, method: Callable, name: str, signature: Any) -> Callable:
    """A ``P2PCommunicator`` method as a phase; handles of overlapped calls become phases when waited for."""
    parts_of = P2P_METHODS[name]

    @functools.wraps(method)
    def phased(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        parts = tracker.parts(_as_issued(parts_of(arguments), arguments["self"]))
        result = tracker.run(Phase(kind=name, parts=parts), lambda: method(*args, **kwargs))
        if arguments.get("overlap_p2p_comm") and parts:
            tensor, handles = result
            return tensor, _phased_handles(tracker, handles, dict(parts))
        return result

    return phased


def _as_issued(names: tuple[str, ...], communicator: Any) -> tuple[str, ...]:
    """Parts in the order in which their transfers are issued: without batching, odd stages receive first."""
    if communicator.config.batch_p2p_comm or communicator.config.use_ring_exchange_p2p:
        return names
    order = ("send_forward", "recv_forward", "send_backward", "recv_backward")
    if communicator.pp_group.rank() % 2:
        order = ("recv_forward", "send_forward", "recv_backward", "send_backward")
    return tuple(sorted(names, key=order.index))


def _phased_handles(tracker: PhaseTracker, handles: Any, ordinals: dict[str, int]) -> Any:
    if not handles:
        return handles
    return {
        key: _PhasedHandle(tracker, handle, HANDLE_PARTS[key], ordinals[HANDLE_PARTS[key]])
        for key, handle in handles.items()
    }


class _PhasedHandle:
    """A p2p work whose ``wait`` is the phase ``wait_<part>``."""

    def __init__(self, tracker: PhaseTracker, work: Any, part: str, ordinal: int) -> None:
        self._tracker = tracker
        self._work = work
        self._kind = f"wait_{part}"
        self._ordinal = ordinal

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        phase = Phase(kind=self._kind, parts=((self._kind, self._ordinal),))
        return self._tracker.run(phase, lambda: self._work.wait(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
