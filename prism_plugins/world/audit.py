"""Ranks that no slice represented are sliced after all, and their real programs compared with the inferred ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import numpy as np

from prism_plugins.program.compare import Difference, compare_communication, compare_programs
from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.memory import allocated_curve
from prism_plugins.program.model import Program
from prism_plugins.program.prediction import Audit
from prism_plugins.program.slices import JobFacts
from prism_plugins.world.classes import plan_roles, ranks_of_role


class RankAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One audited rank."""

    rank: int
    class_name: str
    difference: Difference | None
    peak_allocated_bytes: tuple[int, int]
    """Inferred and sliced."""
    approximated: bool = False
    """Its program was taken from a similar rank: only communication and phases have to be equal."""
    num_differing: int = 0
    """Device ops that differ, of an approximated rank."""

    @property
    def matched(self) -> bool:
        """Equal op by op, and so in memory; an approximated rank in communication and phases."""
        if self.approximated:
            return self.difference is None
        return self.difference is None and self.peak_allocated_bytes[0] == self.peak_allocated_bytes[1]

    @property
    def message(self) -> str:
        """One line for the report; names the first differing op, inferred ≠ sliced."""
        if self.matched:
            return f"rank {self.rank} ({self.class_name}) is as inferred"
        inferred, sliced = self.peak_allocated_bytes
        memory = "" if inferred == sliced else f"; peak allocated {inferred} B inferred, {sliced} B sliced"
        return (
            f"rank {self.rank} ({self.class_name}) is not as inferred: {self.difference or 'memory'}{memory}"
        )


def plan_audit(facts: JobFacts, count: int, *, sliced: Collection[int]) -> tuple[int, ...]:
    """``count`` ranks that were not sliced, chosen to differ most from what was sliced and from each other.

    Deterministic. Stages that are derived come first; then each next rank brings as many coordinates (stage, tp,
    cp, dp, ep) as possible that were not seen yet.
    """
    layout = facts.layout
    candidates = np.array([r for r in range(layout.world_size) if r not in set(sliced)], dtype=np.int64)
    derived = [ranks_of_role(layout, role) for role in plan_roles(facts) if not role.sliced]
    is_derived = np.isin(candidates, np.concatenate(derived) if derived else np.zeros(0, np.int64))
    coordinates = _coordinates(facts, candidates)
    seen = [
        set(column) for column in _coordinates(facts, np.array(sorted(sliced), dtype=np.int64)).T.tolist()
    ]
    chosen: list[int] = []
    for i in range(min(count, len(candidates))):
        fresh = sum(~np.isin(coordinates[:, axis], list(seen[axis])) for axis in range(coordinates.shape[1]))
        score = 2.0 * fresh + is_derived
        score[np.isin(candidates, chosen)] = -1
        best = np.flatnonzero(score == score.max())
        pick = int(best[(i * 2654435761) % len(best)])
        chosen.append(int(candidates[pick]))
        for axis, value in enumerate(coordinates[pick].tolist()):
            seen[axis].add(value)
        if all(len(s) == n for s, n in zip(seen, _axis_sizes(facts), strict=True)):
            seen = [{value} for value in coordinates[pick].tolist()]
    return tuple(sorted(chosen))


def audit_ranks(job: JobPrograms, sliced: Mapping[int, Program]) -> tuple[RankAudit, ...]:
    """Compare the inferred program of each audited rank with its sliced one."""
    audits = []
    for rank, real in sorted(sliced.items()):
        inferred = program_of(job, rank)
        cls = job.classes[job.class_of(rank)]
        approximated = rank in cls.approximated
        if approximated:
            difference, num_differing = compare_communication(inferred, real)
        else:
            difference, num_differing = compare_programs(inferred, real), 0
        audits.append(
            RankAudit(
                rank=rank,
                class_name=cls.name,
                difference=difference,
                peak_allocated_bytes=(_peak(inferred), _peak(real)),
                approximated=approximated,
                num_differing=num_differing,
            )
        )
    return tuple(audits)


def summarize(audits: Collection[RankAudit]) -> Audit:
    """What the prediction says about the audit."""
    approximated = [a for a in audits if a.approximated]
    return Audit(
        ranks=tuple(a.rank for a in audits),
        matched=sum(a.matched for a in audits),
        approximated=tuple(a.rank for a in approximated),
        differing_ops=max((a.num_differing for a in approximated), default=0),
        peak_error=max(
            (
                abs(inferred / sliced - 1)
                for inferred, sliced in (a.peak_allocated_bytes for a in approximated)
            ),
            default=0.0,
        ),
    )


def _peak(program: Program) -> int:
    return int(allocated_curve(program).max(initial=0))


def _coordinates(facts: JobFacts, ranks: np.ndarray) -> np.ndarray:
    """Shape (len(ranks), axes): dense coordinates, then the experts' ep."""
    layout = facts.layout
    dense = np.unravel_index(ranks, tuple(reversed(layout.sizes().values())))
    expert_sizes = layout.sizes(expert=True)
    expert = np.unravel_index(ranks, tuple(reversed(expert_sizes.values())))
    ep = expert[list(reversed(expert_sizes)).index("ep")]
    return np.stack([*dense, ep], axis=1)


def _axis_sizes(facts: JobFacts) -> list[int]:
    return [*reversed(facts.layout.sizes().values()), facts.layout.ep]
