"""Where data-parallel ranks with different optimizer shards part.

Variants of a class share their events up to their optimizer. The fork of a class is the first event in which a
variant differs; it is then moved forward in time until every communicator has served the same number of calls on all its
members before their forks, so that no call has one member before and another behind the fork.
"""

from __future__ import annotations

import numpy as np

from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import Program
from prism_plugins.simulate.compile import Stretch
from prism_plugins.simulate.quotient import Quotient


def fork_points(job: JobPrograms, quotient: Quotient, stretches: list[Stretch]) -> list[int]:
    """Per cell of the coarse quotient, the event index at which its trunk ends."""
    fork = [_first_difference(job.classes[cell.class_index]) for cell in quotient.cells]
    channels: dict[tuple, dict[tuple, list[int]]] = {}
    for cell, stretch in zip(quotient.cells, stretches, strict=True):
        channel_of = [
            _channel(quotient, cell.index, stretch.program, c) for c in range(len(stretch.program.comms))
        ]
        for op, event in enumerate(stretch.ops.first_event.tolist()):
            for part in stretch.ops.parts(op):
                key, side = channel_of[part]
                channels.setdefault(key, {}).setdefault((cell.index, side), []).append(event)
    for cell, stretch in zip(quotient.cells, stretches, strict=True):
        fork[cell.index] = _before_open_batch(fork[cell.index], stretch)
    changed = True
    while changed:
        changed = False
        for sides in channels.values():
            served = min(int(np.searchsorted(events, fork[cell])) for (cell, _), events in sides.items())
            for (cell, _), events in sides.items():
                if served < len(events) and events[served] < fork[cell]:
                    fork[cell] = _before_open_batch(events[served], stretches[cell])
                    changed = True
    return fork


def _channel(quotient: Quotient, cell: int, program: Program, part: int) -> tuple[tuple, str]:
    comm = program.comms[part]
    communicator = quotient.communicator[cell, comm.group]
    if comm.kind not in ("send", "recv"):
        return (communicator,), "member"
    peer = quotient.peers[cell, part]
    pair = (cell, peer) if comm.kind == "send" else (peer, cell)
    return (communicator, *pair), comm.kind


def _before_open_batch(fork: int, stretch: Stretch) -> int:
    ops = stretch.ops
    cut = ops.first_event[(ops.first_event < fork) & (fork <= ops.event)]
    return int(cut.min()) if len(cut) else fork


def _first_difference(cls: RankClass) -> int:
    base = cls.exemplar
    fork = len(base.events)
    for variant in cls.variants.values():
        fork = min(fork, _difference(base, variant))
    return fork


def _difference(a: Program, b: Program) -> int:
    """First event in which two programs differ, tables resolved."""
    n = min(len(a.events), len(b.events))
    different = a.events[:n] != b.events[:n]
    kind, ref = a.events["kind"][:n], a.events["ref"][:n]
    for which, left, right in (
        (0, a.signatures, b.signatures),
        (1, a.comms, b.comms),
        (10, a.phases, b.phases),
    ):
        if left is right:
            continue
        unequal = np.array([x is not y and x != y for x, y in zip(left, right, strict=False)], dtype=bool)
        unequal = np.append(unequal, np.ones(abs(len(left) - len(right)) + 1, dtype=bool))
        mine = kind == which
        different[mine] |= unequal[np.minimum(ref[mine], len(unequal) - 1)]
    where = np.flatnonzero(different)
    return int(where[0]) if len(where) else n
