"""The parameter fragments of every data-parallel rank, from the distributed optimizer's own range maps.

``DistributedOptimizer`` cuts each bucket of a gradient buffer into equal pieces without regard to parameters, so
every data-parallel rank owns other fragments of them. Its class methods that compute the ranges depend on the
rank only through the buffer's process group; here they are called once per rank with a group that answers as
that rank.
"""

from __future__ import annotations

from typing import Any

from prism_plugins.integrations.megatron.schedule import FakeGroup, replaced
from prism_plugins.program.slices import OptimizerShard

ORIGINAL_GROUPS = "_prism_original_param_groups"
"""Where :func:`remember_param_groups` keeps the model parameters of each group; Megatron replaces them by shards."""


def remember_param_groups(inner_optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups as they are before ``DistributedOptimizer.__init__`` replaces them."""
    if inner_optimizer is None:
        return []
    return [{"params": list(group["params"])} for group in inner_optimizer.param_groups]


def optimizer_shards(optimizers: list[Any]) -> tuple[OptimizerShard, ...]:
    """One shard per data-parallel rank and distributed optimizer, in chain order.

    ``optimizers`` are the members of the chain that hold parameters, in order; members that are not distributed
    have no shards.
    """
    import torch.distributed

    get_rank = torch.distributed.get_rank

    def rank_in(group: Any = None) -> int:
        return group.rank() if isinstance(group, FakeGroup) else get_rank(group)

    shards: list[OptimizerShard] = []
    with replaced(torch.distributed, {"get_rank": rank_in}):  # how megatron-core 0.12 asks a group
        for position, optimizer in enumerate(optimizers):
            groups = getattr(optimizer, ORIGINAL_GROUPS, None)
            if groups and hasattr(optimizer, "gbuf_ranges"):
                shards += _shards_of(optimizer, groups, position)
    return tuple(shards)


def _shards_of(optimizer: Any, groups: list[dict[str, Any]], position: int) -> list[OptimizerShard]:
    expert = any(not getattr(p, "allreduce", True) for group in groups for p in group["params"])
    return [
        _shard(optimizer, groups, position, index=index, expert=expert)
        for index in range(optimizer.data_parallel_group.size())
    ]


def _shard(
    optimizer: Any, groups: list[dict[str, Any]], position: int, *, index: int, expert: bool
) -> OptimizerShard:
    ranges = [
        type(optimizer)._build_gbuf_range_map(_OtherRank(buffer, index)) for buffer in optimizer.buffers
    ]
    _, group_ranges = type(optimizer)._build_optimizer_group_ranges([dict(group) for group in groups], ranges)
    numel_of = {
        param: param_range["param"].size
        for buffer_ranges in ranges
        for buckets in buffer_ranges.values()
        for bucket in buckets
        for param, param_range in bucket["param_map"].items()
    }
    fragments: list[tuple[int, bool]] = []
    uncounted: list[int] = []
    full_precision: list[int] = []
    for group in group_ranges:
        for param in sorted(group["params"], key=lambda p: not _is_full_precision(p)):
            if getattr(param, "shared", False):
                uncounted.append(len(fragments))
            if _is_full_precision(param):
                full_precision.append(len(fragments))
            fragments.append((numel_of[param], bool(getattr(param, "tensor_model_parallel", False))))
    return OptimizerShard(
        index=index,
        fragments=tuple(fragments),
        optimizer=position,
        expert=expert,
        group_sizes=tuple(len(group["params"]) for group in group_ranges),
        uncounted=tuple(uncounted),
        full_precision=tuple(full_precision),
    )


class _OtherRank:
    """A gradient buffer, the same on all ranks, as a rank of its group sees it."""

    def __init__(self, buffer: Any, index: int) -> None:
        self._buffer = buffer
        self.data_parallel_group = FakeGroup(buffer.data_parallel_group.size(), index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


def _is_full_precision(param: Any) -> bool:
    return str(param.dtype) == "torch.float32"
