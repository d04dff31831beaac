"""``prism what-if`` with faults, on a small run."""

from __future__ import annotations

import itertools
import json

import pytest

from prism_plugins.cli import main


def report(capsys, *words: str) -> dict:
    assert main(("what-if", "latest", *words, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def test_a_slow_rank_and_who_waits_for_it(run, capsys):
    found = report(capsys, "--slow-rank", "1=3")
    assert found["iteration_ms"][0] > found["undisturbed_ms"]
    assert found["waited_for"][0]["rank"] == 1
    assert sum(found["critical_path_ms"].values()) == pytest.approx(found["iteration_ms"][0], rel=1e-6)
    assert main(("what-if", "latest", "--slow-rank", "1=3")) == 0
    text = capsys.readouterr().out
    assert "rank 1: " in text
    assert "critical path" in text


def test_who_waits_sums_up(run, capsys):
    first = report(capsys, "--slow-rank", "1=3")["waited_for"][0]
    assert sum(first["in_groups"].values()) == pytest.approx(first["total_ms"])
    assert first["by_ranks"][0][1] == max(each for _, each in first["by_ranks"])
    waiting = [ranks.split(",") for ranks, _ in first["by_ranks"]]
    assert not any("1" in ranks for ranks in waiting), "a rank does not wait for itself"


def test_the_critical_path_is_written_op_by_op(run, capsys, tmp_path):
    file = tmp_path / "path.jsonl"
    found = report(capsys, "--slow-rank", "1=3", "--critical-path", str(file))
    ops = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(op["duration_ms"] for op in ops) == pytest.approx(found["iteration_ms"][0], rel=1e-6)
    for before, after in itertools.pairwise(ops):
        assert after["start_ms"] == pytest.approx(before["start_ms"] + before["duration_ms"], abs=1e-6)
    by_rank = {}
    for op in ops:
        by_rank[op["rank"]] = by_rank.get(op["rank"], 0.0) + op["duration_ms"]
    assert max(by_rank, key=by_rank.get) == found["critical_path_ranks"][0][0] == 1
    names = {op["name"] for op in ops if op["kind"] == "compute"}
    assert any("mm" in name and "[" in name for name in names)
    assert any(op["kind"] == "host" and op["name"].endswith("optimizer") for op in ops)
    called = [op for op in ops if op["kind"] == "communication"]
    assert all(op["group"] and op["phase"] for op in called)
    assert main(("what-if", "latest", "--jitter", "3%", "--critical-path", str(file))) == 2
    assert "there is none" in capsys.readouterr().err


def test_seeds_are_a_distribution_and_repeat(run, capsys):
    words = ("--jitter", "5%", "--seeds", "6")
    first = report(capsys, *words)["iteration_ms"]
    assert len(set(first)) == 6
    assert first == report(capsys, *words, "--jobs", "1")["iteration_ms"]
    assert report(capsys, *words, "--seed", "2")["iteration_ms"][:4] == first[2:]


def test_a_rank_that_fails_stops_the_others(run, capsys):
    found = report(capsys, "--fail", "rank=0@1us")
    assert found["iteration_ms"] == []
    assert found["num_stalled"] == sum(len(stall["ranks"]) for stall in found["stalled"])
    failed, first, *_ = found["stalled"]
    assert (failed["distance"], failed["ranks"]) == (0, [0])
    assert first["distance"] == 1
    assert " in " in first["what"]
    assert main(("what-if", "latest", "--fail", "rank=0@1us")) == 0
    assert "fails: rank 0 stops in phase" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slow-rank", "x"), "--slow-rank 'x' is not of the form 37=1.3"),
        (("--slow-rank", "9999=2"), "rank 9999 is outside the world"),
        (("--slow-link", "node0:nic99=0.5"), "NICs"),
        (("--slow-link", "node0:nic0=2"), "at most 1"),
        (("--jitter", "3"), "is not of the form 3%"),
        (("--jitter", "90%"), "at most 30%"),
        (("--jitter", "3%", "--seeds", "0"), "--seeds 0"),
        (("--fail", "5@soon"), "--fail '5@soon'"),
        ((), "Give --cluster, or a fault"),
    ],
)
def test_mistakes_are_one_line(run, capsys, words, message):
    assert main(("what-if", "latest", *words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
