"""A class's program for any of its members: only the groups differ, and with them the peers of p2p calls.

A process group is a product set in the dense or in the expert grid of the layout: along some axes it has several
members (all of them, or a subset such as first and last stage), along the others it sits at its owner's
coordinate. Another rank's group has the same members along the first and that rank's coordinate along the
others, so going from one rank to another adds one offset to all members of a group.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec
import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import CommSignature, GroupInfo, Program
from prism_plugins.world.layout import Layout


class GroupFit(msgspec.Struct, frozen=True, kw_only=True):
    """How a group lies in a grid of the layout."""

    expert: bool
    """Which grid."""
    members: dict[str, tuple[int, ...]]
    """Coordinates along the axes in which it has more than one member."""
    whole: bool
    """It spans all of each of these axes."""


class Instantiator:
    """Makes the programs of other ranks from one rank's program; each costs microseconds.

    The program of a rank in another pipeline stage is right only if the events are: deriving those is the
    business of :mod:`prism_plugins.program.derive`.
    """

    def __init__(self, program: Program, layout: Layout) -> None:
        self._program = program
        self._layout = layout
        self._own = {expert: layout.coords(program.rank, expert=expert) for expert in (False, True)}
        self._used = {comm.group for comm in program.comms}
        self._fits = [self._fit(index) for index in range(len(program.groups))]
        self._p2p = [i for i, comm in enumerate(program.comms) if comm.kind in ("send", "recv")]
        self._made: dict[tuple[int, int], GroupInfo] = {}

    def program_of(self, rank: int, *, like: Program | None = None) -> Program:
        """The program as ``rank`` runs it; shares everything that does not depend on the rank.

        ``like``: a variant with the same tables of groups and comms, whose events are taken instead.
        Raises :class:`CannotDeriveError` when a group it uses does not exist for that rank.
        """
        own = self._program
        source = own if like is None else like
        if rank == own.rank and source is own:
            return own
        groups, comms = own.groups, own.comms
        if rank != own.rank:
            groups = [self._group(index, rank) for index in range(len(own.groups))]
            comms = self._comms(groups, rank)
        return Program(
            rank=rank,
            events=source.events,
            signatures=source.signatures,
            comms=comms,
            groups=groups,
            phases=source.phases,
            initial=source.initial,
            source="inferred" if source.source == "sliced" and source.rank != rank else source.source,
        )

    def fits(self, variant: Program) -> bool:
        """True when a variant has this program's tables of groups and comms, moved to its rank."""
        moved = self.program_of(variant.rank)
        return moved.comms == variant.comms and [g.ranks for g in moved.groups] == [
            g.ranks for g in variant.groups
        ]

    def _fit(self, index: int) -> GroupFit | None:
        group = self._program.groups[index]
        fit = fit_group(self._layout, group, self._program.rank)
        if fit is None and index in self._used:
            raise CannotDeriveError(
                f"group {group.desc or group.name} of rank {self._program.rank} (ranks {_few(group.ranks)}) "
                "is no product set in the dense or expert grid"
            )
        return fit

    def _group(self, index: int, rank: int) -> GroupInfo:
        group, fit = self._program.groups[index], self._fits[index]
        if fit is None:  # nothing uses it
            return group
        offset = self._offset(fit, rank)
        if offset is None:
            if index in self._used:
                raise CannotDeriveError(
                    f"rank {rank} has no group like {group.desc or group.name} of rank {self._program.rank} "
                    f"(ranks {_few(group.ranks)})"
                )
            return group
        if offset == 0:
            return group
        made = self._made.get((index, offset))
        if made is None:
            made = msgspec.structs.replace(group, ranks=tuple(r + offset for r in group.ranks))
            self._made[index, offset] = made
        return made

    def _offset(self, fit: GroupFit, rank: int) -> int | None:
        layout = self._layout
        own = self._own[fit.expert]
        moved = dict(own)
        for axis, target in layout.coords(rank, expert=fit.expert).items():
            members = fit.members.get(axis)
            if members is None:
                moved[axis] = target
            elif target not in members:
                shift = _subset_shift(axis, members, target, layout.sizes(expert=fit.expert)[axis])
                if shift is None:
                    return None
                moved[axis] = own[axis] + shift
        return layout.rank_of(moved, expert=fit.expert) - self._program.rank

    def _comms(self, groups: list[GroupInfo], rank: int) -> list[CommSignature]:
        """The comms table with the peers of p2p calls at the same distance from ``rank``."""
        comms = self._program.comms
        moved: list[CommSignature] | None = None
        peers: dict[tuple[int, int], int] = {}
        for i in self._p2p:
            comm = comms[i]
            peer = peers.get((comm.group, comm.peer))
            if peer is None:
                peer = self._peer(comm, self._fits[comm.group], groups[comm.group], rank)
                peers[comm.group, comm.peer] = peer
            if peer != comm.peer:
                moved = list(comms) if moved is None else moved
                moved[i] = msgspec.structs.replace(comm, peer=peer)
        return comms if moved is None else moved

    def _peer(self, comm: CommSignature, fit: GroupFit, group: GroupInfo, rank: int) -> int:
        layout, expert = self._layout, fit.expert
        sizes = layout.sizes(expert=expert)
        own = self._own[expert]
        peer = layout.coords(self._program.groups[comm.group].ranks[comm.peer], expert=expert)
        target = layout.coords(rank, expert=expert)
        moved = {axis: (target[axis] + peer[axis] - own[axis]) % size for axis, size in sizes.items()}
        peer_rank = layout.rank_of(moved, expert=expert)
        # Ranks are ascending in all but exotic groups, which may be as large as the world.
        index = bisect_left(group.ranks, peer_rank)
        if index < len(group.ranks) and group.ranks[index] == peer_rank:
            return index
        try:
            return group.ranks.index(peer_rank)
        except ValueError:
            raise CannotDeriveError(
                f"rank {rank}: the peer of a {comm.kind} of rank {self._program.rank} in group "
                f"{group.desc or group.name} has no counterpart"
            ) from None


