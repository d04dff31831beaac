"""Data-parallel ranks of several kinds: which are sliced, and what the others run."""

from collections import Counter

import msgspec
import pytest

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import compare_communication, compare_programs
from prism_plugins.program.infer import infer_job, program_of
from prism_plugins.program.kinds import MAX_SLICED, KindIndex, plan_kinds
from prism_plugins.program.model import EventKind
from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.audit import audit_ranks, summarize
from prism_plugins.world.classes import plan_representatives
from prism_plugins.world.layout import Layout
from tests.program.job_model import SmallJob


def facts(kinds, kind_of, **sizes):
    layout = Layout(world_size=len(kind_of), dp=len(kind_of), **sizes)
    return JobFacts(
        framework="test",
        layout=layout,
        stages=(StageInfo(fingerprint="all"),),
        shard_kinds=kinds,
        kind_of=kind_of,
    )


def job_of_kinds(*, pp, dp):
    """A job whose ranks' shards are told as kinds."""
    job = SmallJob(pp=pp, dp=dp, num_microbatches=8)
    for rank, report in job.reports.items():
        sizes = [
            tuple(n for n, _ in shard.fragments)
            for shard in sorted(report.facts.shards, key=lambda shard: shard.index)
        ]
        kinds = tuple(dict.fromkeys(sizes))
        report.facts = msgspec.structs.replace(
            report.facts, shards=(), shard_kinds=kinds, kind_of=tuple(kinds.index(size) for size in sizes)
        )
        job.reports[rank] = report
    job.facts = job.reports[0].facts
    return job


def infer(job):
    ranks = {r.rank for r in plan_representatives(job.facts)} | set(plan_kinds(job.facts))
    for _ in range(5):
        try:
            return infer_job(
                job.facts, {r: job.reports[r] for r in ranks}, {r: job.programs[r] for r in ranks}
            ), ranks
        except CannotDeriveError as error:
            ranks |= set(error.ranks)
    pytest.fail("not inferred")


def test_few_kinds_are_all_sliced():
    info = facts(((8,), (4, 4), (8, 1)), (0, 0, 0, 1, 0, 2))
    assert set(plan_kinds(info)) == {0, 3, 5}
    assert plan_kinds(facts((), (0,) * 8)) == ()


def test_of_many_kinds_the_extremes_are_sliced():
    kinds = (*((100 - i, i + 1) for i in range(12)), (500,), (1,))
    kind_of = (*range(14), 7, 7, 3)
    chosen = plan_kinds(facts(kinds, kind_of))
    assert len(chosen) <= MAX_SLICED
    assert {0, 16, 12, 13, 7} <= set(chosen)  # first, last, largest, smallest, most common


def test_the_nearest_kind_has_as_many_fragments():
    index = KindIndex(Layout(world_size=4, dp=4), facts(((10, 2), (100,), (90, 10), (12,)), (0, 1, 2, 3)))
    assert index.nearest(0, [1, 2]) == 2
    assert index.nearest(3, [0, 1, 2]) == 1


def test_sliced_kinds_are_exact_and_others_communicate_alike():
    job = job_of_kinds(pp=1, dp=24)
    assert len(job.facts.shard_kinds) > 8
    inferred, sliced = infer(job)
    assert len(sliced) <= MAX_SLICED + 1
    (cls,) = inferred.classes
    kinds = Counter(job.facts.kind_of[rank] for rank in sliced)
    for rank, real in job.programs.items():
        ours = program_of(inferred, rank)
        assert (rank in cls.approximated) == (job.facts.kind_of[rank] not in kinds)
        if rank in cls.approximated:
            difference, num_differing = compare_communication(ours, real)
            assert difference is None
            assert num_differing
        else:
            assert compare_programs(ours, real) is None, rank


def test_kinds_of_every_stage():
    job = job_of_kinds(pp=4, dp=3)
    inferred, _ = infer(job)
    for cls in inferred.classes:
        for rank in cls.ranks.tolist():
            if rank not in cls.approximated:
                assert compare_programs(program_of(inferred, rank), job.programs[rank]) is None, rank


def test_the_audit_of_an_approximated_rank_counts_what_differs():
    job = job_of_kinds(pp=1, dp=24)
    inferred, _ = infer(job)
    rank = min(inferred.classes[0].approximated)
    audits = audit_ranks(inferred, {rank: job.programs[rank]})
    audit = summarize(audits)
    assert (audit.matched, audit.approximated) == (1, (rank,))
    assert audit.differing_ops > 0

    broken = msgspec.structs.replace(job.programs[rank])
    broken.comms = [msgspec.structs.replace(c, in_numel=c.in_numel + 1) for c in broken.comms]
    (broken_audit,) = audit_ranks(inferred, {rank: broken})
    assert not broken_audit.matched


def test_kinds_that_differ_throughout_are_classes_with_optimizer_shards_of_their_own():
    """As ranks that hold unevenly loaded experts, with a distributed optimizer."""
    job = SmallJob(pp=4, dp=6, num_microbatches=8)
    kind_of = (0, 1, 2, 0, 1, 2)
    for rank, report in job.reports.items():
        report.facts = msgspec.structs.replace(
            report.facts, shard_kinds=((9,), (5,), (2,)), kind_of=kind_of, kinds_are_classes=True
        )
        job.programs[rank] = with_other_work(job.programs[rank], kind_of[rank % 6])
    job.facts = job.reports[0].facts
    inferred, sliced = infer(job)
    assert len(sliced) < 24
    assert sorted(c.name for c in inferred.classes) == [
        f"stage {s} · ep {k}" for s in range(4) for k in range(3)
    ]
    for rank, program in job.programs.items():
        assert compare_programs(program_of(inferred, rank), program) is None, rank
    assert all(a.matched for a in audit_ranks(inferred, job.programs))


def with_other_work(program, kind):
    """The program with kernels of a kind of rank before the optimizer."""
    begin = next(begin for phase, begin, _ in program.iter_phases() if phase.kind == "optimizer")
    kernels = program.events["ref"][:begin][program.events["kind"][:begin] == EventKind.KERNEL]
    signatures = list(program.signatures)
    for i in set(kernels.tolist()):
        signatures[i] = msgspec.structs.replace(signatures[i], attrs={"tokens": 100 * kind})
    return msgspec.structs.replace(program, signatures=signatures)
