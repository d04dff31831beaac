"""Are recorded iterations the same device program, and after how many do they repeat? Compared by hash, with run-wide ids made relative."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from prism_plugins.program.model import EventKind

_IGNORED = (EventKind.ALLOC, EventKind.FREE, EventKind.HOST)
"""Host memory management (the garbage collector frees when it likes) and host time are not device work."""
_CUDA_EVENTS = (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC)


def iteration_hash(events: np.ndarray) -> str:
    """Hash of an iteration's device events: kernels, communication, waits, streams and phases, in order.

    Signature, comm and phase indices are interned by the recorder and so equal between iterations. Work ids and
    CUDA event ids are unique in the slice; they count from their first use here.
    """
    device = events[~np.isin(events["kind"], _IGNORED)]
    ids = np.zeros(len(device), dtype=np.int64)
    ids[:] = device["ref"]
    works = np.zeros(len(device), dtype=np.int64)
    is_comm = device["kind"] == EventKind.COMM
    is_wait = device["kind"] == EventKind.WORK_WAIT
    works[is_comm] = device["value"][is_comm]
    works[is_wait] = device["ref"][is_wait]
    ids[is_wait] = 0
    of_work = is_comm | is_wait
    works[of_work] = _by_first_use(works[of_work])
    of_event = np.isin(device["kind"], _CUDA_EVENTS)
    ids[of_event] = _by_first_use(ids[of_event])
    digest = hashlib.blake2b(digest_size=16)
    for column in (device["kind"], device["flags"], device["stream"], ids, works):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def period_of(digests: Sequence[str]) -> int:
    """After how many iterations the last ones repeat: 1 when the last two are equal, n when the last n are the n before;
    0 when nothing repeats."""
    for period in range(1, len(digests) // 2 + 1):
        if digests[-period:] == digests[-2 * period : -period]:
            return period
    return 0


def _by_first_use(ids: np.ndarray) -> np.ndarray:
    """Renumber by order of first appearance."""
    if not len(ids):
        return ids
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    return order[inverse]
