"""Allocated memory of a rank over the iteration, by what it is for."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.memory import category_of_allocations
from prism_plugins.program.memory_allocator import block_bytes
from prism_plugins.program.model import Program
from prism_plugins.simulate.timeline import OpTimes

POINTS = 160


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by category at the moment of most memory in each of equal stretches of the iteration."""

    at_ns: list[float]
    by_category: dict[str, list[int]]
    """Largest category first; blocks as the allocator rounds them."""


def memory_curve(program: Program, times: OpTimes, *, total_ns: float, points: int = POINTS) -> MemoryCurve:
    """The curve on the host's clock, when memory is allocated and freed."""
    found = category_of_allocations(program)
    n = len(program.events)
    names = sorted(set(found.category))
    blocks = block_bytes(found.nbytes)
    levels = np.zeros((len(names), n + 1), dtype=np.int64)
    category = np.array([names.index(c) for c in found.category], dtype=np.int64)
    np.add.at(levels, (category, found.born + 1), blocks)  # born -1: before the first event
    dies = found.died < n
    np.add.at(levels, (category[dies], found.died[dies] + 1), -blocks[dies])
    levels = np.cumsum(levels, axis=1)
    total = levels.sum(axis=0)
    at = np.concatenate(([0.0], np.maximum.accumulate(times.host_ns)))
    stretch = np.minimum((at * points / max(total_ns, 1.0)).astype(np.int64), points - 1)
    chosen = []
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), n + 1], strict=True):
        chosen.append(low + int(np.argmax(total[low:high])))
    order = np.argsort(-levels.max(axis=1, initial=0))
    return MemoryCurve(
        at_ns=at[chosen].tolist(),
        by_category={names[i]: levels[i][chosen].tolist() for i in order.tolist()},
    )
