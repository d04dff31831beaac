"""The order of work on every pipeline stage, told by Megatron's own scheduler function run without a model.

The forward and backward steps and the communicator are replaced by recorders; everything that decides the order
is Megatron's. Limits: before megatron-core 0.14 there is no communicator to replace; the combined forward-backward
schedule of ``overlap_moe_expert_parallel_comm`` and hybrid context parallelism call other functions than
``forward_step``/``backward_step``; for them no schedule is given and every stage has to be sliced.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec

from prism_plugins.errors import PrismError
from prism_plugins.integration.phase_tracker import PhaseList, PhaseTracker, wrap_sync
from prism_plugins.integrations.megatron.phases import (
    P2P_METHODS,
    wrap_backward_step,
    wrap_forward_step,
    wrap_p2p,
)
from prism_plugins.program.model import Phase


class FakeGroup:
    """What the scheduler asks of a process group."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        """Number of members."""
        return self._size

    def rank(self) -> int:
        """Group rank of the member we play."""
        return self._rank


class ScheduleInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the order: sizes, and the framework's configuration object."""

    pp: int
    chunks: int
    """Model chunks on a stage (1: not interleaved)."""
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    config: Any
    """``TransformerConfig`` or ``ModelParallelConfig`` of the model."""
    tp: int = 1
    cp: int = 1
    align_param_gather: bool = False
    """Parameters are gathered by calls of the scheduler (``param_sync_func``) in steady iterations."""


def is_supported(schedules: ModuleType, config: Any, *, pp: int) -> bool:
    """Whether the schedule of this configuration can be told without running the model."""
    return (
        not getattr(config, "overlap_moe_expert_parallel_comm", False)
        and not getattr(config, "hybrid_context_parallel", False)
        and (pp == 1 or hasattr(schedules, "P2PCommunicator"))
    )


def stage_schedules(schedules: ModuleType, inputs: ScheduleInputs) -> tuple[tuple[Phase, ...], ...]:
    """The phases of one training iteration on each pipeline stage.

    ``schedules`` is ``megatron.core.pipeline_parallel.schedules``, unpatched or patched. Empty schedules where
    :func:`is_supported` says no. Raises :class:`PrismError` when Megatron's scheduler refuses the configuration.
    """
    if not is_supported(schedules, inputs.config, pp=inputs.pp):
        return ((),) * inputs.pp
    return tuple(_dry_run(schedules, inputs, stage) for stage in range(inputs.pp))


def _dry_run(schedules: ModuleType, inputs: ScheduleInputs, stage: int) -> tuple[Phase, ...]:
    import torch

    sink = PhaseList()
    tracker = PhaseTracker(sink)
    config = _dry_config(inputs, tracker)
    chunks = [_dry_chunk(torch, config) for _ in range(inputs.chunks)]
    scheduler = _scheduler(schedules, inputs)
    arguments: dict[str, Any] = {
        "forward_step_func": None,
        "data_iterator": [None] * inputs.chunks,
        "model": chunks,
        "num_microbatches": inputs.num_microbatches,
        "seq_length": inputs.seq_length,
        "micro_batch_size": inputs.micro_batch_size,
        "forward_only": False,
    }
    pp_group = FakeGroup(inputs.pp, stage)
    collection = getattr(schedules, "ProcessGroupCollection", SimpleNamespace)  # which newer ones insist on
    groups = collection(
        tp=FakeGroup(inputs.tp),
        cp=FakeGroup(inputs.cp),
        pp=pp_group,
        embd=None,
        pos_embd=None,
        dp_cp=FakeGroup(1),
    )
    parameters = inspect.signature(scheduler).parameters
    for name in ("pg_collection", "grad_finalize_pgs"):
        if name in parameters:
            arguments[name] = groups
    if inputs.pp > 1:
        arguments["p2p_communicator"] = _dry_communicator(schedules, tracker, pp_group, config)

    recorders = {
        "forward_step": wrap_forward_step(tracker, _forward_step),
        "backward_step": wrap_backward_step(tracker, _backward_step),
        "deallocate_output_tensor": _nothing,
        "torch": _TorchWithoutDevice(torch),
        # Megatron's own answer "rank 0 of 1" until torch.distributed is initialised.
        "is_pp_first_stage": lambda group: group.rank() == 0,
        "is_pp_last_stage": lambda group: group.rank() == group.size() - 1,
    }
    with replaced(schedules, recorders):
        try:
            scheduler(**arguments)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise PrismError(
                f"Megatron's pipeline schedule refuses this layout on stage {stage} "
                f"(pp {inputs.pp}, {inputs.chunks} chunks, {inputs.num_microbatches} micro-batches): {error}"
            ) from error
    return tuple(sink.phases)


