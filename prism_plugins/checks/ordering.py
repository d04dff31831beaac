"""Calls on different communicators must come in the same order on all ranks that share them.

NCCL kernels of two communicators may hold each other's SMs: when one rank starts A before B and another B before A,
both can wait for ever, even where they are asynchronous or on streams of their own.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from prism_plugins.checks.calls import CellCalls, JobCalls, few
from prism_plugins.program.calls import P2P, phase_at
from prism_plugins.program.prediction import Finding
from prism_plugins.simulate.faults import compact_ranks

_MAX_FINDINGS = 8


def ordering_findings(job: JobCalls) -> list[Finding]:
    """A warning for each pair of communicators that ranks use in different orders. For jobs whose calls match."""
    found: dict[tuple, Finding] = {}
    kind_of, heads = _kinds(job)
    shared_by: dict[tuple[int, int], np.ndarray] = {}
    for index in heads:
        cell = job.cells[index]
        for g, h in combinations(sorted(_groups(cell)), 2):
            ranks_g, ranks_h = cell.program.groups[g].ranks, cell.program.groups[h].ranks
            shared = shared_by.get((id(ranks_g), id(ranks_h)))
            if shared is None:
                shared = np.intersect1d(np.array(ranks_g), np.array(ranks_h))
                shared_by[id(ranks_g), id(ranks_h)] = shared
            if len(shared) < 2:
                continue
            pair = tuple(job.quotient.communicator[index, x] for x in (g, h))
            key = tuple(sorted(pair))
            others = np.unique(job.quotient.cell_of_rank[shared])
            _, first = np.unique(kind_of[others], return_index=True)
            for other in others[first].tolist() if key not in found else ():
                if kind_of[other] == kind_of[index]:
                    continue
                finding = _compare(job, (index, other), pair, shared)
                if finding is not None:
                    found[key] = finding
                    break
            if len(found) >= _MAX_FINDINGS:
                return list(found.values())
    return list(found.values())


def _kinds(job: JobCalls) -> tuple[np.ndarray, list[int]]:
    """(kind of each cell, a cell of each kind): cells of a class with the same order of groups are of one kind."""
    numbers: dict[tuple, int] = {}
    kind_of = np.zeros(len(job.cells), dtype=np.int64)
    for index, cell in enumerate(job.cells):
        group = np.array([comm.group for comm in cell.program.comms], dtype=np.int64)
        order = group[cell.ops.comm].tobytes() if len(cell.ops) else b""
        key = (job.quotient.cells[index].class_index, order)
        kind_of[index] = numbers.setdefault(key, len(numbers))
    _, heads = np.unique(kind_of, return_index=True)
    return kind_of, heads.tolist()


def _groups(cell: CellCalls) -> set[int]:
    return {
        cell.program.comms[int(calls.comm[0])].group
        for (channel, _), calls in cell.sides.items()
        if not channel.is_pair
    }


def _compare(job: JobCalls, cells: tuple[int, int], pair: tuple, shared: np.ndarray) -> Finding | None:
    rows = []
    for index in cells:
        cell = job.cells[index]
        label = np.full(len(cell.program.comms), -1, dtype=np.int64)
        for i, comm in enumerate(cell.program.comms):
            communicator = job.quotient.communicator.get((index, comm.group))
            if comm.kind not in P2P and communicator in pair:
                label[i] = pair.index(communicator)
        labels = label[cell.ops.comm] if len(cell.ops) else np.zeros(0, np.int64)
        at = np.flatnonzero(labels >= 0)
        rows.append((labels[at], cell.ops.event[at], cell.ops.comm[at]))
    (a, events_a, comms_a), (b, events_b, comms_b) = rows
    if len(a) != len(b) or np.array_equal(a, b):
        return None
    first = int(np.flatnonzero(a != b)[0])
    one, two = (job.cells[index] for index in cells)
    ranks = [np.intersect1d(cell.ranks, shared) for cell in (one, two)]
    return Finding(
        kind="order",
        severity="warning",
        ranks=compact_ranks(tuple(np.union1d(*ranks).tolist())),
        phase=phase_at(one.program, int(events_a[first])),
        message=(
            f"ranks {few(ranks[0])} call {one.text(int(comms_a[first]), int(events_a[first]))} on "
            f"{one.group_text(int(comms_a[first]))} where ranks {few(ranks[1])} call "
            f"{two.text(int(comms_b[first]), int(events_b[first]))} on {two.group_text(int(comms_b[first]))}: "
            "communicators used in different orders can hang on NCCL"
        ),
    )
