"""The directory of a search, the figures shown, and mistakes on the command line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prism_plugins import cli
from prism_plugins.cli_tune import parse_knobs, parse_variants
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.errors import PrismError
from prism_plugins.integration.tuning import Verdict
from prism_plugins.options import Job, Options, parse_time
from prism_plugins.tune.cluster_file import write_cluster
from prism_plugins.tune.compose import Estimate
from prism_plugins.tune.page import pareto, render
from prism_plugins.tune.result import Candidate, TuneDir, TuneResult, Variant
from prism_plugins.tune.show import limited_by, to_paste, told_of, why
from prism_plugins.tune.warm_slice import likeliest

JOB = Job(options=Options(world_size=8), run_as="script", argv=("train.py",))


def estimate(ms: float, gib: float, **parts: float) -> Estimate:
    given = {"compute_ms": ms, "exposed_ms": 0.0, "bubble_ms": 0.0, "optimizer_ms": 0.0, **parts}
    return Estimate(iteration_ms=ms, memory_bytes=int(gib * 2**30), **given)


def candidate(ms: float, gib: float, **parts: float) -> Candidate:
    return Candidate(knobs={"tp": 2}, arguments=("--x 1",), bound_ms=1.0, composed=estimate(ms, gib, **parts))


def result_of(*candidates: Candidate) -> TuneResult:
    return TuneResult(job=JOB, cluster="dgx-h100", capacity_bytes=80 * 2**30, candidates=candidates)


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72", "h100-pcie-x2"])
def test_a_cluster_written_is_read_back_equal(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    host = msgspec.structs.replace(cluster.host, from_slices=False, op_us=12.5)
    cluster = msgspec.structs.replace(cluster, host=host)
    write_cluster(tmp_path / "c.toml", cluster)
    assert load_cluster(str(tmp_path / "c.toml")) == cluster


def test_a_search_goes_on_in_its_directory_and_nowhere_else(tmp_path: Path) -> None:
    directory = TuneDir(tmp_path / "t")
    assert directory.claim(JOB, {}) is None
    directory.write(result_of(candidate(5, 1)))
    earlier = directory.claim(JOB, {})
    assert earlier is not None
    assert earlier.candidates[0].composed == estimate(5, 1)
    with pytest.raises(PrismError, match="another launch"):
        directory.claim(JOB, {"tp": ("2",)})
    with pytest.raises(PrismError, match="another launch"):
        directory.claim(msgspec.structs.replace(JOB, argv=("other.py",)), {})


@pytest.mark.parametrize("content", [b"", b"{}", b'{"schema": 1}', b'{"schema": 99}', b"\xff\xfe", b"["])
def test_a_damaged_tune_json_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_bytes(content)
    with pytest.raises(PrismError, match=r"tune\.json"):
        TuneDir(tmp_path).claim(JOB, {})


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PrismError, match="not empty"):
        TuneDir(tmp_path).claim(JOB, {})


def test_the_pareto_front() -> None:
    fast, small, neither = candidate(10, 70), candidate(20, 30), candidate(21, 40)
    assert pareto((neither, small, fast)) == [fast, small]
    page = render(result_of(fast, small, neither))
    assert page.count("<circle") == 3
    assert page.count('class="front') == 2


def test_an_empty_page() -> None:
    assert "Nothing fits" in render(result_of())


def test_why_compares_like_with_like() -> None:
    best, own = candidate(100, 40, bubble_ms=5.0), candidate(150, 60, bubble_ms=40.0)
    lines = why(msgspec.structs.replace(best, emulated=estimate(110, 41)), own, 80 * 2**30)
    assert len(lines) == 3
    assert "150 -> 100 ms" in lines[0]
    assert "both composed" in lines[0]
    assert "pipeline bubble 35 ms less" in lines[1]
    assert "60.0 -> 40.0 GiB" in lines[2]
    assert "does not fit" in why(best, own, 50 * 2**30)[0]


def test_what_limits_a_layout() -> None:
    assert limited_by(estimate(100, 1, bubble_ms=30, exposed_ms=20)) == "pipeline bubble"
    assert limited_by(estimate(100, 1, bubble_ms=3)) == "compute"


def test_knobs_and_budgets() -> None:
    assert parse_knobs(["tp=2,4", "sp=true"]) == {"tp": ("2", "4"), "sp": ("true",)}
    for wrong in (["tp"], ["tp="], ["tp=2", "tp=4"]):
        with pytest.raises(PrismError):
            parse_knobs(wrong)
    assert [parse_time(t) for t in ("90", "10m", "1.5h")] == [90, 600, 5400]
    for text in ("soon", "0s", "-1m"):
        with pytest.raises(ValueError, match="90s"):
            parse_time(text)


def test_variants_are_told_and_shown() -> None:
    assert parse_variants(["gpus=64,128", "nic=0.5"]) == (("gpus", 64.0), ("gpus", 128.0), ("nic", 0.5))
    for wrong in ("gpus", "gpus=", "gpus=x", "gpus=0", "tp=2"):
        with pytest.raises(PrismError, match="--vary"):
            parse_variants([wrong])
    best = msgspec.structs.replace(candidate(10, 1), tokens_per_s_per_gpu=1000.0)
    found = Variant(what="gpus", value=64, legal=9, best=best)
    nothing = Variant(what="nic", value=0.5, legal=3, note="nothing fits")
    assert "64 GPUs (9 legal): 10.0 ms, 1,000 tokens/s/GPU" in told_of(found)
    assert told_of(nothing).endswith("nothing fits")
    result = result_of(best)
    result.sensitivity = (found, nothing)
    page = render(result)
    assert page.count("<polyline") == 2
    assert ">A</text>" in page
    assert "nothing fits</title>" in page
    assert ">64</text>" in page
    assert ">8</text>" in page  # The launch itself.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "8"], "name the launch"),
        (["--world-size", "8", "--", "/nowhere.py"], "does not exist"),
        (["--world-size", "x", "--", "/nowhere.py"], "whole number"),
        (["--world-size", "8", "--budget", "soon", "--", "/nowhere.py"], "90s"),
        (["--world-size", "8", "--knob", "tp", "--", "/nowhere.py"], "NAME=VALUE"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_framework_is_the_one_that_takes_the_launch() -> None:
    """Libraries import DeepSpeed where a Megatron script needs none of it."""
    refused = [Verdict(legal=False, reason="no configuration", framework="deepspeed")]
    taken = [Verdict(legal=True, framework="megatron"), Verdict(legal=False, framework="megatron")]
    assert likeliest([refused, taken]) == taken
    assert likeliest([[], refused]) == refused
    assert likeliest([[], []]) == []


def test_what_is_to_be_pasted_can_be() -> None:
    lines = list(to_paste(("--context-parallel-size", "2", "(drop --sequence-parallel)")))
    assert lines == ["paste: --context-parallel-size 2", "and: drop --sequence-parallel"]
    assert list(to_paste(("--micro-batch-size", "8"))) == ["paste: --micro-batch-size 8"]
