"""The communication of all ranks, arranged by channel: what each member calls on it, in order.

A channel is a communicator (all members meet in every call), or a pair on it (sends meet receives). Ranks of equal
program and equal surroundings are one cell (:mod:`prism_plugins.simulate.quotient`), so the work grows with what
differs, not with the number of ranks.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.base import Price
from prism_plugins.program.calls import P2P, agreement, communication_digest, describe, phase_at
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import CommSignature, Program
from prism_plugins.simulate.compile import CommOps, comm_ops
from prism_plugins.simulate.quotient import Quotient, World, refine, survey
from prism_plugins.simulate.sources import ClassSource

_LIMIT = 6


class Channel(msgspec.Struct, frozen=True):
    """A communicator of the quotient, or messages between two cells on it."""

    communicator: int
    sender: int = -1
    receiver: int = -1
    distance: int = 0
    """How far around the group a message within a cell travels."""

    @property
    def is_pair(self) -> bool:
        """Whether it carries messages."""
        return self.sender >= 0


class Calls(msgspec.Struct, frozen=True):
    """What one side calls on one channel, in order: arrays of equal length."""

    key: np.ndarray
    """Number of what has to agree (equal numbers agree)."""
    event: np.ndarray
    """Row of the program's events."""
    comm: np.ndarray
    """Index into ``Program.comms``."""


class CellCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one cell."""

    ranks: np.ndarray
    program: Program
    ops: CommOps
    sides: dict[tuple[Channel, str], Calls]
    """By channel and side: ``member <group index>``, ``send`` or ``recv``."""

    def text(self, comm: int, event: int) -> str:
        """A call for people: what, where in the source, in which phase."""
        c = self.program.comms[comm]
        return call_text(c) + f" (phase {phase_at(self.program, event)})"

    def group_text(self, comm: int) -> str:
        """Its group for people, as the first rank of the cell knows it."""
        group = self.program.groups[self.program.comms[comm].group]
        return f"{group.desc or group.name} (ranks {few(group.ranks)})"


class JobCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of all ranks."""

    quotient: Quotient
    world: World
    cells: tuple[CellCalls, ...]
    keys: tuple[tuple, ...]
    """What each key number stands for."""

    def channels(self) -> dict[Channel, list[tuple[int, str, Calls]]]:
        """Per channel its sides: (cell, side, calls)."""
        found: dict[Channel, list[tuple[int, str, Calls]]] = {}
        for index, cell in enumerate(self.cells):
            for (channel, side), calls in cell.sides.items():
                found.setdefault(channel, []).append((index, side, calls))
        return found


def call_text(comm: CommSignature) -> str:
    """``all_reduce of 4096 bfloat16 at train.py:31``."""
    what = describe((agreement(comm),))
    if comm.kind in P2P:
        what = f"{comm.kind} of {max(comm.in_numel, comm.out_numel)} {comm.dtype}"
    elif comm.kind == "all_to_all":
        uneven = " in uneven shares" if comm.send_splits or comm.recv_splits else ""
        what = f"all_to_all of {comm.in_numel} {comm.dtype}{uneven}"
    if comm.reduce_op not in ("", "SUM"):
        what += f" ({comm.reduce_op})"
    return what + (f" at {comm.site}" if comm.site else "")


def few(ranks: tuple[int, ...] | list[int] | np.ndarray) -> str:
    """Ranks as runs, long lists cut: ``0-7,64``."""
    from prism_plugins.simulate.faults import compact_ranks

    return compact_ranks(tuple(int(r) for r in ranks))


def calls_of_job(job: JobPrograms) -> JobCalls:
    """Arrange the calls of all ranks. Never raises for what is wrong with them."""
    job = _distinct(job)
    sources = [ClassSource(job, index) for index in range(len(job.classes))]
    world = survey(job, sources, _NoPrices(), attendance=False)
    quotient = refine(sources, world, with_variants=True)
    keys: dict[tuple, int] = {}
    cells = []
    for cell in quotient.cells:
        program = sources[cell.class_index].branch(int(cell.ranks[0]), 0)
        cells.append(_cell_calls(quotient, cell.index, cell.ranks, program, keys))
    return JobCalls(quotient=quotient, world=world, cells=tuple(cells), keys=tuple(keys))


