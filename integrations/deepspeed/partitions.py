"""Which parameter fragments every data-parallel rank owns, from the tables of DeepSpeed's ZeRO optimizers.

Ranks that own fragments of the same parameters in the same sizes run the same program: they are of one kind.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.slices import FlatPartitions, PartitionFragment

Kind = tuple[tuple[int, ...], ...]
"""What distinguishes a rank; last in each entry is a number of elements."""

_WHOLE, _FIRST, _LATER = range(3)
"""A fragment is the whole parameter, begins with its first element or with a later one."""


class Kinds(NamedTuple):
    """The kinds of the ranks of a data-parallel group; all empty where its ranks are alike."""

    sizes: tuple[tuple[int, ...], ...] = ()
    """Of the fragments of each kind, elements."""
    kind_of: tuple[int, ...] = ()
    """Of each rank."""
    partitions: FlatPartitions | None = None
    """Where programs of other kinds can be derived."""


def shard_kinds(optimizer: Any, dp_size: int) -> Kinds:
    """The kinds of the ranks of a data-parallel group.

    Args:
        optimizer: ``engine.optimizer``.
        dp_size: ranks of the data-parallel group (with sequence parallelism: of both).
    """
    fragments: list[list[PartitionFragment]] = []
    if hasattr(optimizer, "round_robin_bit16_groups"):
        fragments = _stages_1_and_2(optimizer, dp_size)
        of_rank = [tuple(_form(optimizer, fragment) for fragment in owned) for owned in fragments]
    elif hasattr(optimizer, "fp16_groups") and hasattr(optimizer, "_get_param_partition_world_size"):
        of_rank = _stage_3(optimizer, dp_size)
    else:
        return Kinds()
    first: dict[Kind, int] = {}
    for rank, kind in enumerate(of_rank):
        first.setdefault(kind, rank)
    if len(first) == 1:
        return Kinds()
    numbers = {kind: number for number, kind in enumerate(first)}
    partitions = None
    if fragments and _is_plain(optimizer):
        partitions = _flat_partitions(optimizer, [fragments[rank] for rank in first.values()])
    return Kinds(
        tuple(tuple(entry[-1] for entry in kind) for kind in first),
        tuple(numbers[kind] for kind in of_rank),
        partitions,
    )


def _stages_1_and_2(optimizer: Any, dp_size: int) -> list[list[PartitionFragment]]:
    """Each parameter group is one flat buffer cut into equal partitions, without regard to parameters."""
    import deepspeed.comm as dist

    owned: list[list[PartitionFragment]] = [[] for _ in range(dp_size)]
    for group, params in enumerate(optimizer.round_robin_bit16_groups):
        num_partitions = dist.get_world_size(group=optimizer.real_dp_process_group[group])
        partition_size = int(optimizer.partition_size[group])
        ranks = _ranks_of_partition(num_partitions, dp_size)
        offset = 0
        for param, padding in zip(params, optimizer.round_robin_bit16_padding[group], strict=True):
            for partition, start, numel in _cut(offset, param.numel(), partition_size):
                for rank in ranks[partition]:
                    owned[rank].append(PartitionFragment(group, optimizer.get_param_id(param), start, numel))
            offset += param.numel() + int(padding)
    return owned


def _form(optimizer: Any, fragment: PartitionFragment) -> tuple[int, ...]:
    whole = fragment.numel == optimizer.param_dict[fragment.parameter].numel()
    form = _WHOLE if whole else _LATER if fragment.start else _FIRST
    return (fragment.group, fragment.parameter, form, fragment.numel)


def _is_plain(optimizer: Any) -> bool:
    """Gradients are accumulated in their own type, on the GPU, in partitions of one group of ranks without padding
    between parameters: what :mod:`prism_plugins.program.flat_partitions` reads."""
    groups = range(len(optimizer.round_robin_bit16_groups))
    return (
        not optimizer.cpu_offload
        and optimizer.contiguous_gradients
        and optimizer.reduce_scatter
        and len({id(group) for group in optimizer.real_dp_process_group}) == 1
        and not any(any(padding) for padding in optimizer.round_robin_bit16_padding)
        and not any(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
    )


def _flat_partitions(optimizer: Any, owned: Iterable[list[PartitionFragment]]) -> FlatPartitions:
    from deepspeed.runtime.utils import is_model_parallel_parameter

    params = [optimizer.param_dict[number] for number in range(len(optimizer.param_dict))]
    uncounted = tuple(
        number
        for number, param in enumerate(params)
        if getattr(param, "ds_pipe_replicated", False)
        or not (optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(param))
    )
    return FlatPartitions(
        shapes=tuple(tuple(param.shape) for param in params),
        uncounted=uncounted,
        sizes=tuple(int(size) for size in optimizer.partition_size),
        owned=tuple(tuple(fragments) for fragments in owned),
    )


def _cut(offset: int, numel: int, partition_size: int) -> Iterable[tuple[int, int, int]]:
    """(partition, first element of the parameter, elements) of a parameter that begins at ``offset``."""
    start = 0
    while start < numel:
        partition = (offset + start) // partition_size
        end = min((partition + 1) * partition_size - offset, numel)
        yield partition, start, end - start
        start = end


def _ranks_of_partition(num_partitions: int, dp_size: int) -> list[range]:
    """Ranks of the data-parallel group that own each partition: experts are replicated over fewer ranks, and
    neighbouring ranks hold different experts."""
    replicas = dp_size // num_partitions
    return [range(p * replicas, (p + 1) * replicas) for p in range(num_partitions)]


def _stage_3(optimizer: Any, dp_size: int) -> list[Kind]:
    """Each parameter is cut on its own: the last ranks own less of it than the others, or nothing."""
    lacking: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    index = 0
    for params in optimizer.fp16_groups:
        for param in params:
            index += 1
            if not param.requires_grad:
                continue
            num_partitions = optimizer._get_param_partition_world_size(param)
            replicas = dp_size // num_partitions
            size = param.partition_numel()
            for partition in range(param.ds_numel // size, num_partitions):
                left = max(param.ds_numel - partition * size, 0)
                for rank in range(partition * replicas, (partition + 1) * replicas):
                    lacking[rank].append((index, left))
    return [tuple(lacking[rank]) for rank in range(dp_size)]


def _reduce_ipg_grads(session: Session, original: Any, module: ModuleType) -> Any:
    """Which gradients are reduced together is decided while they are made."""

    @functools.wraps(original)
    def reduce(self: Any, comm_dtype: Any = None) -> Any:
        for dtype, bucket in self.ipg_buckets.items():
            if bucket.params and comm_dtype in (None, dtype):
                session.context.gradient_bucket([number for _, _, number in bucket.params])
        return original(self, comm_dtype=comm_dtype)

    return reduce


HOOKS = (
    Hook(
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.reduce_ipg_grads",
        _reduce_ipg_grads,
        "gradients that are reduced together",
    ),
)
