"""``prism what-if --replay``: what a replay on a GPU among faults is told. The replay itself is a fake, as there is no GPU; without
one see ``tests/e2e/test_replay_without_gpu.py``."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from prism_plugins import replays
from prism_plugins.cli import main
from prism_plugins.errors import PrismError
from prism_plugins.gpu import device
from prism_plugins.program.measured import GpuState, Measured
from prism_plugins.program.replay import ON_TIME, ReplayPlan, ReplayResult
from prism_plugins.program.slices import SliceReport
from prism_plugins.rundir import read_json, write_json


@pytest.fixture
def started(run, monkeypatch) -> list:
    """The run as one whose slices ran on a GPU; specs of the replays that were started. Each takes what it is told."""
    info = run.read_info()
    options = msgspec.structs.replace(info.job.options, device="cuda", iterations=16)
    run.write_info(msgspec.structs.replace(info, job=msgspec.structs.replace(info.job, options=options)))
    for rank in info.slices:
        write_json(run.slice(rank).measured, Measured(rank=rank, gpu=GpuState(name="NVIDIA H100")))
    specs: list = []

    def fake(spec, progress) -> SliceReport:
        specs.append(spec)
        plan = read_json(Path(spec.replay), ReplayPlan)
        result = ReplayResult(
            rank=spec.rank, iteration_ms=(plan.iteration_ns / 1e6,) * 9, timer="globaltimer"
        )
        write_json(Path(spec.slice_dir) / "replay.json", result)
        return SliceReport(rank=spec.rank, status="ok")

    monkeypatch.setattr(replays, "_run", fake)
    monkeypatch.setattr(device, "check_gpu", lambda: None)
    return specs


def report(capsys, *words: str) -> dict:
    assert main(("what-if", "latest", *words, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def plan_of(spec) -> ReplayPlan:
    return read_json(Path(spec.replay), ReplayPlan)


def test_a_replay_follows_the_simulation_of_the_faults(run, started, capsys) -> None:
    found = report(capsys, "--slow-rank", "1=3", "--replay", "0")
    (replay,) = found["replay"]
    assert replay["rank"] == 0
    assert replay["iteration_time_ms"] == pytest.approx(found["iteration_ms"][0], rel=1e-6)
    assert replay["iteration_time_ms"] > found["undisturbed_ms"]
    as_it_was = report(capsys, "--replay", "0")
    assert as_it_was["replay"][0]["iteration_time_ms"] == pytest.approx(as_it_was["undisturbed_ms"], rel=1e-6)


def test_late_peers_are_those_of_the_fault(run, started, capsys) -> None:
    def late(*words: str) -> list[float]:
        report(capsys, *words, "--replay", "0")
        return [call.peers_ns for call in plan_of(started[-1]).calls]

    before, after = late(), late("--slow-rank", "1=3")
    assert len(before) == len(after) > 0
    assert sum(t != ON_TIME for t in after) > sum(t != ON_TIME for t in before)


def test_slices_are_those_of_the_run_and_nothing_of_it_is_touched(run, started, capsys) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()}
    report(capsys, "--slow-rank", "1=3", "--replay", "0,2")
    assert [spec.rank for spec in started] == [0, 2]
    for spec in started:
        assert spec.device == "cuda"
        assert spec.argv[0] == "train.py"
        assert spec.iterations == 16
        assert Path(spec.slice_dir).is_relative_to(run.path / "what-if")
    assert before.items() <= {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()}.items()
    assert main(("what-if", "latest", "--slow-rank", "1=3", "--replay", "0")) == 0
    assert "replay of rank 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slow-rank", "1=3", "--replay", "0-2"), "the slow rank itself cannot be replayed"),
        (("--jitter", "3%", "--replay", "0"), "not with --jitter"),
        (("--fail", "rank=0@1us", "--replay", "1"), "not with --jitter or --fail"),
        (("--replay", "99"), "names rank 99"),
        (("--replay", "x"), "expects ranks such as"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(run, started, capsys, words, message) -> None:
    assert main(("what-if", "latest", *words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not started


def test_ranks_that_really_ran_on_the_cpu_are_not_replayed(run, capsys) -> None:
    info = run.read_info()
    options = msgspec.structs.replace(info.job.options, device="cpu")
    run.write_info(msgspec.structs.replace(info, job=msgspec.structs.replace(info.job, options=options)))
    assert main(("what-if", "latest", "--replay", "0")) == 2
    assert "really ran on the CPU" in capsys.readouterr().err


def test_where_no_gpu_is_there(run, started, capsys, monkeypatch) -> None:
    def none() -> None:
        raise PrismError("torch sees no GPU")

    monkeypatch.setattr(device, "check_gpu", none)
    assert main(("what-if", "latest", "--replay", "0")) == 2
    assert "sees no GPU" in capsys.readouterr().err
    assert not started
