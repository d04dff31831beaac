"""The equivalents of DeepSpeed's loops over ranks do on the device what the loops do."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.megatron_jobs import run_slice

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed and the virtual device, which needs a compiler",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("loops")
    script = Path(__file__).with_name("loops_script.py")
    slice_result = run_slice(folder, script, str(folder / "result.json"), rank=100, world_size=192)
    assert slice_result.report.status == "never_trained", slice_result.output
    results = json.loads((folder / "result.json").read_text())
    return {"tables": json.loads((folder / "tables.json").read_text()), "events": results}


def test_kernels_calls_and_memory_are_equal(results: dict) -> None:
    assert len(results["events"]) == 8
    for case, (loop, equivalent) in results["events"].items():
        assert loop["rows"], case
        assert equivalent["rows"] == loop["rows"], case
        assert equivalent["shapes"] == loop["shapes"], case
        assert equivalent["live"] == loop["live"], case


def test_the_hosts_time_grows_with_the_group(results: dict) -> None:
    events = results["events"]
    assert all(loop["host_views"] == 0 for loop, _ in events.values())
    small, world = (events[f"all_gather {name}"][1]["host_views"] for name in ("small", "world"))
    assert 0 < small < world


def test_tables_of_partitions_are_equal(results: dict) -> None:
    assert len(results["tables"]) == 4
    for loop, equivalent in results["tables"]:
        assert equivalent == loop
