"""Programs of ranks that own other partitions of flat buffers, derived from a few sliced ranks."""

import msgspec
import numpy as np
import pytest

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import compare_programs
from prism_plugins.program.flat_partitions import PartitionedProgram, form_of
from prism_plugins.program.infer import infer_job, program_of
from prism_plugins.program.kinds import plan_kinds
from prism_plugins.program.memory import allocated_curve, memory_of_classes
from prism_plugins.program.model import EventKind
from prism_plugins.simulate.sources import ClassSource
from prism_plugins.world.audit import audit_ranks
from prism_plugins.world.classes import plan_representatives
from tests.program.partition_model import PartitionedJob

NORM = (48,)
LAYER = [(64, 64), NORM, (96, 64), (64, 96), NORM]
GROUP = [(300, 64), *LAYER, *LAYER, *LAYER]
ONE_BUCKET = [list(range(len(GROUP)))]
BACKWARD = [[15, 14, 13, 12, 11, 10, 9], [8, 7, 6], [5, 4, 3, 2, 1, 0]]


def infer(job: PartitionedJob, programs=None):
    """(job, sliced ranks)"""
    programs = programs or job.programs
    ranks = {r.rank for r in plan_representatives(job.facts)} | set(plan_kinds(job.facts))
    for _ in range(5):
        try:
            return infer_job(
                job.facts, {r: job.reports[r] for r in ranks}, {r: programs[r] for r in ranks}
            ), ranks
        except CannotDeriveError as error:
            ranks |= set(error.ranks)
    pytest.fail("not inferred")


@pytest.mark.parametrize("dp", [5, 12, 100])
@pytest.mark.parametrize("buckets", [ONE_BUCKET, BACKWARD], ids=["one bucket", "backward"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_rank_is_exact(dp, buckets, micro_batches):
    job = PartitionedJob([GROUP], buckets, dp=dp, micro_batches=micro_batches)
    inferred, sliced = infer(job)
    (cls,) = inferred.classes
    assert not cls.approximated
    assert len(sliced) <= 5
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None, rank


@pytest.mark.parametrize("dp", [2, 4, 12])
@pytest.mark.parametrize("gradless", [(1,), (0,), (6, 7)])
def test_zeros_of_parameters_without_a_gradient_are_their_owners(dp, gradless):
    """Slices of their owners are asked for once it is known which parameters no reduction has."""
    bucket = [number for number in ONE_BUCKET[0] if number not in gradless]
    job = PartitionedJob([GROUP], [bucket], dp=dp)
    inferred, _ = infer(job)
    (cls,) = inferred.classes
    assert not cls.approximated
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None, rank


def test_ranks_are_alike_up_to_the_first_copy():
    """However their processes numbered ops and allocations: the simulation runs that part once."""
    job = PartitionedJob([GROUP], BACKWARD, dp=12)
    inferred, _ = infer(job)
    source = ClassSource(inferred, 0)
    events = inferred.classes[0].exemplar.events
    assert source.first_difference() > np.flatnonzero(events["kind"] == EventKind.COMM)[0]


def test_memory_is_that_of_the_rank_that_holds_most():
    shapes = [(48, 48)] * 20 + [(300, 64)] + [(48, 48)] * 20
    job = PartitionedJob([shapes], [[i] for i in range(len(shapes))], dp=20)
    inferred, _ = infer(job)
    (cls,) = inferred.classes
    (memory,) = memory_of_classes(inferred.classes, ranks=["0-19"], capacity_bytes=2**30)
    peaks = [int(allocated_curve(program).max()) for program in job.programs.values()]
    assert peaks.index(max(peaks)) not in (0, 19)
    assert memory.peak_allocated_bytes - int(allocated_curve(cls.exemplar).max()) == max(peaks) - peaks[0]


def test_two_parameter_groups_and_parameters_that_no_norm_counts():
    weights = [shape for shape in GROUP if shape != NORM]
    job = PartitionedJob([weights, [NORM] * 6], [list(range(len(GROUP)))], dp=12, uncounted=(0, 12, 13))
    inferred, sliced = infer(job)
    (cls,) = inferred.classes
    assert len(sliced) < len(job.facts.shard_kinds)
    for rank, real in job.programs.items():
        assert rank not in cls.approximated
        assert compare_programs(program_of(inferred, rank), real) is None, rank


def test_the_audit_finds_a_rank_that_does_something_else():
    job = PartitionedJob([GROUP], ONE_BUCKET, dp=64)
    inferred, sliced = infer(job)
    rank = next(rank for rank in range(30, 64) if rank not in sliced)
    (audit,) = audit_ranks(inferred, {rank: job.programs[rank]})
    assert (audit.matched, audit.approximated) == (True, False)
    other = next(r for r in range(64) if job.facts.kind_of[r] != job.facts.kind_of[rank] and r not in sliced)
    wrong = msgspec.structs.replace(job.programs[other], rank=rank)
    (audit,) = audit_ranks(inferred, {rank: wrong})
    assert not audit.matched


def test_what_is_done_with_whole_parameters_has_to_be_seen():
    job = PartitionedJob([GROUP], ONE_BUCKET, dp=12)
    kinds = job.facts.partitions
    kind_of = job.facts.kind_of
    with_whole = [r for r in range(12) if any(f.numel == 64 * 64 for f in job.owned[r])]
    without = [r for r in range(12) if len(job.owned[r]) > 1 and r not in with_whole]
    source = next(r for r in without if form_of(kinds, kind_of[r]) == form_of(kinds, kind_of[with_whole[0]]))
    buckets = job.reports[0].gradient_buckets
    partitioned = PartitionedProgram(job.programs[source], kinds, kind_of[source], buckets)
    with pytest.raises(CannotDeriveError, match="keeps its shape"):
        partitioned.check(kind_of[with_whole[0]])


@pytest.mark.parametrize("broken", ["buckets", "copies"])
def test_a_program_that_is_not_understood_is_not_derived_from(broken):
    job = PartitionedJob([GROUP], ONE_BUCKET, dp=64)
    if broken == "buckets":
        for report in job.reports.values():
            report.gradient_buckets = ((0, 1),)
        programs = job.programs
    else:  # an optimizer that copies one element less
        programs = {}
        for rank, program in job.programs.items():
            signatures = [
                msgspec.structs.replace(s, op="aten::clone") if s.op == "aten::copy_" else s
                for s in program.signatures
            ]
            programs[rank] = msgspec.structs.replace(program, signatures=signatures)
    inferred, sliced = infer(job, programs)
    (cls,) = inferred.classes
    kinds = {job.facts.kind_of[rank] for rank in sliced}
    assert cls.approximated == {rank for rank in range(64) if job.facts.kind_of[rank] not in kinds}


def test_slices_that_contradict_each_other_are_not_derived_from():
    job = PartitionedJob([GROUP], ONE_BUCKET, dp=64)
    _, sliced = infer(job)
    partitions, kind_of = job.facts.partitions, job.facts.kind_of
    forms = {form_of(partitions, kind_of[r]) for r in sliced}
    many = next(form for form in forms if form[0][0] == 2 and not form[0][1])
    other = next(r for r in range(64) if r not in sliced and form_of(partitions, kind_of[r]) == many)
    programs = dict(job.programs)
    events = programs[other].events.copy()
    events["value"][events["kind"] == EventKind.ALLOC] += 2
    programs[other] = msgspec.structs.replace(programs[other], events=events)
    ranks = sliced | {other}
    with pytest.raises(CannotDeriveError, match="owns such parameter fragments"):
        infer_job(job.facts, {r: job.reports[r] for r in ranks}, {r: programs[r] for r in ranks})
