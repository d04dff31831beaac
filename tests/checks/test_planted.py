"""The planted scripts: each bug is found where it is, and the clean script has no finding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import check_planted  # noqa: E402

IN_CI = ("branch",)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in IN_CI else pytest.mark.slow) for n in check_planted.CASES],
)
def test_the_bug_is_found_and_the_clean_script_is_clean(name: str) -> None:
    case = check_planted.CASES[name]
    message = check_planted.missed(name, case, check_planted.findings(name, case))
    assert not message.startswith("MISSED"), message
    assert check_planted.findings(name, case, "--clean") == []


def test_every_planted_script_is_a_case() -> None:
    scripts = {p.stem for p in (SCRIPTS / "planted").glob("*.py")} - {"planted_job", "planted_deepspeed"}
    assert scripts == set(check_planted.CASES)
