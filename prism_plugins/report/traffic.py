"""Who sends how much to whom: a matrix over blocks of neighbouring ranks.

A message counts from its sender to its receiver. A collective is spread as a ring over its group: every rank sends its
bytes on the wire (nccl-tests' bus traffic) to the next; an all_to_all is spread evenly over the others.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.collectives import bus_factor
from prism_plugins.emit.job_view import JobView
from prism_plugins.program.infer import program_of
from prism_plugins.program.model import EventKind, Program

MAX_CELLS = 32
MAX_RANKS = 2048


class TrafficMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes an iteration; ``nbytes[i][j]`` from block i to block j."""

    block: int
    """Ranks of a row."""
    ranks: int
    """Ranks that were looked at, from 0."""
    nbytes: list[list[float]]


def traffic_matrix(view: JobView, *, gpus_per_node: int) -> TrafficMatrix:
    """The matrix of the first ranks of a job: single ranks, nodes, or several nodes a row, by its size."""
    ranks = min(view.world_size, MAX_RANKS)
    block = 1
    while -(-ranks // block) > MAX_CELLS:
        block = gpus_per_node if block < gpus_per_node else 2 * block
    cells = -(-ranks // block)
    matrix = np.zeros((cells, cells))
    counts: dict[int, np.ndarray] = {}
    for rank in range(ranks):
        program = program_of(view.job, rank)
        _add(matrix, program, block, ranks, counts)
    return TrafficMatrix(block=block, ranks=ranks, nbytes=matrix.tolist())


def _add(matrix: np.ndarray, program: Program, block: int, ranks: int, counts: dict[int, np.ndarray]) -> None:
    key = id(program.events)
    if key not in counts:
        events = program.events
        counts[key] = np.bincount(
            events["ref"][events["kind"] == EventKind.COMM], minlength=len(program.comms)
        )
    row = program.rank // block
    for ref in np.flatnonzero(counts[key]).tolist():
        comm, times = program.comms[ref], int(counts[key][ref])
        members = program.groups[comm.group].ranks
        if len(members) < 2 or comm.kind == "recv":
            continue
        if comm.kind == "send":
            if 0 <= comm.peer < len(members) and members[comm.peer] < ranks:
                matrix[row, members[comm.peer] // block] += comm.nbytes * times
            continue
        wire = comm.nbytes * bus_factor(comm.kind, len(members)) * times
        if comm.kind == "all_to_all":
            for peer in members:
                if peer < ranks and peer != program.rank:
                    matrix[row, peer // block] += wire / (len(members) - 1)
            continue
        following = members[(members.index(program.rank) + 1) % len(members)]
        if following < ranks:
            matrix[row, following // block] += wire
