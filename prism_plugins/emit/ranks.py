"""Compact lists of ranks, as the tables print them and the command line takes them: ``0-7,64-71``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prism_plugins.errors import PrismError


def format_ranks(ranks: Iterable[int] | np.ndarray, *, max_runs: int = 0) -> str:
    """Ranks as ascending runs, ``0-7,64-71``. With ``max_runs``, later runs become ``…`` and the total is added."""
    sorted_ranks = np.unique(
        np.asarray(ranks if isinstance(ranks, np.ndarray) else list(ranks), dtype=np.int64)
    )
    if not len(sorted_ranks):
        return ""
    breaks = np.flatnonzero(np.diff(sorted_ranks) != 1) + 1
    firsts = sorted_ranks[np.concatenate(([0], breaks))]
    lasts = sorted_ranks[np.concatenate((breaks - 1, [len(sorted_ranks) - 1]))]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    if max_runs and len(runs) > max_runs:
        return ",".join(runs[:max_runs]) + f",… ({len(sorted_ranks)} ranks)"
    return ",".join(runs)


def shorten_ranks(text: str, *, max_runs: int = 3) -> str:
    """A list made by :func:`format_ranks`, cut to its first runs, with the number of ranks."""
    runs = text.split(",")
    if len(runs) <= max_runs:
        return text
    total = 0
    for run in runs:
        first, _, last = run.partition("-")
        total += int(last or first) - int(first) + 1
    return ",".join(runs[:max_runs]) + f",… ({total} ranks)"


def parse_ranks(text: str, *, world_size: int, what: str = "--ranks") -> tuple[int, ...]:
    """Ranks of a list such as ``0-15,512`` or ``all``, ascending. Raises :class:`PrismError` for anything else."""
    if text.strip() == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise PrismError(
                f"{what}: {item.strip()!r} is not a rank or a range of ranks; write e.g. 0-15,512 or all"
            )
        high = int(last or first)
        if high >= world_size:
            raise PrismError(
                f"{what}: rank {high} is outside the world of {world_size} ranks (0-{world_size - 1})"
            )
        ranks.update(range(int(first), high + 1))
    return tuple(sorted(ranks))
