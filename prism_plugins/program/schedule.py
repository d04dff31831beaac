"""Schedules as sequences of phases, and whether one stage's phases suffice to build another stage's schedule.

Between two phases lies a *gap*: the events from the end of one to the begin of the next. What a gap holds is
decided by the classes of the phases on its two sides (in 1F1B the token count is added after ``send_forward``
during warm-up and after ``forward`` later). So a stage's program can stand for another one's when it has, for
every phase of the other's schedule, a phase that does the same and, for every pair of neighbours, such a pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from prism_plugins.program.model import Phase

PhaseClass = tuple[str, tuple[str, ...], int]
"""Kind, names of the parts in alphabetical order, chunk where no micro-batch tells it."""

BOUNDARY: PhaseClass = ("", (), -1)
"""Stands for what comes before the first and after the last phase."""


def phase_class(phase: Phase) -> PhaseClass:
    """Phases of one class do the same work on different data.

    The parts of a p2p phase stand in the order in which they are issued. Where that order depends on the stage
    (even stages send first, odd ones receive first), it does not make another class.
    """
    chunk = -1 if phase.microbatch >= 0 else phase.chunk
    return (phase.kind, tuple(sorted(name for name, _ in phase.parts)), chunk)


def gap_classes(schedule: Sequence[Phase]) -> list[tuple[PhaseClass, PhaseClass]]:
    """Classes of the ``len(schedule) + 1`` gaps of a schedule, the outer ones included."""
    classes = [BOUNDARY, *map(phase_class, schedule), BOUNDARY]
    return list(itertools.pairwise(classes))


def is_bound(phase: Phase) -> bool:
    """True for phases whose content belongs to their micro-batch and chunk (forward, backward).

    The last micro-batch's backward may launch gradient reductions, the first forward may wait for parameters:
    such a phase only stands for itself, where a p2p phase stands for all of its class.
    """
    return phase.microbatch >= 0


class ScheduleParts(NamedTuple):
    """What a schedule is made of, in the order in which it first has each."""

    phases: dict[Phase, PhaseClass]
    unbound: frozenset[PhaseClass]
    """Classes of the phases that stand for all of their class."""
    gaps: dict[tuple[PhaseClass, PhaseClass], None]


def parts_of(schedule: Sequence[Phase]) -> ScheduleParts:
    """Once per schedule, for many :func:`missing_for`."""
    phases = {phase: phase_class(phase) for phase in schedule}
    return ScheduleParts(
        phases=phases,
        unbound=frozenset(cls for phase, cls in phases.items() if not is_bound(phase)),
        gaps=dict.fromkeys(gap_classes(schedule)),
    )


def missing_for(captured: ScheduleParts, target: ScheduleParts) -> str:
    """What ``target`` needs that ``captured`` does not have, in words; empty when it can be built."""
    fresh = target.phases.keys() - captured.phases.keys()
    if any(is_bound(phase) or target.phases[phase] not in captured.unbound for phase in fresh):
        for phase, cls in target.phases.items():
            if phase in fresh and (is_bound(phase) or cls not in captured.unbound):
                return f"phase {describe(phase)}"
    for before, after in target.gaps:
        if (before, after) not in captured.gaps:
            return f"the step from {before[0] or 'the start'} to {after[0] or 'the end'}"
    return ""


def describe(phase: Phase) -> str:
    """A phase in a few words, for messages: ``forward[mb 3 chunk 1]``, ``send_forward_recv_backward[2,0]``."""
    if phase.microbatch >= 0:
        chunk = f" chunk {phase.chunk}" if phase.chunk > 0 else ""
        return f"{phase.kind}[mb {phase.microbatch}{chunk}]"
    ordinals = ",".join(str(k) for _, k in phase.parts)
    return f"{phase.kind}[{ordinals}]" if ordinals else phase.kind
