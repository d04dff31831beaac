"""The distributed optimizer's phase for another data-parallel rank's shard of the parameters."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import Program
from prism_plugins.program.slices import OptimizerShard
from prism_plugins.world.layout import Layout

RankShards = tuple[OptimizerShard, ...]
"""What one rank owns in each optimizer of the chain, in step order."""


def shards_of_rank(layout: Layout, shards: tuple[OptimizerShard, ...], rank: int) -> RankShards:
    """The shards a rank owns, one per optimizer of the chain; empty when optimizer state is replicated.

    The sharding axis is dp × cp (dense) or the experts' dp. An optimizer that shards over blocks of this axis
    only (several optimizer instances) repeats its shards block after block.
    """
    owned = []
    for optimizer in sorted({s.optimizer for s in shards}):
        of_optimizer = [s for s in shards if s.optimizer == optimizer]
        position = sharding_position(layout, rank, expert=of_optimizer[0].expert)
        by_index = {s.index: s for s in of_optimizer}
        owned.append(by_index[position % len(by_index)])
    return tuple(owned)


def sharding_position(layout: Layout, rank: int, *, expert: bool) -> int:
    """Position of a rank in the group its optimizer shards over (members ascending)."""
    sizes = layout.sizes(expert=expert)
    axes = [axis for axis in reversed(sizes) if axis in ("dp", "cp")]
    coords = layout.coords(rank, expert=expert)
    return int(np.ravel_multi_index([coords[a] for a in axes], [sizes[a] for a in axes]))


def same_work(a: RankShards, b: RankShards) -> bool:
    """True when two ranks' optimizers do the same (equal fragments, whatever their index)."""
    return work_of(a) == work_of(b)


def work_of(shards: RankShards) -> tuple[OptimizerShard, ...]:
    """Shards without their index: equal for ranks that run the same optimizer phase."""
    return tuple(msgspec.structs.replace(s, index=0) for s in shards)


def derive_shard(program: Program, *, captured: RankShards, target: RankShards) -> Program:
    """The program with the optimizer phase and optimizer state of another rank's shards.

    Raises :class:`CannotDeriveError`.
    """
    if same_work(captured, target):
        return program
    raise CannotDeriveError("optimizer shards cannot be derived yet")