def _distinct(job: JobPrograms) -> JobPrograms:
    """The job without variants that call what their class's exemplar calls: most differ in their optimizer's kernels."""
    classes = []
    for cls in job.classes:
        usual = communication_digest(cls.exemplar)
        keys = set(cls.variant_of.values())
        different = {key for key in keys if communication_digest(cls.variants[key]) != usual}
        classes.append(
            msgspec.structs.replace(
                cls,
                variants={key: cls.variants[key] for key in different},
                variant_of={rank: key for rank, key in cls.variant_of.items() if key in different},
            )
        )
    return msgspec.structs.replace(job, classes=tuple(classes))


class _NoPrices:
    """Stands in for the pricer: where members sit does not matter here."""

    def price_comm(self, program: Program, comm: CommSignature) -> Price:
        """Everything costs the same."""
        return _NOTHING


_NOTHING = Price(duration_ns=0.0, rule="", provenance="free")


def _cell_calls(
    quotient: Quotient, index: int, ranks: np.ndarray, program: Program, keys: dict[tuple, int]
) -> CellCalls:
    ops = comm_ops(program)
    single = np.ones(len(ops), dtype=bool)
    single[list(ops.batches)] = False
    table = np.array([keys.setdefault(((_strict(c),)), len(keys)) for c in program.comms], dtype=np.int64)
    op, comm = np.flatnonzero(single), ops.comm[single]
    key = table[comm] if len(comm) else comm
    event = ops.event[single]
    extra: list[tuple[int, int, int, int]] = []
    for number, parts in ops.batches.items():
        together: dict[int, list[int]] = {}
        for part in parts:
            if program.comms[part].kind in P2P:
                extra.append((number, part, int(table[part]), int(ops.event[number])))
            else:
                together.setdefault(program.comms[part].group, []).append(part)
        for same in together.values():
            what = tuple(_strict(program.comms[part]) for part in same)
            extra.append((number, same[0], keys.setdefault(what, len(keys)), int(ops.event[number])))
    if extra:
        more = [np.array(column, dtype=np.int64) for column in zip(*extra, strict=True)]
        op, comm, key, event = (
            np.concatenate(pair) for pair in zip((op, comm, key, event), more, strict=True)
        )
        order = np.argsort(op, kind="stable")
        comm, key, event = comm[order], key[order], event[order]
    sides: dict[tuple[Channel, str], list[np.ndarray]] = {}
    for i in np.unique(comm).tolist():
        where = _channel(quotient, index, program, i)
        if where is not None:
            sides.setdefault(where, []).append(np.flatnonzero(comm == i))
    arranged = {}
    for where, positions in sides.items():
        at = np.sort(np.concatenate(positions))
        arranged[where] = Calls(key[at], event[at], comm[at])
    return CellCalls(ranks=ranks, program=program, ops=ops, sides=arranged)


def _channel(quotient: Quotient, cell: int, program: Program, i: int) -> tuple[Channel, str] | None:
    comm = program.comms[i]
    communicator = quotient.communicator.get((cell, comm.group))
    if communicator is None:
        return None
    if comm.kind not in P2P:
        return Channel(communicator), f"member {comm.group}"
    peer = quotient.peers.get((cell, i))
    if peer is None:
        return None
    sender, receiver = (cell, peer) if comm.kind == "send" else (peer, cell)
    distance = 0
    if sender == receiver:
        ranks = program.groups[comm.group].ranks
        own = ranks.index(program.rank)
        distance = (comm.peer - own if comm.kind == "send" else own - comm.peer) % len(ranks)
    return Channel(communicator, sender, receiver, distance), comm.kind


def _strict(comm: CommSignature) -> tuple:
    """What has to agree, and what NCCL does not notice but spoils the result."""
    return (*agreement(comm), comm.dtype, comm.reduce_op)
