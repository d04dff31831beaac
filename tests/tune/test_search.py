"""A whole search: small GPT of a plain megatron-core script, from one start of the script to the emulation of the best."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prism_plugins import cli

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_gpt_megatron.py"
MODEL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "512",
    "--ffn-hidden-size",
    "2048",
    "--num-attention-heads",
    "8",
    "--seq-length",
    "512",
    "--vocab-size",
    "1024",
    "--tensor-model-parallel-size",
    "2",
    "--pipeline-model-parallel-size",
    "2",
    "--global-batch-size",
    "8",
    "--train-iters",
    "10",
]
KNOBS = [
    f"--knob={knob}"
    for knob in ("tp=1,2", "pp=1,2", "vpp=1", "micro_batch=1", "optimizer=plain", "stages=even")
]


def tune(out: Path, *options: str) -> int:
    return cli.main(
        ["tune", "--world-size", "4", "--out", str(out), *KNOBS, *options, "--", str(SCRIPT), *MODEL]
    )


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "search"
    assert tune(out, "--emulate", "1") == 0
    return out


def test_a_search_ends_with_an_emulated_best(searched: Path) -> None:
    result = json.loads((searched / "tune.json").read_text())
    assert result["status"] == "done"
    counts = result["counts"]
    assert counts["legal"] == counts["composed"] + counts["slower_by_bound"] + counts["slower_by_layers"] == 4
    assert counts["emulated"] >= 1
    best = result["candidates"][0]
    assert best["emulated"]["source"] == "emulated"
    assert Path(best["run"], "prediction.json").exists()
    assert (searched / "tune.html").read_text().count("<circle") == len(result["candidates"])


def test_no_bound_is_above_an_emulation_and_composed_figures_are_near(searched: Path) -> None:
    result = json.loads((searched / "tune.json").read_text())
    emulated = [c for c in result["candidates"] if c["emulated"]]
    assert emulated
    for c in emulated:
        assert c["bound_ms"] <= c["emulated"]["iteration_ms"]
        assert c["bound_bytes"] <= c["emulated"]["memory_bytes"]
        assert c["composed"]["iteration_ms"] == pytest.approx(c["emulated"]["iteration_ms"], rel=0.3)
        assert c["composed"]["memory_bytes"] == pytest.approx(c["emulated"]["memory_bytes"], rel=0.15)


def test_a_second_start_runs_nothing_again(searched: Path) -> None:
    probes = {p: p.stat().st_mtime_ns for p in searched.glob("probes/*/report.json")}
    assert probes
    before = json.loads((searched / "tune.json").read_text())
    began = time.time()
    assert tune(searched, "--emulate", "1", "--vary", "gpus=2") == 0
    after = json.loads((searched / "tune.json").read_text())
    assert after["host_us"] == before["host_us"]
    assert after["own"]["composed"] == before["own"]["composed"]
    assert {p: p.stat().st_mtime_ns for p in searched.glob("probes/*/report.json")} == probes
    assert not [p for p in searched.glob("runs/*/run.json") if p.stat().st_mtime > began]
    [varied] = after["sensitivity"]
    assert varied["legal"] == 3, "the launch's own layout needs 4 GPUs, others do not"
    assert varied["best"]["composed"]


def test_nothing_fits_names_the_closest_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = [*MODEL, "--num-layers", "64", "--hidden-size", "16384", "--num-attention-heads", "128"]
    status = cli.main(
        [
            "tune",
            "--world-size",
            "4",
            "--out",
            str(tmp_path / "t"),
            *KNOBS,
            "--emulate",
            "0",
            "--",
            str(SCRIPT),
            *huge,
        ]
    )
    assert status == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "nothing fits: of 4 legal layouts the closest miss, tp2 pp2" in error
    assert "GiB a GPU" in error


def test_the_flag_on_a_launch(tmp_path: Path) -> None:
    """Whose budget is over before anything was composed."""
    flags = [
        "--prism-emulate",
        "--prism-world-size=4",
        "--prism-tune=0.1s",
        "--prism-tune-knobs=tp=1,2;vpp=1",
    ]
    command = [
        sys.executable,
        "-m",
        "prism_plugins.run",
        str(SCRIPT),
        *MODEL,
        *flags,
        f"--prism-out={tmp_path}/t",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("prism: error: the budget of 0.1 s was over")
