import msgspec
import numpy as np
import pytest

from prism_plugins.program.infer import infer_job
from prism_plugins.program.model import EventKind
from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.audit import audit_ranks, plan_audit, summarize
from prism_plugins.world.classes import plan_representatives
from prism_plugins.world.layout import Layout
from tests.program.job_model import SmallJob


@pytest.fixture
def job():
    return SmallJob(pp=4, dp=3, num_microbatches=8)


def infer(job):
    ranks = [r.rank for r in plan_representatives(job.facts)]
    return infer_job(
        job.facts, {r: job.reports[r] for r in ranks}, {r: job.programs[r] for r in ranks}
    ), ranks


def test_a_right_inference_matches(job):
    inferred, sliced = infer(job)
    ranks = plan_audit(job.facts, 4, sliced=sliced)
    audits = audit_ranks(inferred, {r: job.programs[r] for r in ranks})
    assert all(a.matched for a in audits)
    assert summarize(audits).matched == 4
    assert summarize(audits).ranks == ranks


def wrong_peer(program):
    i = next(i for i, c in enumerate(program.comms) if c.kind == "send")
    program.comms = list(program.comms)
    program.comms[i] = msgspec.structs.replace(program.comms[i], peer=program.comms[i].peer ^ 1)


def wrong_stream(program):
    program.events = program.events.copy()
    program.events["stream"][np.flatnonzero(program.events["kind"] == EventKind.KERNEL)[40]] = 3


def wrong_size(program):
    program.events = program.events.copy()
    program.events["value"][np.flatnonzero(program.events["kind"] == EventKind.ALLOC)[7]] *= 2


@pytest.mark.parametrize("break_it", [wrong_peer, wrong_stream, wrong_size])
def test_a_broken_inference_is_caught_and_named(job, break_it):
    inferred, _ = infer(job)
    derived = inferred.classes[2]
    break_it(derived.exemplar)
    rank = int(derived.ranks[0])
    audits = audit_ranks(inferred, {rank: job.programs[rank], 1: job.programs[1]})
    by_rank = {a.rank: a for a in audits}
    assert by_rank[1].matched
    assert not by_rank[rank].matched
    assert summarize(audits).matched == 1
    message = by_rank[rank].message
    assert f"rank {rank} (stage 2) is not as inferred" in message
    assert "≠" in message


def test_memory_peaks_are_told(job):
    inferred, _ = infer(job)
    cls = inferred.classes[2]
    cls.exemplar.events = cls.exemplar.events.copy()
    allocs = cls.exemplar.events["kind"] == EventKind.ALLOC
    cls.exemplar.events["value"][allocs] += 1 << 20
    rank = int(cls.ranks[0])
    (audit,) = audit_ranks(inferred, {rank: job.programs[rank]})
    assert audit.peak_allocated_bytes[0] > audit.peak_allocated_bytes[1]
    assert "peak allocated" in audit.message


def facts(**sizes):
    layout = Layout(world_size=int(np.prod(list(sizes.values()))), **sizes)
    stages = tuple(StageInfo(fingerprint=str(s)) for s in range(layout.pp))
    return JobFacts(framework="test", layout=layout, stages=stages)


def test_audited_ranks_are_spread_and_new():
    info = facts(tp=4, pp=4, dp=4)
    sliced = [r.rank for r in plan_representatives(info)]
    ranks = plan_audit(info, 4, sliced=sliced)
    assert len(set(ranks)) == 4
    assert not set(ranks) & set(sliced)
    assert ranks == plan_audit(info, 4, sliced=sliced)
    coords = [info.layout.coords(r) for r in ranks]
    assert len({c["dp"] for c in coords}) >= 2
    assert len({c["tp"] for c in coords}) >= 2


def test_derived_stages_are_audited_first():
    job = SmallJob(pp=5, dp=2, num_microbatches=10)
    _, sliced = infer(job)
    ranks = plan_audit(job.facts, 2, sliced=sliced)
    assert {job.layout.coords(r)["pp"] for r in ranks} <= {2, 3}


def test_no_more_ranks_than_there_are():
    info = facts(dp=3)
    assert plan_audit(info, 9, sliced=[0, 2]) == (1,)
    assert plan_audit(info, 2, sliced=[0, 1, 2]) == ()


def test_large_worlds_are_planned_quickly():
    info = facts(tp=8, pp=16, dp=64)
    assert len(plan_audit(info, 8, sliced=[0, 1, 8191])) == 8
