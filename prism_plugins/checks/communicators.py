"""How many NCCL communicators a rank opens, and the memory they take."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.program.prediction import ClassMemory, Finding

_MANY = 24
"""From here on it is worth a word."""


def communicator_findings(memory: Sequence[ClassMemory]) -> list[Finding]:
    """An info for jobs whose ranks open many communicators."""
    worst = max(memory, key=lambda m: len(_names(m)), default=None)
    if worst is None or len(_names(worst)) < _MANY:
        return []
    names = _names(worst)
    total = sum(worst.outside_torch[name] for name in names)
    return [
        Finding(
            kind="communicators",
            severity="info",
            ranks=worst.ranks,
            message=f"{worst.name} opens {len(names)} NCCL communicators: {total / 2**30:.1f} GiB of its memory",
        )
    ]


def _names(memory: ClassMemory) -> list[str]:
    return [name for name in memory.outside_torch if name.startswith("nccl ")]
