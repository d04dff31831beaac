"""How a search is done."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to search."""

    budget_s: float = float("inf")
    chosen: dict[str, tuple[str, ...]] = {}
    """By knob, the values that are allowed."""
    emulations: int = 3
    """At most so many layouts are emulated in full, besides the own launch; 0: none, nor the own one."""
    variants: tuple[tuple[str, float], ...] = ()
    """Further (what, value) to compose the best layout for; see :class:`prism_plugins.tune.result.Variant`."""
    verify: int = 0
    """So many of the best run as slices on this machine's GPU."""
    executor: str = "local"
    workers: int = 1
    """Emulations at a time, with an executor that has other machines."""
    slurm: tuple[str, ...] = ()
    everything: bool = False
    """Compose and emulate every legal layout that may fit: to check the search itself."""
    out: str = ""
