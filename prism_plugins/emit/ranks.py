"""Compact lists of ranks, as the tables print them: ``0-7,64-71``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


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


def join_ranks(texts: Iterable[str]) -> str:
    """Lists made by :func:`format_ranks` as one."""
    ranks: list[int] = []
    for run in ",".join(texts).split(","):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return format_ranks(ranks)


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
