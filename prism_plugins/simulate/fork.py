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
    difference = [_first_difference(cls) for cls in job.classes]
    fork = [
        _before_open_batch(difference[cell.class_index], stretch)
        for cell, stretch in zip(quotient.cells, stretches, strict=True)
    ]
    channels: dict[tuple, dict[tuple, np.ndarray]] = {}
    for cell, stretch in zip(quotient.cells, stretches, strict=True):
        for key, side, events in _calls(quotient, cell.index, stretch):
            channels.setdefault(key, {})[cell.index, side] = events
    changed = True
    while changed:
        changed = False
        for sides in channels.values():
            served = min(int(np.searchsorted(events, fork[cell])) for (cell, _), events in sides.items())
            for (cell, _), events in sides.items():
                if served < len(events) and events[served] < fork[cell]:
                    fork[cell] = _before_open_batch(int(events[served]), stretches[cell])
                    changed = True
    return fork


def _calls(quotient: Quotient, cell: int, stretch: Stretch):
    """Per channel and side of a cell: the first events of the ops that use it, ascending."""
    ops, program = stretch.ops, stretch.program
    single = np.ones(len(ops), dtype=bool)
    single[list(ops.batches)] = False
    first = [
        ops.first_event[single],
        *(np.full(len(p), ops.first_event[op]) for op, p in ops.batches.items()),
    ]
    comm = [ops.comm[single], *(np.array(p) for p in ops.batches.values())]
    first, comm = np.concatenate(first), np.concatenate(comm)
    found: dict[tuple, list[np.ndarray]] = {}
    for i in np.unique(comm).tolist():
        found.setdefault(_channel(quotient, cell, program, i), []).append(first[comm == i])
    for (key, side), events in found.items():
        yield key, side, np.sort(np.concatenate(events))


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
    left, right = (x.events[:n].view("<i8").reshape(-1, 2) for x in (a, b))  # 16 bytes an event
    different = (left != right).any(axis=1)
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
