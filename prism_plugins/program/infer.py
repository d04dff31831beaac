"""A program for every rank of the target world, from the programs of a few.

For each role (pipeline stage × first in its tensor-parallel group or not) the program comes from a slice of that
very role, or is derived from another stage's slice (:mod:`.derive`); within a role, data-parallel ranks with other
optimizer shards get variants (:mod:`.shards`), and any single rank's groups are filled in on demand
(:mod:`.instantiate`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.derive import derive_stage
from prism_plugins.program.instantiate import Instantiator
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import Program
from prism_plugins.program.shards import RankShards, derive_shard, shards_of_rank, work_of
from prism_plugins.program.slices import JobFacts, OptimizerShard, SliceReport
from prism_plugins.world.classes import Role, plan_roles, ranks_of_role
from prism_plugins.world.layout import Layout


def infer_job(
    facts: JobFacts, reports: Mapping[int, SliceReport], programs: Mapping[int, Program]
) -> JobPrograms:
    """The programs of all ranks as classes.

    ``facts`` are the lead slice's; ``reports`` and ``programs`` are by sliced rank (audited ranks left out).
    Raises :class:`CannotDeriveError` whose ``ranks`` lists what has to be sliced in addition.
    """
    classes, missing, reasons = [], [], []
    for role in plan_roles(facts):
        try:
            classes.append(_infer_role(facts, role, reports, programs))
        except CannotDeriveError as error:
            missing += [rank for rank in error.ranks if rank not in programs]
            reasons.append(str(error))
    if reasons:
        raise CannotDeriveError("; ".join(dict.fromkeys(reasons)), ranks=tuple(sorted(set(missing))))
    return JobPrograms(layout=facts.layout, classes=tuple(classes))


def program_of(job: JobPrograms, rank: int) -> Program:
    """The program of any rank, with its own groups and peers. Costs microseconds after the first of a class."""
    cls = job.classes[job.class_of(rank)]
    variant = cls.variant_of.get(rank)
    program = cls.exemplar if variant is None else cls.variants[variant]
    return _instantiator(program, job.layout).program_of(rank)


_INSTANTIATORS: OrderedDict[tuple[int, Layout], tuple[Program, Instantiator]] = OrderedDict()
_MAX_INSTANTIATORS = 256


def _instantiator(program: Program, layout: Layout) -> Instantiator:
    """Instantiators are kept by identity; the entry holds the program, so its id is not reused meanwhile."""
    key = (id(program), layout)
    entry = _INSTANTIATORS.get(key)
    if entry is None:
        entry = _INSTANTIATORS[key] = (program, Instantiator(program, layout))
        while len(_INSTANTIATORS) > _MAX_INSTANTIATORS:
            _INSTANTIATORS.popitem(last=False)
    return entry[1]


def _infer_role(
    facts: JobFacts, role: Role, reports: Mapping[int, SliceReport], programs: Mapping[int, Program]
) -> RankClass:
    layout = facts.layout
    ranks = ranks_of_role(layout, role)
    own = [rank for rank in (role.representative, *sorted(programs)) if rank in programs and rank in ranks]
    if own:
        source = own[0]
        program = programs[source]
    else:
        source = role.representative
        program = _derived(facts, role, programs, fallback=int(ranks[0]))
    shards = _shards_of_slice(reports[source])
    captured = shards_of_rank(layout, shards, source)
    variants, variant_of = _variants(layout, ranks, program, shards, captured, own, programs)
    return RankClass(
        name=_name(layout, role),
        ranks=ranks,
        representative=source,
        exemplar=_instantiator(program, layout).program_of(int(ranks[0])),
        variants=variants,
        variant_of=variant_of,
    )


def _derived(facts: JobFacts, role: Role, programs: Mapping[int, Program], *, fallback: int) -> Program:
    if role.representative not in programs:
        raise CannotDeriveError(
            f"no slice of stage {role.captured_stage} to derive from", ranks=(role.representative,)
        )
    try:
        derived = derive_stage(
            programs[role.representative],
            captured=facts.stages[role.captured_stage].schedule,
            target=facts.stages[role.stage].schedule,
        )
        return _instantiator(derived, facts.layout).program_of(fallback)
    except CannotDeriveError as error:
        raise CannotDeriveError(
            f"stage {role.stage} from stage {role.captured_stage}: {error}", ranks=(fallback,)
        ) from error


def _shards_of_slice(report: SliceReport) -> tuple[OptimizerShard, ...]:
    return report.facts.shards if report.facts is not None else ()


def _variants(
    layout: Layout,
    ranks: np.ndarray,
    program: Program,
    shards: tuple[OptimizerShard, ...],
    captured: RankShards,
    own: list[int],
    programs: Mapping[int, Program],
) -> tuple[dict[int, Program], dict[int, int]]:
    """Programs of the ranks whose optimizer shards differ from the captured ones, by the first such rank."""
    if not shards:
        return {}, {}
    by_work: dict[RankShards, list[int]] = {}
    for rank in ranks.tolist():
        by_work.setdefault(work_of(shards_of_rank(layout, shards, rank)), []).append(rank)
    by_work.pop(work_of(captured), None)
    variants, variant_of, missing, reasons = {}, {}, [], []
    for work, members in by_work.items():
        sliced = [rank for rank in own if rank in members]
        try:
            variant = (
                programs[sliced[0]]
                if sliced
                else derive_shard(
                    program, captured=captured, target=shards_of_rank(layout, shards, members[0])
                )
            )
        except CannotDeriveError as error:
            missing.append(members[0])
            reasons.append(f"optimizer shard of rank {members[0]}: {error}")
            continue
        key = members[0]
        variants[key] = _instantiator(variant, layout).program_of(key)
        variant_of.update(dict.fromkeys(members, key))
    if missing:
        raise CannotDeriveError(reasons[0], ranks=tuple(missing))
    return variants, variant_of


def _name(layout: Layout, role: Role) -> str:
    if layout.tp == 1:
        return f"stage {role.stage}"
    if role.tp_first:
        return f"stage {role.stage} · tp 0"
    return f"stage {role.stage} · tp 1" + (f"-{layout.tp - 1}" if layout.tp > 2 else "")
