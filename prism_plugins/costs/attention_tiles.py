"""How well the thread blocks of an attention kernel fill a GPU.

A block works on one tile of queries (backward: of keys) of one head and walks through the tiles of the other side; under a
causal mask only those that the mask leaves. Blocks are issued in order, each to the place that is free first. What the
last of them waste, and what they spend before and after their walk, is up to a third of a short kernel and next to
nothing of a long one.
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import NamedTuple

_MOST_BLOCKS_PER_SLOT = 16
"""Heads beyond this are taken to fill the GPU evenly."""


class Tiles(NamedTuple):
    """Of one kernel."""

    blocks_per_sm: int
    queries: int
    keys: int
    prologue: float
    """What a block spends outside its walk, in tiles."""


FLASH_FORWARD = Tiles(2, 128, 64, 2.0)
"""FlashAttention-2 (csrc/flash_attn/src/flash_fwd_launch_template.h): 128 x 64 or 128 x 128, two blocks an SM. The
prologues, and the tiles of the kernels below, are those that fit an H200's times best among 64 and 128, 0 to 4."""
FLASH_BACKWARD = Tiles(1, 128, 128, 2.0)
CUDNN = Tiles(1, 128, 128, 2.0)
EFFICIENT_FORWARD = Tiles(2, 64, 64, 1.0)
EFFICIENT_BACKWARD = Tiles(1, 64, 128, 1.0)


@functools.lru_cache(maxsize=4096)
def log_waste(
    tiles: Tiles, *, heads: int, queries: int, keys: int, causal: bool, backward: bool, num_sms: int
) -> float:
    """Logarithm of the kernel's time over that of its arithmetic spread evenly, half of it under a causal mask.

    ``heads``: of all sequences of the batch.
    """
    rows, columns = math.ceil(queries / tiles.queries), math.ceil(keys / tiles.keys)
    if backward:
        costs = [rows - (i * tiles.keys // tiles.queries if causal else 0) for i in range(columns)]
    else:
        costs = [
            min(columns, math.ceil((i + 1) * tiles.queries / tiles.keys)) if causal else columns
            for i in range(rows)
        ]
    work = [max(1, cost) + tiles.prologue for cost in costs]
    slots = num_sms * tiles.blocks_per_sm
    simulated = min(heads, math.ceil(_MOST_BLOCKS_PER_SLOT * slots / len(work)))
    free = [0.0] * slots
    for _ in range(simulated):
        for cost in work:
            heapq.heapreplace(free, free[0] + cost)
    span = max(free) + (heads - simulated) * sum(work) / slots
    even = heads * queries * keys / (tiles.queries * tiles.keys) / (2 if causal else 1) / slots
    return math.log(span / even)
