"""What the conductor does after the slices: more slices when inference asks, audit, strictness, faults, log."""

import types

import numpy as np
import pytest

from prism_plugins import stages
from prism_plugins.errors import CannotDeriveError, PrismError, SliceFailed
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EVENT_DTYPE, EventKind, OpSignature, Program
from prism_plugins.program.slices import JobFacts, SliceReport
from prism_plugins.program.store import save_program
from prism_plugins.rundir import RunDir
from prism_plugins.simulate.faults import Party, SimulationFault
from prism_plugins.world.layout import Layout

FACTS = JobFacts(framework="megatron", layout=Layout(world_size=4, dp=4))


def program(rank, kernels=1):
    events = np.zeros(kernels, EVENT_DTYPE)
    events["kind"] = EventKind.KERNEL
    return Program(
        rank=rank,
        events=events,
        signatures=[OpSignature(op="aten::mm")],
        comms=[],
        groups=[],
        phases=[],
        initial=[],
    )


def job():
    whole = RankClass(name="stage 0", ranks=np.arange(4), representative=0, exemplar=program(0))
    return JobPrograms(layout=FACTS.layout, classes=(whole,))


@pytest.fixture
def rundir(tmp_path):
    rundir = RunDir(tmp_path)
    for rank in range(4):
        rundir.slice(rank).path.mkdir(parents=True)
        save_program(program(rank), rundir.slice(rank).program)
    return rundir


def test_ranks_that_cannot_be_derived_are_sliced(rundir, monkeypatch):
    def infer_job(facts, reports, programs, *, derived):
        if 3 not in programs:
            raise CannotDeriveError("rank 3 is special", ranks=(3,))
        return sorted(programs)

    monkeypatch.setattr(stages, "infer_job", infer_job)
    reports = {0: SliceReport(rank=0, status="ok")}
    asked = []

    def slice_more(ranks, again):
        asked.append((ranks, again))
        reports.update({rank: SliceReport(rank=rank, status="ok") for rank in ranks})

    assert stages.infer(FACTS, lambda: reports, rundir, slice_more=slice_more) == [0, 3]
    assert asked == [((3,), ())]


@pytest.mark.parametrize(
    ("ranks", "again", "asked_for"), [((), (), []), ((0,), (), []), ((), (0,), [((), (0,))])]
)
def test_no_endless_slicing(rundir, monkeypatch, ranks, again, asked_for):
    def infer_job(facts, reports, programs, *, derived):
        raise CannotDeriveError("never", ranks=ranks, again=again)

    monkeypatch.setattr(stages, "infer_job", infer_job)
    reports = {0: SliceReport(rank=0, status="ok")}
    asked = []
    with pytest.raises(SliceFailed, match="cannot be derived: never"):
        stages.infer(FACTS, lambda: reports, rundir, slice_more=lambda *ranks: asked.append(ranks))
    assert asked == asked_for


def test_a_broken_inference_is_caught_by_the_audit(rundir):
    audit, findings = stages.audit(job(), (2,), rundir)
    assert (audit.ranks, audit.matched, findings) == ((2,), 1, ())
    save_program(program(2, kernels=2), rundir.slice(2).program)
    audit, findings = stages.audit(job(), (2, 3), rundir)
    assert (audit.ranks, audit.matched) == ((2, 3), 1)
    assert [(f.kind, f.severity, f.ranks) for f in findings] == [("audit", "error", "2")]
    assert "aten::mm" in findings[0].message


def test_a_job_that_would_hang_is_a_finding(monkeypatch):
    from prism_plugins.simulate import engine

    side = Party(ranks=(0, 1), call="all_reduce of 4 bytes", phase="forward")
    fault = SimulationFault(kind="hang", group="tp", sequence=3, waiting=side, other=side)
    monkeypatch.setattr(engine, "simulate", lambda *args: (_ for _ in ()).throw(fault))
    timeline, findings = stages.simulate(job(), None)
    assert timeline is None
    assert (findings[0].kind, findings[0].ranks) == ("hang", "0-1")


def test_strict_names_what_is_not_priced():
    with pytest.raises(PrismError, match=r"--prism-strict: 2 ops have no cost rule: b::y \(9\), a::x \(1\)"):
        stages.check_strict(types.SimpleNamespace(unpriced={"a::x": 1, "b::y": 9}))
    stages.check_strict(types.SimpleNamespace(unpriced={}))


def test_the_log_comes_from_the_rank_that_printed_most_the_last_of_several(monkeypatch):
    monkeypatch.setattr(
        stages,
        "integration_named",
        lambda name: types.SimpleNamespace(rewrite_log=lambda lines, prediction: [name, *lines]),
    )
    reports = {
        0: SliceReport(rank=0, status="ok", log_lines=("zero",)),
        3: SliceReport(rank=3, status="ok", log_lines=("three",)),
        2: SliceReport(rank=2, status="ok"),
        7: SliceReport(rank=7, status="ok", log_lines=("seven", "more")),
    }
    assert stages.logging_rank(reports) == 7
    del reports[7]
    assert stages.logging_rank(reports) == 3
    assert stages.logging_rank({2: reports[2]}) == -1
    prediction = types.SimpleNamespace(logging_rank=3)
    assert stages.rewrite_log(FACTS, reports, prediction) == ["megatron", "three"]
    assert stages.rewrite_log(FACTS, reports, types.SimpleNamespace(logging_rank=-1)) == []


def test_timers_of_a_job_that_would_not_run_are_not_predicted():
    report = SliceReport(rank=0, status="ok", timers=(("fwd", 0, 1),))
    assert stages.timer_spans(job(), None, None, 0, report) == {}


def test_integrations_are_found_by_name():
    assert stages.integration_named("megatron").name == "megatron"
    with pytest.raises(PrismError, match="no integration for jax"):
        stages.integration_named("jax")
