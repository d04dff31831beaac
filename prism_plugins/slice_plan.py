"""Which slices there are and what each waits for, from the lead slice's facts and the options."""

from __future__ import annotations

from collections.abc import Collection

from prism_plugins.errors import PrismError
from prism_plugins.options import Options
from prism_plugins.program.kinds import plan_kinds
from prism_plugins.program.slices import JobFacts
from prism_plugins.world.audit import plan_audit
from prism_plugins.world.classes import dependencies, plan_representatives

MAX_INDEPENDENT = 64
"""Ranks of a script without a framework: a process of a few seconds each."""


def check_facts(facts: JobFacts, options: Options) -> None:
    """Raise :class:`PrismError` where the framework understood another job than the flags describe."""
    if facts.layout.world_size != options.world_size:
        raise PrismError(
            f"the script set up a world of {facts.layout.world_size} ranks, but --prism-world-size is "
            f"{options.world_size}"
        )
    facts.layout.validate()
    if facts.independent_ranks and options.world_size > MAX_INDEPENDENT:
        raise PrismError(
            f"no framework tells which ranks of this script run alike, so each of {options.world_size} would be sliced; "
            f"at most {MAX_INDEPENDENT} can be"
        )
    if len(facts.stages) != facts.layout.pp:
        raise PrismError(
            f"the layout has {facts.layout.pp} pipeline stages, but {len(facts.stages)} are described"
        )


def plan_slices(facts: JobFacts, options: Options) -> dict[int, tuple[int, ...]]:
    """Ranks to slice for the inference, each with the ranks whose journals it needs: the representatives, then
    the ranks of interest."""
    if facts.independent_ranks:
        return {rank: dependencies(facts, rank) for rank in range(facts.layout.world_size)}
    plan = {r.rank: r.depends_on for r in plan_representatives(facts)}
    for rank in plan_kinds(facts):
        plan.setdefault(rank, dependencies(facts, rank))
    for rank in options.ranks:
        plan.setdefault(rank, dependencies(facts, rank))
    return plan


def plan_audited(facts: JobFacts, options: Options, *, sliced: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Ranks to slice only for the comparison, with the ranks whose journals they need."""
    if not options.audit:
        return {}
    return {rank: dependencies(facts, rank) for rank in plan_audit(facts, options.audit, sliced=sliced)}
