"""Megatron's scheduler calls as phases: forward and backward steps, transfers between stages, waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prism_plugins.integration.phase_tracker import PhaseTracker
from prism_plugins.program.model import Phase


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
    """A ``P2PCommunicator`` method, or the function that it was before megatron-core 0.14, as a phase; handles of overlapped calls
    become phases when waited for."""
    parts_of = P2P_METHODS[name]

    @functools.wraps(method)
    def phased(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        communicator = arguments.get("self")
        if communicator is None:
            communicator, arguments = _as_method(arguments)
        parts = tracker.parts(_as_issued(parts_of(arguments), communicator))
        result = tracker.run(Phase(kind=name, parts=parts), lambda: method(*args, **kwargs))
        if arguments.get("overlap_p2p_comm") and parts:
            tensor, handles = result
            return tensor, _phased_handles(tracker, handles, dict(parts))
        return result

    return phased


def _as_method(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What the arguments of a function would be as a method's: the communicator, and whether the stage is first or last."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    stages = {
        "is_first_stage": parallel_state.is_pipeline_first_stage(),
        "is_last_stage": parallel_state.is_pipeline_last_stage(),
    }
    return SimpleNamespace(config=arguments["config"], pp_group=group), stages | arguments


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