def fit_group(layout: Layout, group: GroupInfo, rank: int) -> GroupFit | None:
    """How a group that ``rank`` belongs to lies in the layout's grids; None when it is no product set in either.

    Where it fits both grids, whole axes are preferred to subsets, then the expert grid for groups whose
    description says so, then the dense grid.
    """
    if rank not in group.ranks:
        return None
    fits = [f for f in (_fit_in(layout, group.ranks, expert) for expert in (False, True)) if f is not None]
    says_expert = "expert" in group.desc.lower()
    return min(fits, key=lambda f: (not f.whole, f.expert != says_expert), default=None)


def _fit_in(layout: Layout, ranks: tuple[int, ...], expert: bool) -> GroupFit | None:
    sizes = layout.sizes(expert=expert)
    members = np.array(ranks)
    if members.max() >= layout.world_size:
        return None
    index = np.unravel_index(members, tuple(reversed(sizes.values())))
    along = {
        axis: tuple(np.unique(column).tolist()) for axis, column in zip(reversed(sizes), index, strict=True)
    }
    if int(np.prod([len(coordinates) for coordinates in along.values()])) != len(ranks):
        return None
    varying = {axis: coordinates for axis, coordinates in along.items() if len(coordinates) > 1}
    whole = all(len(coordinates) == sizes[axis] for axis, coordinates in varying.items())
    return GroupFit(expert=expert, members=varying, whole=whole)


def _subset_shift(axis: str, members: tuple[int, ...], target: int, size: int) -> int | None:
    """How far a subset of an axis moves to contain ``target``: by blocks (0-3 → 4-7) or residues (0,2 → 1,3).

    A subset of the stages is a statement about those stages and does not move.
    """
    if axis == "pp" or size % len(members):
        return None
    step = members[1] - members[0]
    if members != tuple(range(members[0], members[0] + step * len(members), step)):
        return None
    if step == 1 and members[0] % len(members) == 0:
        return (target // len(members)) * len(members) - members[0]
    if step == size // len(members) and members[0] < step:
        return target % step - members[0]
    return None


def _few(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks[:8])) + (f",… ({len(ranks)})" if len(ranks) > 8 else "")
