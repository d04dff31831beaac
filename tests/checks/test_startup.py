"""What sliced ranks did before the first iteration is compared."""

from __future__ import annotations

from prism_plugins.capture.startup import StartupLog
from prism_plugins.checks.startup import startup_findings
from prism_plugins.program.model import CommSignature, GroupInfo
from prism_plugins.program.slices import JobFacts, SliceReport, StageInfo
from prism_plugins.world.layout import Layout

GROUPS = [GroupInfo(ranks=(0, 1, 2), name="0", desc="default_pg")]
FACTS = JobFacts(framework="x", layout=Layout(world_size=3, dp=3), stages=(StageInfo(fingerprint=""),))


def report(
    rank: int, *, groups=((0, 1), (1, 2)), barriers: int = 1, batches: int = 5, **fields
) -> SliceReport:
    log = StartupLog()
    for ranks in groups:
        log.group_made(ranks, "PAIR", "train.py:4")
    for _ in range(barriers):
        log.call(CommSignature(kind="barrier", group=0, site="train.py:5"))
    log.loader("train.py:9", batches)
    return SliceReport(rank=rank, status="ok", facts=FACTS, startup=log.result(GROUPS), **fields)


def test_equal_ranks_have_no_finding() -> None:
    assert startup_findings({r: report(r) for r in range(3)}) == []


def test_groups_in_another_order() -> None:
    reports = {r: report(r) for r in (0, 1)} | {2: report(2, groups=((1, 2), (0, 1)))}
    (finding,) = startup_findings(reports)
    assert (finding.kind, finding.severity, finding.ranks) == ("groups", "error", "0-2")
    assert "ranks 0-1 make group PAIR of ranks 0-1 and 1 more at train.py:4" in finding.message
    assert "ranks 2 make group PAIR of ranks 1-2 and 1 more" in finding.message


def test_a_group_that_one_rank_does_not_make() -> None:
    reports = {r: report(r) for r in (0, 1)} | {2: report(2, groups=())}
    (finding,) = startup_findings(reports)
    assert "ranks 2 none" in finding.message


def test_a_barrier_that_one_rank_leaves_out() -> None:
    reports = {r: report(r) for r in (0, 1)} | {2: report(2, barriers=0)}
    (finding,) = startup_findings(reports)
    assert finding.kind == "startup"
    assert "ranks 0-1 call barrier at train.py:5, ranks 2 none" in finding.message


def test_fewer_batches() -> None:
    reports = {r: report(r) for r in (0, 1)} | {2: report(2, batches=4)}
    (finding,) = startup_findings(reports)
    assert (finding.kind, finding.severity) == ("uneven_batches", "warning")
    assert "4 batches on ranks 2, 5 batches on ranks 0-1" in finding.message


def test_a_rank_that_ends_while_others_train_on() -> None:
    hashes = {"iteration_hashes": ("a", "a")}
    reports = {r: report(r, **hashes) for r in (0, 1)} | {2: report(2, script_ended=True, **hashes)}
    (finding,) = startup_findings(reports)
    assert finding.kind == "early_exit"
    assert "ranks 2 end after 2" in finding.message


def test_all_ranks_may_end() -> None:
    reports = {r: report(r, script_ended=True, iteration_hashes=("a",) * (2 + r % 2)) for r in range(3)}
    assert startup_findings(reports) == []
