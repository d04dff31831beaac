"""Which ranks to slice, and which ranks each slice stands for.

A role is a pipeline stage × (first rank of its tensor-parallel group or not), and × the position in the context-parallel group
where ranks differ by it. Ranks of one role run the same program but for the members of their groups and, with a distributed optimizer, their shard of it. Stages that
hold the same (equal fingerprint) and are neither first nor last share a slice when their schedules can be built
from its phases.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from prism_plugins.program.schedule import missing_for, parts_of
from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.layout import Layout


class Representative(msgspec.Struct, frozen=True, kw_only=True):
    """A rank to slice."""

    rank: int
    depends_on: tuple[int, ...] = ()
    """Ranks whose slices must have ended before this one starts, because their journals serve it."""


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one pipeline stage that are (or are not) first in their tensor-parallel group."""

    stage: int
    tp_first: bool
    cp: int | None = None
    """Position in the context-parallel group; None: of all positions."""
    captured_stage: int
    """The stage whose slice this role's program comes from; its own when it is sliced itself."""
    representative: int
    """The rank that is sliced."""

    @property
    def sliced(self) -> bool:
        """True when the representative belongs to this very role."""
        return self.stage == self.captured_stage


def plan_representatives(facts: JobFacts) -> tuple[Representative, ...]:
    """The ranks to slice, rank 0 first, each with the ranks whose journals it needs.

    Rank 0 tells all others whether there is anything to train on (stages without data do not know). First
    tensor-parallel ranks tell their peers batches and sizes. Where stages exchange headers, the stage before tells
    the next one.
    The last rank of the world is always among them: frameworks print the training log there.
    """
    chosen: dict[int, tuple[int, ...]] = {}
    for role in sorted(plan_roles(facts), key=lambda r: not r.tp_first):
        if role.sliced:
            chosen[role.representative] = dependencies(facts, role.representative)
    last = facts.layout.world_size - 1
    chosen.setdefault(last, dependencies(facts, last))
    return tuple(Representative(rank=rank, depends_on=deps) for rank, deps in chosen.items())


def dependencies(facts: JobFacts, rank: int, *, sliced: Collection[int] = ()) -> tuple[int, ...]:
    """Ranks whose journals a rank's slice needs, ascending: rank 0; for other than first tensor-parallel ranks the
    first one of a stage that holds the same; where stages exchange headers, one of the stage before among those
    ``sliced``, or the one that stands for it."""
    if rank == 0:
        return ()
    coords = facts.layout.coords(rank)
    cp = coords["cp"] if facts.context_ranks_differ else None
    roles = {(role.stage, role.tp_first): role for role in plan_roles(facts) if role.cp == cp}
    needed = {0}
    if coords["tp"]:
        needed.add(roles[coords["pp"], True].representative)
    if facts.stage_headers and coords["pp"]:
        before = [
            r
            for r in sliced
            if facts.layout.coords(r) | {"dp": 0} == coords | {"pp": coords["pp"] - 1, "dp": 0}
        ]
        # Otherwise the nearest stage before whose slice is not of this stage or a later one.
        before += [
            role.representative
            for stage in range(coords["pp"] - 1, -1, -1)
            if (role := roles[stage, coords["tp"] == 0]).captured_stage < coords["pp"]
        ]
        needed.add(before[0])
    return tuple(sorted(needed - {rank}))


def plan_roles(facts: JobFacts) -> tuple[Role, ...]:
    """Every role of the job, by stage, the first tensor-parallel ranks first."""
    layout = facts.layout
    captured = captured_stages(facts.stages)
    positions = range(layout.cp) if facts.context_ranks_differ else (None,)
    return tuple(
        Role(
            stage=stage,
            tp_first=tp_first,
            cp=cp,
            captured_stage=captured[stage],
            representative=_representative(layout, captured[stage], tp_first, cp),
        )
        for stage in range(layout.pp)
        for tp_first in ((True, False) if layout.tp > 1 else (True,))
        for cp in positions
    )


def ranks_of_role(layout: Layout, role: Role) -> np.ndarray:
    """Ranks of a role, ascending."""
    axes = list(reversed(layout.sizes()))
    grid = np.moveaxis(layout.grid(), [axes.index(axis) for axis in ("pp", "tp", "cp")], (0, 1, 2))
    ranks = grid[role.stage, :1] if role.tp_first else grid[role.stage, 1:]
    return np.sort((ranks if role.cp is None else ranks[:, role.cp]).ravel())


def captured_stages(stages: tuple[StageInfo, ...]) -> list[int]:
    """For every stage the one to slice for it.

    First and last stage stand for themselves. Among middle stages of equal fingerprint the fewest slices are
    chosen (greedily, earlier stages preferred) from whose phases the schedules of the others can be built.
    """
    captured = list(range(len(stages)))
    middle: dict[str, list[int]] = {}
    for stage in range(1, len(stages) - 1):
        middle.setdefault(stages[stage].fingerprint, []).append(stage)
    for members in middle.values():
        parts = {stage: parts_of(stages[stage].schedule) for stage in members}
        serves = {
            stage: {
                other
                for other in members
                if other == stage or (stages[stage].schedule and not missing_for(parts[stage], parts[other]))
            }
            for stage in members
        }
        open_stages = set(members)
        while open_stages:
            best = max(members, key=lambda stage: (len(serves[stage] & open_stages), -stage))
            for other in serves[best] & open_stages:
                captured[other] = best
            open_stages -= serves[best]
    return captured


def _representative(layout: Layout, stage: int, tp_first: bool, cp: int | None) -> int:
    """A rank of the role: the last rank of the world where the role holds it and rank 0 is elsewhere."""
    holds_last = (
        stage == layout.pp - 1 and tp_first == (layout.tp == 1) and (cp is None or cp == layout.cp - 1)
    )
    if holds_last and (layout.pp * layout.tp > 1 or cp):
        return layout.world_size - 1
    coords = dict.fromkeys(layout.sizes(), 0) | {"pp": stage, "tp": 0 if tp_first else 1, "cp": cp or 0}
    return layout.rank_of(coords)
