"""The ledgers against torch's own caching allocator, step by step: recorded by ``scripts/check_allocator.py``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check_allocator", ROOT / "scripts" / "check_allocator.py")
check_allocator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_allocator)

SOME = {("random0", None), ("vpp2", ""), ("vpp2", "expandable_segments:True")}
"""Traces and settings (None: all of them) that are compared at every run."""


def some(truth):
    return bool({(truth["trace"], None), (truth["trace"], truth["conf"])} & SOME)


def test_both_ledgers_count_what_torch_counts():
    lines = check_allocator.compare(check_allocator.DATA, wanted=some)
    assert len(lines) > 18
    assert [line for line in lines if not line.endswith(": equal")] == []


@pytest.mark.slow
def test_all_recorded_traces():
    lines = check_allocator.compare(check_allocator.DATA, wanted=lambda truth: not some(truth))
    assert len(lines) > 40
    assert [line for line in lines if not line.endswith(": equal")] == []


def test_a_difference_is_told(tmp_path):
    data = json.loads(check_allocator.DATA.read_text())
    (truth,) = [r for r in data["results"] if (r["conf"], r["limit_mib"], r["trace"]) == ("", 0, "random0")]
    truth["reserved"][-1][1] += 2 * check_allocator.MIB
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(data | {"results": [truth]}))
    lines = check_allocator.compare(wrong)
    assert len(lines) == 2
    assert all("reserved (" in line for line in lines)
