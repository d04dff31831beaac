"""Which parameter fragments every data-parallel rank owns, from the tables of DeepSpeed's ZeRO optimizers.

Ranks that own fragments of the same parameters in the same sizes run the same program: they are of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Kind = tuple[tuple[int, ...], ...]
"""What distinguishes a rank; last in each entry is a number of elements."""

_WHOLE, _FIRST, _LATER = range(3)
"""A fragment is the whole parameter, begins with its first element or with a later one."""


def shard_kinds(optimizer: Any, dp_size: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The kinds of the ranks of a data-parallel group.

    Args:
        optimizer: ``engine.optimizer``.
        dp_size: ranks of the data-parallel group (with sequence parallelism: of both).

    Returns:
        Sizes of the fragments of each kind, and the kind of each rank; empty where ZeRO does not partition.
    """
    if hasattr(optimizer, "round_robin_bit16_groups"):
        of_rank = _stages_1_and_2(optimizer, dp_size)
    elif hasattr(optimizer, "fp16_groups") and hasattr(optimizer, "_get_param_partition_world_size"):
        of_rank = _stage_3(optimizer, dp_size)
    else:
        return (), ()
    numbers: dict[Kind, int] = {}
    kind_of = tuple(numbers.setdefault(kind, len(numbers)) for kind in of_rank)
    if len(numbers) == 1:
        return (), ()
    return tuple(tuple(entry[-1] for entry in kind) for kind in numbers), kind_of


def _stages_1_and_2(optimizer: Any, dp_size: int) -> list[Kind]:
    """Each parameter group is one flat buffer cut into equal partitions, without regard to parameters."""
    import deepspeed.comm as dist

    owned: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    for group, params in enumerate(optimizer.round_robin_bit16_groups):
        num_partitions = dist.get_world_size(group=optimizer.real_dp_process_group[group])
        partition_size = int(optimizer.partition_size[group])
        ranks = _ranks_of_partition(num_partitions, dp_size)
        offset = 0
        for i, (param, padding) in enumerate(
            zip(params, optimizer.round_robin_bit16_padding[group], strict=True)
        ):
            for partition, start, numel in _cut(offset, param.numel(), partition_size):
                form = _WHOLE if numel == param.numel() else _LATER if start else _FIRST
                for rank in ranks[partition]:
                    owned[rank].append((group, i, form, numel))
            offset += param.numel() + int(padding)
    return [tuple(fragments) for fragments in owned]


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
