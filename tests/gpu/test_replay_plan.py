"""What a replay is told, against a job whose times are known by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "simulate"))
from builders import Builder, TableCosts, collective, message, one_class_per_rank

from prism_plugins.program.job import JobPrograms
from prism_plugins.program.replay import ON_TIME, ReplayPlan, ReplayResult
from prism_plugins.replay.plan import make_plan
from prism_plugins.replays import check, summarise
from prism_plugins.simulate.engine import simulate


def job() -> JobPrograms:
    """Rank 1 computes 50 us longer before both reduce; rank 0 then receives what rank 1 computes for another 80 us."""
    first, second = Builder(0), Builder(1)
    group = [b.group((0, 1)) for b in (first, second)]
    first.kernel(100_000)
    second.kernel(150_000)
    first.comm(collective(group[0]))
    second.comm(collective(group[1]))
    second.kernel(80_000)
    first.comm(message("recv", group[0], 1))
    second.comm(message("send", group[1], 0))
    second.kernel(30_000)
    return one_class_per_rank({0: first.program(), 1: second.program()})


def plans() -> tuple[ReplayPlan, ReplayPlan]:
    made, costs = job(), TableCosts()
    timeline = simulate(made, costs)
    return make_plan(made, costs, timeline, 0), make_plan(made, costs, timeline, 1)


def test_late_peers_come_at_their_simulated_time_and_others_with_us() -> None:
    early, late = plans()
    reduce_ns = 900 + 400
    assert [c.kind for c in early.calls] == ["all_reduce", "recv"]
    assert [c.duration_ns for c in early.calls] == [pytest.approx(reduce_ns), pytest.approx(500 + 200)]
    assert early.calls[0].peers_ns == pytest.approx(150_000, abs=1_500)
    assert early.calls[1].peers_ns == pytest.approx(150_000 + reduce_ns + 80_000, abs=3_000)
    assert late.calls[0].peers_ns == ON_TIME
    assert late.calls[1].peers_ns == ON_TIME
    assert [c.nbytes for c in early.calls] == [400, 200]


def test_who_ends_early_waits_for_the_iteration_to_end() -> None:
    early, late = plans()
    assert early.iteration_ns == late.iteration_ns
    assert early.idle_ns == pytest.approx(30_000, abs=1_000)
    assert late.idle_ns == 0


def test_a_pause_of_the_script_is_no_wait_for_others() -> None:
    """One rank alone was held until its simulated end: its replay could not be faster than the simulation."""
    alone = Builder(0)
    alone.kernel(100_000)
    alone.device_sync()
    alone.host(40_000)
    made, costs = one_class_per_rank({0: alone.program()}), TableCosts()
    plan = make_plan(made, costs, simulate(made, costs), 0)
    assert plan.iteration_ns > 140_000
    assert plan.idle_ns == 0


def result(*ms: float, **given) -> ReplayResult:
    return ReplayResult(**{"rank": 3, "iteration_ms": ms, "timer": "globaltimer", **given})


def test_the_first_iterations_of_a_replay_do_not_count() -> None:
    found = summarise(result(900, 50, 50, 50, 10, 11, 12), simulated_ms=11.1, log="replay/3/log.txt")
    assert (found.iteration_time_ms, found.iterations) == (11, 3)
    assert found.spread == pytest.approx(2 / 11)
    assert check(found, result()) == []


@pytest.mark.parametrize(
    ("given", "simulated", "text"),
    [
        ({"unmatched": 4}, 11.0, "4 calls of the replay were not in the simulated program"),
        ({"timer": "sleep"}, 11.0, "late peers and their traffic are not acted"),
        ({}, 12.0, "replay and simulation disagree: 11.0 against 12.0 ms"),
    ],
)
def test_doubts_about_a_replay_are_findings(given: dict, simulated: float, text: str) -> None:
    measured = result(9, 9, 9, 9, 11, 11, **given)
    (finding,) = check(summarise(measured, simulated_ms=simulated, log="l"), measured)
    assert text in finding.message
    assert finding.ranks == "3"
