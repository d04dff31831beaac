"""Jobs that fit as long as their experts are equally loaded."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.moe_load import BALANCED
from prism_plugins.program.model import MemoryCategory
from prism_plugins.program.prediction import ClassMemory, Finding
from prism_plugins.world.layout import Layout

_GIB = 2**30
_UNEVEN = 2.0
"""Tokens of the busiest expert-parallel rank over the mean: what fits with so many is not worth a word."""
_CLOSE = 1.25
"""Below this it is a warning."""


def expert_load_findings(layout: Layout, memory: Sequence[ClassMemory], moe_load: str) -> list[Finding]:
    """For jobs that spread experts over ranks and were emulated with balanced ones: the class that is nearest to its limit,
    where a rank whose experts get up to twice the mean might not fit.

    The activations live at the peak grow with the tokens of a rank's experts, at most in proportion (those outside of the
    experts do not): an upper bound, which an emulation with ``--prism-moe-load`` replaces.
    """
    if layout.ep == 1 or moe_load != BALANCED:
        return []
    factors = {}
    for index, one in enumerate(memory):
        room = one.capacity_bytes - one.device_used_bytes
        activations = one.by_category.get(MemoryCategory.ACTIVATIONS, 0)
        if room > 0 and activations > 0:
            factors[index] = 1 + room / activations
    if not factors:
        return []
    worst = min(factors, key=lambda index: factors[index])
    factor, one = factors[worst], memory[worst]
    if factor >= _UNEVEN:
        return []
    return [
        Finding(
            kind="oom",
            severity="warning" if factor < _CLOSE else "info",
            ranks=one.ranks,
            phase=one.peak_phase,
            message=(
                f"borderline: {one.name} fits with equally loaded experts ({one.device_used_bytes / _GIB:.1f} GiB of "
                f"{one.capacity_bytes / _GIB:.1f} GiB), but may not where the experts of a rank get more than {factor:.2f} times the "
                f"mean (if all {one.by_category[MemoryCategory.ACTIVATIONS] / _GIB:.1f} GiB of activations grow with them): try "
                "--prism-moe-load zipf:1.2, or a recorded histogram"
            ),
        )
    ]
