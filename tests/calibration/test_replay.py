"""What is made of timed blocks."""

from __future__ import annotations

import pytest

from prism_plugins.calibration.replay import Entry, figure_of
from prism_plugins.calibration.timers import Sample
from prism_plugins.program.model import OpSignature, TensorSpec

X = TensorSpec("bfloat16", (1024, 1024))


def entry(op: str, samples: list[Sample]) -> Entry:
    made = Entry(OpSignature(op=op, inputs=(X, X), outputs=(X,)), [])
    made.hot = samples
    return made


def test_the_share_that_scales_with_the_clock_is_found_between_blocks() -> None:
    clocks = [1400.0 + 20 * i for i in range(20)]
    figure = figure_of(entry("aten::mm", [Sample(70.0 * 1600 / f + 30.0, f, 4) for f in clocks]))
    assert figure.us == pytest.approx(100, rel=0.01)
    assert figure.clock_mhz == pytest.approx(1590, rel=0.01)
    assert figure.compute_share == pytest.approx(0.7, abs=0.01)
    assert figure.repetitions == 80


def test_a_steady_clock_tells_nothing_and_the_family_stands_in() -> None:
    same = [Sample(100.0, 1600.0, 4)] * 10
    assert figure_of(entry("aten::mm", same)).compute_share > 0.9
    assert figure_of(entry("aten::copy_", same)).compute_share < 0.2


def test_without_clocks_a_figure_says_so() -> None:
    figure = figure_of(entry("aten::mm", [Sample(100.0, 0.0, 4)] * 10))
    assert figure.clock_mhz == 0.0
    assert figure.us == pytest.approx(100.0)


def test_a_hiccup_of_the_host_is_left_out() -> None:
    samples = [Sample(100.0, 1600.0, 1)] * 199 + [Sample(90_000.0, 1600.0, 1)]
    assert figure_of(entry("aten::mm", samples)).us == pytest.approx(100.0)
