"""Allocated memory of a rank over the iteration, by what it is for."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from prism_plugins.program.memory import CATEGORIES, category_of_allocations
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
    blocks = block_bytes(found.nbytes)
    dies = found.died < n
    # An event's change is there from the row behind it on; what was live at the start has row -1.
    rows = np.concatenate((found.born, found.died[dies])) + 1
    changes = np.concatenate((blocks, -blocks[dies]))
    category = np.concatenate((found.category, found.category[dies]))
    total = np.cumsum(np.bincount(rows, weights=changes, minlength=n + 1))  # exact: far below 2**53
    at = np.concatenate(([0.0], np.maximum.accumulate(times.host_ns)))
    stretch = np.minimum((at * points / max(total_ns, 1.0)).astype(np.int64), points - 1)
    first = np.flatnonzero(np.diff(stretch, prepend=-1)).tolist()
    chosen = np.array(
        [low + int(np.argmax(total[low:high])) for low, high in itertools.pairwise([*first, n + 1])]
    )
    levels = np.zeros((len(CATEGORIES), len(chosen) + 1))
    np.add.at(levels, (category, np.searchsorted(chosen, rows)), changes)
    levels = np.cumsum(levels[:, :-1], axis=1).astype(np.int64)
    highest = levels.max(axis=1)
    order = [i for i in np.argsort(-highest, kind="stable").tolist() if highest[i]]
    return MemoryCurve(
        at_ns=at[chosen].tolist(), by_category={CATEGORIES[i]: levels[i].tolist() for i in order}
    )
