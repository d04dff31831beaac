"""A whole search over the configurations of a DeepSpeed launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_plugins import cli, costs

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "scripts" / "deepspeed" / "train_llama.py"
CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000},
}
KNOBS = ("zero=2,3", "micro_batch=1", "offload=none", "bucket=50000000", "overlap=true")


def cluster_of(folder: Path) -> Path:
    """With host times given: those of slices differ with what else the machine does."""
    preset = Path(costs.__file__).parent / "clusters" / "dgx-h100.toml"
    path = folder / "cluster.toml"
    path.write_text(preset.read_text() + "\n[host]\nop_us = 10.0\n")
    return path


def tune(out: Path, config: Path, *options: str) -> int:
    knobs = [f"--knob={knob}" for knob in KNOBS]
    model = ["--layers", "2", "--hidden", "512", "--seq", "256"]
    return cli.main(
        [
            "tune", "--world-size", "8", "--cluster", str(cluster_of(config.parent)), "--out", str(out), *knobs, *options, "--", str(SCRIPT),
            "--deepspeed_config", str(config), *model,
        ]
    )  # fmt: skip


@pytest.mark.e2e
def test_a_search_over_zero_stages(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    out = tmp_path / "search"
    assert tune(out, config, "--emulate", "1") == 0
    result = json.loads((out / "tune.json").read_text())
    assert (result["counts"]["legal"], result["counts"]["composed"], result["status"]) == (2, 2, "done")
    emulated = [c for c in result["candidates"] if c["emulated"]]
    assert result["own"]["knobs"]["zero"] == 2
    for c in emulated:
        assert c["bound_ms"] <= c["emulated"]["iteration_ms"]
        assert c["bound_bytes"] <= c["emulated"]["memory_bytes"]
        assert c["composed"]["iteration_ms"] == pytest.approx(c["emulated"]["iteration_ms"], rel=0.1)
        assert c["composed"]["memory_bytes"] == pytest.approx(c["emulated"]["memory_bytes"], rel=0.05)
    other = next(c for c in result["candidates"] if c["knobs"]["zero"] == 3)
    written = json.loads(Path(other["arguments"][0]).read_text())
    assert written["zero_optimization"] == {**CONFIG["zero_optimization"], "stage": 3}
    assert written["train_batch_size"] == 32


def test_a_launch_without_a_configuration_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "model.json"
    other.write_text("{}")
    assert tune(tmp_path / "search", other) == 2
    assert "found none" in capsys.readouterr().err.splitlines()[-1]
