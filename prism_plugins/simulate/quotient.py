"""The quotient of the world: ranks that see the same thing become one cell.

A cell is a set of ranks of one class (and one optimizer variant) such that every member meets the same composition of
cells in each of its communicators, the same cell at the other end of each p2p call, and the same prices. Then all
members have equal times, and one lane per cell stands for all. The partition is the coarsest one with this
property that refines the classes (colour refinement), so it is exact by construction; a perfectly symmetric job keeps its
classes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from prism_plugins.costs.base import Price
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import CommSignature, Program
from prism_plugins.simulate.faults import Party, SimulationFault
from prism_plugins.simulate.prices import comm_ranks
from prism_plugins.simulate.sources import ClassSource


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks with equal times."""

    index: int
    class_index: int
    ranks: np.ndarray
    """Ascending."""
    stage: int
    """Pipeline stage of its ranks."""
    program: Program
    """Of ``ranks[0]``; of a branch, from the fork on."""


class Quotient(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of the world and how its cells communicate."""

    cells: tuple[Cell, ...]
    cell_of_rank: np.ndarray
    communicator: dict[tuple[int, int], int]
    """(cell, index into ``Program.groups``) → quotient communicator."""
    members: tuple[tuple[tuple[int, int], ...], ...]
    """Per quotient communicator: the distinct (cell, group index) of its members."""
    peers: dict[tuple[int, int], int]
    """(cell, index into ``Program.comms``) of a p2p call → cell at the other end."""


class World(msgspec.Struct, kw_only=True):
    """Every rank's communicators and peers, flattened; computed once and refined as often as needed."""

    num_ranks: int
    class_of_rank: np.ndarray
    variant_of_rank: np.ndarray
    """Key of the variant, -1 for the exemplar."""
    entry_rank: np.ndarray
    """One entry per (rank, used group)."""
    entry_group: np.ndarray
    entry_communicator: np.ndarray
    communicator_label: np.ndarray
    """uint64 per communicator: what distinguishes it besides its members (its price)."""
    p2p_rank: np.ndarray
    """One entry per (rank, p2p call)."""
    p2p_comm: np.ndarray
    p2p_peer: np.ndarray
    p2p_label: np.ndarray
    disturbed: np.ndarray | None = None
    """Per rank: equal for ranks that are disturbed equally; None: nobody is."""


class PricesCalls(Protocol):
    """What :func:`survey` needs of a pricer."""

    def price_comm(self, program: Program, comm: CommSignature) -> Price:
        """Price one call."""
        ...


def survey(
    job: JobPrograms, sources: list[ClassSource], pricer: PricesCalls, *, attendance: bool = True
) -> World:
    """Walk over all ranks once. Costs some microseconds per rank and group.

    Raises :class:`SimulationFault` when members of a group take part in no collective that others call on it, if
    ``attendance`` is to be checked.
    """
    num_ranks = job.layout.world_size
    class_of_rank = np.full(num_ranks, -1, dtype=np.int64)
    variant_of_rank = np.full(num_ranks, -1, dtype=np.int64)
    entries: list[tuple[int, int, int]] = []
    p2p: list[tuple[int, int, int, int]] = []
    communicators = _Communicators()
    for index, cls in enumerate(job.classes):
        class_of_rank[cls.ranks] = index
        source = sources[index]
        for rank in cls.ranks.tolist():
            variant_of_rank[rank] = cls.variant_of.get(rank, -1)
            program, calls = source.program_of(rank), source.calls(rank)
            communicators.begin_rank()
            for g in calls.groups:
                probe = calls.collective.get(g)
                entries.append((rank, g, communicators.number(program, g, probe, pricer)))
            for c in calls.p2p:
                comm = program.comms[c]
                pair = comm_ranks(rank, program.groups[comm.group], comm)
                label = hash(pricer.price_comm(program, comm).duration_ns)
                p2p.append((rank, c, pair[0] if comm.kind == "recv" else pair[1], label))
    if (class_of_rank < 0).any():
        raise ValueError(f"rank {int(np.argmin(class_of_rank))} belongs to no class")
    e = np.array(entries, dtype=np.int64).reshape(-1, 3)
    q = np.array(p2p, dtype=np.int64).reshape(-1, 4)
    if attendance:
        communicators.check_attendance(e[:, 2], e[:, 0])
    return World(
        num_ranks=num_ranks,
        class_of_rank=class_of_rank,
        variant_of_rank=variant_of_rank,
        entry_rank=e[:, 0],
        entry_group=e[:, 1],
        entry_communicator=e[:, 2],
        communicator_label=np.array(communicators.labels, dtype=np.int64).astype(np.uint64),
        p2p_rank=q[:, 0],
        p2p_comm=q[:, 1],
        p2p_peer=q[:, 2],
        p2p_label=q[:, 3].astype(np.uint64),
    )


class _Communicators:
    """Numbers communicators: groups of equal members and description, and the n-th of that name on each rank."""

    def __init__(self) -> None:
        self.labels: list[int] = []
        """Per communicator: a hash of what a collective on it costs, which tells where its members sit."""
        self._number: dict[tuple, int] = {}
        self._ranks: dict[int, tuple[tuple[int, ...], int]] = {}
        """id of a tuple of ranks → the tuple (kept alive) and its number."""
        self._tuples: dict[tuple[int, ...], int] = {}
        self._collective: dict[int, tuple[Program, int]] = {}
        self._seen: dict[tuple[int, str], int] = {}

    def begin_rank(self) -> None:
        """Start counting a rank's groups of the same name."""
        self._seen = {}

    def number(self, program: Program, g: int, probe: int | None, pricer: PricesCalls) -> int:
        """The communicator of a program's group; ``probe`` is a collective on it, if there is one."""
        group = program.groups[g]
        known = self._ranks.get(id(group.ranks))
        if known is None:
            known = (group.ranks, self._tuples.setdefault(group.ranks, len(self._tuples)))
            self._ranks[id(group.ranks)] = known
        name = (known[1], group.desc)
        ordinal = self._seen[name] = self._seen.get(name, -1) + 1
        key = (*name, ordinal)
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self.labels)
            price = 0.0 if probe is None else pricer.price_comm(program, program.comms[probe]).duration_ns
            self.labels.append(hash(price))
        if probe is not None and number not in self._collective:
            self._collective[number] = (program, probe)
        return number

    def check_attendance(self, communicator: np.ndarray, rank: np.ndarray) -> None:
        """Every member of a group with collectives has to call some; p2p needs only its two sides."""
        present = np.bincount(communicator, minlength=len(self.labels))
        for number, (program, probe) in self._collective.items():
            comm = program.comms[probe]
            group = program.groups[comm.group]
            if present[number] == len(group.ranks):
                continue
            here = set(rank[communicator == number].tolist())
            raise SimulationFault(
                kind="hang",
                group=group.desc or group.name,
                sequence=0,
                waiting=Party(
                    ranks=tuple(sorted(here)), call=f"{comm.kind} of {comm.nbytes} bytes", phase="any"
                ),
                other=Party(
                    ranks=tuple(sorted(set(group.ranks) - here)),
                    call="no call of this group at all",
                    phase="any",
                ),
            )


