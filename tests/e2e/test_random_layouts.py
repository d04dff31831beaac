"""Random small jobs: what is inferred for every rank is what a slice of that rank does. All of them: scripts/check_random_layouts.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.megatron_jobs import MEGATRON_LM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_random_layouts

SEED = 1
IN_CI = [("megatron", 3), ("megatron", 18), ("deepspeed", 1)]
"""Of four ranks each: few slices."""
SLOW = [(framework, number) for number in range(12) for framework in check_random_layouts.FRAMEWORKS]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("framework", "number"),
    [*IN_CI, *(pytest.param(*job, marks=pytest.mark.slow) for job in SLOW if job not in IN_CI)],
)
def test_every_rank_does_what_was_inferred_for_it(tmp_path: Path, framework: str, number: int) -> None:
    job = check_random_layouts.draw(framework, SEED, number)
    megatron = MEGATRON_LM if (MEGATRON_LM / "pretrain_gpt.py").exists() else None
    if job.script == "pretrain_gpt.py" and megatron is None:
        pytest.skip("MEGATRON_LM names no Megatron-LM checkout")
    result = check_random_layouts.run(job, megatron=megatron, folder=tmp_path / "job", prism_args=[])
    if result["status"] == "refused":
        pytest.skip(f"the framework refuses it: {result['message']}")
    assert result["status"] == "same", check_random_layouts.line(result | {"name": "", "job": job.text})
    if (framework, number) in IN_CI:
        assert result["audited"], "no rank was left to infer"


def test_jobs_are_drawn_from_seed_and_number_alone() -> None:
    for framework in check_random_layouts.FRAMEWORKS:
        texts = [check_random_layouts.draw(framework, SEED, number).text for number in range(40)]
        assert texts == [check_random_layouts.draw(framework, SEED, number).text for number in range(40)]
        assert len(set(texts)) == 40
        assert all(
            4 <= check_random_layouts.draw(framework, SEED, number).world <= 16 for number in range(40)
        )
