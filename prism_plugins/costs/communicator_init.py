"""How long a rank takes to open its NCCL communicators, before or in its first iteration.

torch opens a communicator at the first call on it, one after another on each rank; groups without a common member open theirs at
the same time. Seconds for one communicator, by its size:

========  =======  =========================================================================================
ranks     s        where from
========  =======  =========================================================================================
2         0.195    own, two H200s of one host, NCCL 2.28.9: 0.18 to 0.21, first collective included
8         0.24     one host, without loading kernels: log in github.com/NVIDIA/nccl-tests/issues/273 (0.66 - 0.42)
98304     265      Meta, stock NCCL on "96k" GPUs, arXiv:2510.20171 (initialisation as a whole, one figure)
========  =======  =========================================================================================

In between it is linear: NCCL's bootstrap gathers around a ring of all ranks, ``N - 1`` steps (github.com/NVIDIA/nccl/pull/1791).
Older versions took far longer: 2 s for 8 and 4 s for 32 ranks (V100s, 2021, nccl/issues/534), 2.5 minutes at some thousand
(2024, nccl/issues/1156). On top, own measurements on the two H200s: 0.6 s with the first communicator of a process (kernels are
loaded), 0.2 s with the first all_to_all or batched send/recv on one, 0.14 s for the pair that an unbatched send/recv opens.

Not priced: communicators of one rank; connections of all_to_all or batched messages to more than one partner; torch's store
through which the ids go (with it MegaScale, arXiv:2402.15627, measured minutes at 2048 GPUs before it was replaced).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prism_plugins.program.memory_device import CommunicatorUse
from prism_plugins.program.prediction import CommunicatorStart

_RANKS = (2, 8, 98304)
_SECONDS = (0.195, 0.24, 265.0)
FIRST_SECONDS = 0.6
MESSAGES_SECONDS = 0.2
PAIR_SECONDS = 0.14


def communicator_seconds(num_ranks: int) -> float | None:
    """One communicator beyond a process's first; None where nothing is known."""
    if not _RANKS[0] <= num_ranks <= _RANKS[-1]:
        return None
    return float(np.interp(num_ranks, _RANKS, _SECONDS))


def communicator_start(uses: Iterable[CommunicatorUse], *, num_bytes: int, ranks: str) -> CommunicatorStart:
    """What opening a rank's communicators takes.

    Args:
        uses: The rank's communicators.
        num_bytes: Their memory.
        ranks: Whose, as text.
    """
    uses = list(uses)
    seconds, not_priced, opened = 0.0, 0, 0
    for use in uses:
        if use.collective or use.near_peers or use.far_peers:
            opened += 1
            own = communicator_seconds(len(use.ranks))
            if own is None:
                not_priced += 1
            else:
                seconds += own + (MESSAGES_SECONDS if use.near_peers or use.far_peers else 0.0)
        opened += use.pairs
        seconds += use.pairs * PAIR_SECONDS
    if opened > not_priced:
        seconds += FIRST_SECONDS
    return CommunicatorStart(
        ranks=ranks, count=opened, memory_bytes=num_bytes, init_seconds=seconds, not_priced=not_priced
    )
