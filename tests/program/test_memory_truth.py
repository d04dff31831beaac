"""Predicted against measured memory, through the real launch (``scripts/check_memory.py``)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_memory.py"
MEGATRON_LM = Path(os.environ.get("MEGATRON_LM", "/nowhere"))


def load_script():
    spec = importlib.util.spec_from_file_location("check_memory", SCRIPT)
    module = sys.modules["check_memory"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measured_jobs_are_complete():
    jobs = load_script().load_jobs()
    assert [job.name for job in jobs][:4] == ["dp2", "dp2no", "one4", "pp2"]
    assert len({job.name for job in jobs}) == len(jobs) == 12
    for job in jobs:
        assert sorted(job.memory) == list(range(job.num_gpus))
        assert all(
            m["allocated_bytes.all.peak"] > m["allocated_bytes.all.current"] for m in job.memory.values()
        )


def test_ranks_of():
    assert load_script().ranks_of("0-2,8") == {0, 1, 2, 8}


@pytest.mark.e2e
@pytest.mark.skipif(
    not (MEGATRON_LM / "pretrain_gpt.py").exists(), reason="MEGATRON_LM names no Megatron-LM checkout"
)
@pytest.mark.parametrize("name", ["pp2", "dp2"])
def test_memory_of_a_measured_job(tmp_path, name):
    script = load_script()
    (job,) = (job for job in script.load_jobs() if job.name == name)
    assert script.check(job, script.emulate(job, megatron=MEGATRON_LM, out=tmp_path / name))