def refine(sources: list[ClassSource], world: World, *, with_variants: bool) -> Quotient:
    """The coarsest exact partition that refines the classes (and the optimizer variants)."""
    colour = world.class_of_rank
    for label in (world.variant_of_rank if with_variants else None, world.disturbed):
        if label is not None:
            _, colour = np.unique(np.stack((colour, label)), axis=1, return_inverse=True)
            colour = colour.reshape(-1)
    count = int(colour.max()) + 1
    while True:
        met = _composition(world, colour)
        signature = np.zeros(world.num_ranks, dtype=np.uint64)
        np.add.at(signature, world.entry_rank, _mix(_mix(world.entry_group) ^ met[world.entry_communicator]))
        np.add.at(
            signature,
            world.p2p_rank,
            _mix(_mix(world.p2p_comm + (1 << 40)) ^ _mix(colour[world.p2p_peer]) ^ world.p2p_label),
        )
        _, finer = np.unique(np.stack((colour.astype(np.uint64), signature)), axis=1, return_inverse=True)
        finer = finer.reshape(-1)
        if int(finer.max()) + 1 == count:
            break
        colour, count = finer, int(finer.max()) + 1
    return _quotient(sources, world, colour, count)


def _composition(world: World, colour: np.ndarray) -> np.ndarray:
    """Per communicator, a hash of the multiset of its members' (colour, group index)."""
    members = np.zeros(len(world.communicator_label), dtype=np.uint64)
    np.add.at(
        members,
        world.entry_communicator,
        _mix(_mix(colour[world.entry_rank]) + world.entry_group.astype(np.uint64)),
    )
    return _mix(members ^ _mix(world.communicator_label))


def _quotient(sources: list[ClassSource], world: World, colour: np.ndarray, count: int) -> Quotient:
    order = np.argsort(colour, kind="stable")
    bounds = np.searchsorted(colour[order], np.arange(count + 1))
    groups = [order[bounds[i] : bounds[i + 1]] for i in range(count)]
    # Cells in the order of their classes, then of their first rank.
    groups.sort(key=lambda ranks: (int(world.class_of_rank[ranks[0]]), int(ranks[0])))
    cell_of_rank = np.empty(world.num_ranks, dtype=np.int64)
    cells = []
    for i, ranks in enumerate(groups):
        cell_of_rank[ranks] = i
        class_index = int(world.class_of_rank[ranks[0]])
        program = sources[class_index].program_of(int(ranks[0]))
        stage = sources[class_index].stage_of(int(ranks[0]))
        cells.append(Cell(index=i, class_index=class_index, ranks=ranks, stage=stage, program=program))
    communicator, members = _communicators(world, cells, cell_of_rank)
    heads = {int(c.ranks[0]): c.index for c in cells}
    mine = np.flatnonzero(np.isin(world.p2p_rank, np.array(sorted(heads))))
    peers = {
        (heads[int(world.p2p_rank[i])], int(world.p2p_comm[i])): int(cell_of_rank[world.p2p_peer[i]])
        for i in mine.tolist()
    }
    return Quotient(
        cells=tuple(cells),
        cell_of_rank=cell_of_rank,
        communicator=communicator,
        members=members,
        peers=peers,
    )


def _communicators(world: World, cells: list[Cell], cell_of_rank: np.ndarray):
    """Communicators whose members belong to the same cells are one quotient communicator."""
    # Each distinct (communicator, cell, group) once; communicators of one quotient share all of theirs.
    member = np.unique(
        np.stack((world.entry_communicator, cell_of_rank[world.entry_rank], world.entry_group)), axis=1
    )
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(x: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    last: dict[int, tuple[int, int]] = {}
    for communicator, cell, group in zip(*member.tolist(), strict=True):
        node = (cell, group)
        first = last.setdefault(communicator, node)
        parent[find(node)] = find(first)
    index: dict[tuple[int, int], int] = {}
    members: list[list[tuple[int, int]]] = []
    of: dict[tuple[int, int], int] = {}
    for node in sorted(parent):
        root = find(node)
        if root not in index:
            index[root] = len(members)
            members.append([])
        members[index[root]].append(node)
        of[node] = index[root]
    return of, tuple(tuple(m) for m in members)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: spreads integers over 64 bits."""
    z = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
