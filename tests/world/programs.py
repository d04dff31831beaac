"""Programs of which only the groups matter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism_plugins.program.model import EVENT_DTYPE, CommSignature, GroupInfo, Program


def program_with_groups(rank: int, groups: Sequence[GroupInfo]) -> Program:
    """A rank's program with a call on each group, and no event."""
    return Program(
        rank=rank,
        events=np.zeros(0, EVENT_DTYPE),
        signatures=[],
        comms=[
            CommSignature(kind="all_reduce", group=i, dtype="float32", in_numel=8, out_numel=8)
            for i in range(len(groups))
        ],
        groups=list(groups),
        phases=[],
        initial=[],
    )
