"""The programs of all ranks, as classes of ranks that run the same program."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from prism_plugins.program.model import Program
from prism_plugins.world.layout import Layout


class RankClass(msgspec.Struct, kw_only=True):
    """Ranks whose programs are equal up to which members their groups have."""

    name: str
    """For people: ``stage 0 · tp 0``, ``stage 3 · tp 1-7``."""
    ranks: np.ndarray
    """Global ranks, ascending."""
    representative: int
    """The rank that was sliced (or from whose program this class was derived)."""
    exemplar: Program
    """The program with the groups of ``ranks[0]``."""
    variants: Mapping[int, Program] = {}
    """Ranks of the class whose program differs from the exemplar's (optimizer shards), by rank; each stands for
    the ranks in ``variant_of`` that map to it."""
    variant_of: dict[int, int] = {}
    """Rank → key of ``variants``; ranks that are absent run the exemplar."""
    heaviest: int | None = None
    """Key of the variant that may hold the most memory, where that is known."""
    approximated: frozenset[int] = frozenset()
    """Ranks whose program is that of a similar rank: communication and phases are theirs, sizes of other ops are not."""


class JobPrograms(msgspec.Struct, kw_only=True):
    """All ranks of the target world."""

    layout: Layout
    classes: tuple[RankClass, ...]

    def class_of(self, rank: int) -> int:
        """Index of the class a rank belongs to."""
        for i, c in enumerate(self.classes):
            j = int(np.searchsorted(c.ranks, rank))
            if j < len(c.ranks) and int(c.ranks[j]) == rank:
                return i
        raise KeyError(rank)
