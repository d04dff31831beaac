"""Allocated memory of one rank over an iteration, thin enough to draw."""

from __future__ import annotations

import numpy as np

from prism_plugins.program.model import EventKind, Program

MAX_POINTS = 2000
_BLOCK_BYTES = 512
"""The caching allocator's unit."""


def allocated_curve(program: Program, at: np.ndarray) -> list[tuple[int, int]]:
    """(time, bytes allocated) pairs: the highest value of each of at most :data:`MAX_POINTS` equal stretches.

    ``at`` is the time of every row of the program's events, shape (num_events,), integer and ascending.
    """
    events = program.events
    is_alloc = events["kind"] == EventKind.ALLOC
    rows = np.flatnonzero(is_alloc | (events["kind"] == EventKind.FREE))
    if not len(rows):
        return []
    is_alloc = is_alloc[rows]
    refs = events["ref"][rows]
    ids = np.concatenate((np.array([a.id for a in program.initial], dtype=np.int64), refs[is_alloc]))
    sizes = np.concatenate(
        (np.array([a.nbytes for a in program.initial], dtype=np.int64), events["value"][rows][is_alloc])
    )
    sizes = -(-sizes // _BLOCK_BYTES) * _BLOCK_BYTES
    order = np.argsort(ids)
    size = sizes[order][np.searchsorted(ids[order], refs)]
    level = int(sizes[: len(program.initial)].sum()) + np.cumsum(np.where(is_alloc, size, -size))
    times = at[rows]
    stretch = (times - times[0]) * MAX_POINTS // max(int(times[-1] - times[0]), 1)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    return list(zip(times[first].tolist(), np.maximum.reduceat(level, first).tolist(), strict=True))