def _forward_step(
    step: Any, data: Any, model: Any, num_microbatches: int, input_tensor: Any, *args: Any, **kwargs: Any
) -> tuple[Any, int]:
    output = _Placeholder()
    return [output] if isinstance(input_tensor, list) else output, 0


def _backward_step(input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    gradient = _Placeholder()
    return [gradient] if isinstance(input_tensor, list) else gradient


class _TorchWithoutDevice:
    """torch, but the scheduler's token counter is no tensor: a dry run touches no device."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def zeros(self, *args: Any, **kwargs: Any) -> int:
        """The counter."""
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class _Placeholder:
    """Stands for a tensor that nobody looks into."""

    def wait(self) -> None:
        """Also stands for a p2p work."""


def _scheduler(schedules: ModuleType, inputs: ScheduleInputs) -> Callable:
    if inputs.pp == 1:
        name = "forward_backward_no_pipelining"
    elif inputs.chunks > 1:
        name = "forward_backward_pipelining_with_interleaving"
    else:
        name = "forward_backward_pipelining_without_interleaving"
    return inspect.unwrap(getattr(schedules, name))


def _dry_config(inputs: ScheduleInputs, tracker: PhaseTracker) -> Any:
    """The model's configuration with everything that acts on tensors replaced or switched off."""
    config = copy.copy(inputs.config)
    off = {
        "timers": None,
        "no_sync_func": None,
        "cuda_graph_impl": "none",
        "fine_grained_activation_offloading": False,
        "defer_embedding_wgrad_compute": False,
        "grad_scale_func": None,
    }
    for name, value in off.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func = wrap_sync(tracker, _nothing, "grad_sync")
    config.grad_sync_func = _sync_functions(tracker, inputs, "start_grad_sync", config.grad_sync_func)
    gathers = (
        config.param_sync_func if config.param_sync_func is not None else inputs.align_param_gather or None
    )
    config.param_sync_func = _sync_functions(tracker, inputs, "start_param_sync", gathers)
    return config


def _sync_functions(tracker: PhaseTracker, inputs: ScheduleInputs, kind: str, given: Any) -> Any:
    if given is None:
        return None
    if inputs.chunks == 1:
        return wrap_sync(tracker, _nothing, kind)
    return [wrap_sync(tracker, _nothing, kind, chunk=i) for i in range(inputs.chunks)]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _dry_chunk(torch: ModuleType, config: Any) -> Any:
    from megatron.core.enums import ModelType

    chunk = torch.nn.Module()
    chunk.config = config
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk


def _dry_communicator(schedules: ModuleType, tracker: PhaseTracker, pp_group: FakeGroup, config: Any) -> Any:
    """A ``P2PCommunicator`` whose methods are Megatron's and whose transfers do nothing."""
    base = schedules.P2PCommunicator
    namespace: dict[str, Any] = {
        "_communicate": _communicate,
        "__init__": lambda self: None,
        "is_pp_first_stage": property(lambda self: self.pp_group.rank() == 0),
        "is_pp_last_stage": property(lambda self: self.pp_group.rank() == self.pp_group.size() - 1),
    }
    for name in P2P_METHODS:
        method = inspect.unwrap(getattr(base, name))
        namespace[name] = wrap_p2p(tracker, method, name, inspect.signature(method))
    communicator = type("DryCommunicator", (base,), namespace)()
    communicator.pp_group = pp_group
    communicator.config = config
    communicator.next_rank = (pp_group.rank() + 1) % pp_group.size()
    communicator.prev_rank = (pp_group.rank() - 1) % pp_group.size()
    communicator.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
    return communicator


def _communicate(
    self: Any,
    *,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any,
    wait_on_reqs: bool = True,
) -> tuple[Any, Any, Any]:
    handles = None
    if not wait_on_reqs:
        asked = {
            "send_next": tensor_send_next is not None,
            "recv_prev": recv_prev,
            "send_prev": tensor_send_prev is not None,
            "recv_next": recv_next,
        }
        handles = {key: _Placeholder() for key, is_asked in asked.items() if is_asked}
    return _Placeholder() if recv_prev else None, _Placeholder() if recv_next else None, handles


@contextlib.contextmanager
def replaced(module: ModuleType, replacements: dict[str, Any]) -> Iterator[None]:
    """A module with other attributes meanwhile."""
    originals = {name: getattr(module, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
