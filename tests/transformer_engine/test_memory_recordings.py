"""Memory of two recorded 8-GPU jobs on H100s, by scripts/bench_memory.py; needs a checkout of Megatron-LM (MEGATRON_LM)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

MEGATRON = os.environ.get("MEGATRON_LM")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM names no checkout of Megatron-LM"),
    pytest.mark.xdist_group("te-memory"),
]

_spec = importlib.util.spec_from_file_location(
    "bench_memory", Path(__file__).parents[2] / "scripts" / "bench_memory.py"
)
bench_memory = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench_memory)


@pytest.mark.parametrize(
    "name",
    [
        "gpt3_mr_mcore_te_tp1_pp1_frozen_resume_torch_dist_dist_optimizer",
        "gpt3_mr_mcore_te_tp2_pp1_frozen_resume_torch_dist_cp2_nondeterministic",
    ],
)
def test_last_rank_has_the_recorded_bytes(name, te_environment, tmp_path, monkeypatch):
    case = next(c for c in bench_memory.load_cases() if name in c.name)
    for key, value in te_environment.items():
        monkeypatch.setenv(key, value)
    result = bench_memory.emulate(case, megatron=Path(MEGATRON).resolve(), out=tmp_path / "run")
    assert result.peak == pytest.approx(case.peak, rel=0.001)
    assert result.allocated == pytest.approx(case.allocated, rel=0.005)
