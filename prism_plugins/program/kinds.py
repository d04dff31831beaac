"""Kinds of data-parallel ranks: which to slice, and which sliced kind stands for one that is not.

With ZeRO 1 and 2 every rank owns another stretch of the flat buffer of parameters. What it copies, checks and
accumulates depends on how parameters are cut there; its communication does not. One rank of each form
(:mod:`.flat_partitions`) is sliced, the programs of the others are derived. Where that cannot be done, or kinds are no
partitions, a few kinds are sliced and the most similar one stands for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from prism_plugins.program.flat_partitions import (
    Form,
    form_of,
    richness,
    shows,
    without_gradient,
    work_of,
)
from prism_plugins.program.shards import sharding_position
from prism_plugins.program.slices import JobFacts
from prism_plugins.world.classes import Role, plan_roles, ranks_of_role
from prism_plugins.world.layout import Layout

MAX_SLICED_IF_ALL = 8
"""Up to so many kinds are all sliced."""
MAX_SLICED = 6
"""Of more kinds so many."""


class KindIndex:
    """The kinds of one stage's ranks. False where all ranks are alike.

    Args:
        layout: The job's.
        facts: Of a slice of the stage.
        buckets: Parameters whose gradients that slice reduced together; none before it ran.
    """

    def __init__(self, layout: Layout, facts: JobFacts, buckets: Sequence[Sequence[int]] = ()) -> None:
        self._layout = layout
        self._kinds = facts.shard_kinds
        self._kind_of = facts.kind_of
        self.partitions = facts.partitions
        self._gradless = (
            without_gradient(facts.partitions, buckets) if facts.partitions is not None else frozenset()
        )
        self._forms: dict[int, Form] = {}

    def __bool__(self) -> bool:
        return len(self._kinds) > 1

    def kind(self, rank: int) -> int:
        """The kind of a rank."""
        return self._kind_of[sharding_position(self._layout, rank, expert=False)]

    def form(self, kind: int) -> Form | None:
        """The form of a kind; None where programs of other kinds are not derived."""
        if self.partitions is None:
            return None
        if kind not in self._forms:
            self._forms[kind] = form_of(self.partitions, kind, self._gradless)
        return self._forms[kind]

    def work(self, kind: int) -> tuple:
        """Equal for kinds whose programs are equal."""
        return work_of(self.partitions, kind)

    def to_slice(
        self, ranks: Iterable[int], *, preferred: Collection[int], underived: Collection[Form] = ()
    ) -> dict[int, int]:
        """Kind → the rank to slice for it, of a role's ranks (ascending); one of ``preferred`` where there is one.

        Of kinds that are derived one of each form; of the others, among them those of ``underived`` forms, as
        :meth:`_extremes`.
        """
        derived: dict[Form, dict[int, int]] = {}
        others: list[int] = []
        for rank in ranks:
            kind = self.kind(rank)
            form = self.form(kind)
            if form is None or form in underived:
                others.append(rank)
                continue
            first = derived.setdefault(form, {})
            if kind not in first or (rank in preferred and first[kind] not in preferred):
                first[kind] = rank
        chosen: dict[int, int] = {}
        for first in derived.values():
            kind = self._source(first, preferred)
            chosen[kind] = first[kind]
        return chosen | self._extremes(others, preferred)

    def _source(self, first: Mapping[int, int], preferred: Collection[int]) -> int:
        """Of kinds of one form the one to derive the others from."""
        partitions = self.partitions
        richest = max(first, key=lambda kind: (richness(partitions, kind), -first[kind]))
        if max(fragments for fragments, *_ in self.form(richest)) > 1:
            return richest
        # All show the same loops of one turn.
        enough = shows(partitions, richest)
        good = (kind for kind in first if first[kind] in preferred and shows(partitions, kind) == enough)
        return next(good, richest)

    def _extremes(self, ranks: Iterable[int], preferred: Collection[int]) -> dict[int, int]:
        """All kinds if they are few. Else those of the first and the last rank, the most common one, and those that
        own the largest fragment, the most and the least: extremes of memory are among them."""
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
        if not kinds:
            return {}
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
    index: KindIndex,
    layout: Layout,
    role: Role,
    *,
    without: Collection[int] = (),
    underived: Collection[Form] = (),
) -> dict[int, int]:
    """Kind → rank to slice, for a role that is sliced itself; ``without`` ranks that stand for themselves only.
    Forms in ``underived`` turned out not to be derivable."""
    ranks = [rank for rank in ranks_of_role(layout, role).tolist() if rank not in without]
    preferred = (role.representative, layout.world_size - 1)
    return index.to_slice(ranks, preferred=preferred, underived=underived)
