"""Where data-parallel ranks with different optimizer shards part.

Variants of a class share their events up to their optimizer. The fork of a class is the first event in which a
variant differs; it is then moved forward in time until every communicator has served the same number of calls on all its
members before their forks, so that no call has one member before and another behind the fork.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prism_plugins.program.model import Program
from prism_plugins.simulate.compile import CommOps, comm_ops
from prism_plugins.simulate.quotient import Cell, Quotient
from prism_plugins.simulate.sources import ClassSource


def fork_points(sources: list[ClassSource], quotient: Quotient) -> list[int]:
    """Per cell of the coarse quotient, the event index at which its trunk ends."""
    ops = [comm_ops(cell.program) for cell in quotient.cells]
    difference = [source.first_difference() for source in sources]
    fork = [_before_open_batch(difference[cell.class_index], ops[cell.index]) for cell in quotient.cells]
    channels: dict[tuple, dict[tuple, np.ndarray]] = {}
    for cell in quotient.cells:
        for key, side, events in _calls(quotient, cell, ops[cell.index]):
            channels.setdefault(key, {})[cell.index, side] = events
    # A cell that parts before its first call on a channel has none in its trunk; nor may the others have.
    for key, sides in channels.items():
        if len(key) == 1:
            everybody = [(cell, "member") for cell, _ in quotient.members[key[0]]]
        else:
            everybody = [(key[1], "send"), (key[2], "recv")]
        for side in everybody:
            sides.setdefault(side, np.zeros(0, dtype=np.int64))
    changed = True
    while changed:
        changed = False
        for sides in channels.values():
            served = min(int(np.searchsorted(events, fork[cell])) for (cell, _), events in sides.items())
            for (cell, _), events in sides.items():
                if served < len(events) and events[served] < fork[cell]:
                    fork[cell] = _before_open_batch(int(events[served]), ops[cell])
                    changed = True
    return fork


def _calls(quotient: Quotient, cell: Cell, ops: CommOps) -> Iterator[tuple[tuple, str, np.ndarray]]:
    """Per channel and side of a cell: the first events of the ops that use it, ascending."""
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
        found.setdefault(_channel(quotient, cell.index, cell.program, i), []).append(first[comm == i])
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


def _before_open_batch(fork: int, ops: CommOps) -> int:
    cut = ops.first_event[(ops.first_event < fork) & (fork <= ops.event)]
    return int(cut.min()) if len(cut) else fork
