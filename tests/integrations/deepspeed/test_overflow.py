"""Overflow checks of an emulated job."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from prism_plugins.integrations.deepspeed.overflow import _finite


def session(device: str) -> SimpleNamespace:
    lines: list[str] = []
    return SimpleNamespace(
        context=SimpleNamespace(spec=SimpleNamespace(device=device), assume=lines.append, lines=lines)
    )


@pytest.mark.parametrize("answer", [True, False])
def test_no_step_is_skipped_and_it_is_said(answer: bool) -> None:
    asked = []
    here = session("virtual")
    check = _finite(here, lambda value: asked.append(value) or answer, ModuleType("m"))
    assert check(3) is False
    assert asked == [3]
    assert bool(here.context.lines) == answer


def test_computed_values_answer_themselves() -> None:
    assert _finite(session("cpu"), lambda: True, ModuleType("m"))() is True
