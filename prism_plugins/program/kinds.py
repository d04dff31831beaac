"""Kinds of data-parallel ranks: which to slice, and which sliced kind stands for one that is not.

With ZeRO 1 and 2 every rank owns another stretch of the flat buffer of parameters. What it copies, checks and
accumulates depends on how parameters are cut there; its communication does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from prism_plugins.program.shards import sharding_position
from prism_plugins.program.slices import JobFacts
from prism_plugins.world.classes import Role, plan_roles, ranks_of_role
from prism_plugins.world.layout import Layout

MAX_SLICED_IF_ALL = 8
"""Up to so many kinds are all sliced."""
MAX_SLICED = 6
"""Of more kinds so many."""


class KindIndex:
    """The kinds of one stage's ranks. False where all ranks are alike."""

    def __init__(self, layout: Layout, facts: JobFacts) -> None:
        self._layout = layout
        self._kinds = facts.shard_kinds
        self._kind_of = facts.kind_of

    def __bool__(self) -> bool:
        return len(self._kinds) > 1

    def kind(self, rank: int) -> int:
        """The kind of a rank."""
        return self._kind_of[sharding_position(self._layout, rank, expert=False)]

    def to_slice(self, ranks: Iterable[int], *, preferred: Collection[int]) -> dict[int, int]:
        """Kind → the rank to slice for it, of a role's ranks (ascending); one of ``preferred`` where there is one.

        All kinds if they are few. Else those of the first and the last rank, the most common one, and those that
        own the largest fragment, the most and the least: extremes of memory are among them.
        """
        first: dict[int, int] = {}
        counts: Counter[int] = Counter()
        last = -1
        for rank in ranks:
            kind = self.kind(rank)
            counts[kind] += 1
            if kind not in first or (rank in preferred and first[kind] not in preferred):
                first[kind] = rank
            last = kind
        kinds = list(first)
        if len(kinds) > MAX_SLICED_IF_ALL:
            total = {kind: sum(self._kinds[kind]) for kind in kinds}
            largest = {kind: max(self._kinds[kind], default=0) for kind in kinds}
            chosen = [
                kinds[0],
                last,
                *(self.kind(rank) for rank in first.values() if rank in preferred),
                max(kinds, key=lambda kind: (largest[kind], total[kind])),
                max(kinds, key=lambda kind: (total[kind], len(self._kinds[kind]))),
                min(kinds, key=lambda kind: (total[kind], largest[kind])),
                counts.most_common(1)[0][0],
            ]
            kinds = list(dict.fromkeys(chosen))[:MAX_SLICED]
        return {kind: first[kind] for kind in kinds}

    def nearest(self, kind: int, available: Iterable[int]) -> int:
        """The most similar kind: as many fragments, of the most similar sizes."""
        own = sorted(self._kinds[kind])

        def distance(other: int) -> tuple[int, int]:
            sizes = sorted(self._kinds[other])
            padded = [[0] * (len(own) + len(sizes) - len(one)) + one for one in (own, sizes)]
            return abs(len(own) - len(sizes)), sum(abs(a - b) for a, b in zip(*padded, strict=True))

        return min(available, key=distance)


def plan_kinds(facts: JobFacts) -> tuple[int, ...]:
    """Ranks of the lead slice's stage to slice, one of each kind worth it; the kinds of other stages become known when
    a rank of theirs was sliced."""
    index = KindIndex(facts.layout, facts)
    if not index:
        return ()
    ranks: list[int] = []
    for role in plan_roles(facts):
        if role.stage == 0:
            ranks += wanted_of_role(index, facts.layout, role).values()
    return tuple(ranks)


def wanted_of_role(
    index: KindIndex, layout: Layout, role: Role, *, without: Collection[int] = ()
) -> dict[int, int]:
    """Kind → rank to slice, for a role that is sliced itself; ``without`` ranks that stand for themselves only."""
    ranks = [rank for rank in ranks_of_role(layout, role).tolist() if rank not in without]
    return index.to_slice(ranks, preferred=(role.representative, layout.world_size - 1))
