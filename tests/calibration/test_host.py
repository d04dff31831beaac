"""The host benchmark of ``prism calibrate --host`` is taken in the state in which slices take theirs."""

from __future__ import annotations

import pytest

from prism_plugins.calibration import host
from prism_plugins.costs.calibration import HostCosts
from prism_plugins.host_benchmark import AFTER_ITERATION_S, DispatchBenchmark
from prism_plugins.host_speed import _comparable
from prism_plugins.program.slices import BENCHMARK_VERSION


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    iterate, measure = host._Training.iterate, DispatchBenchmark.measure_us

    def iterated(self, *, seconds=0.0):
        seen.append("iteration")
        iterate(self, seconds=min(seconds, 0.01))

    def measured(self, *, budget_s):
        assert budget_s == AFTER_ITERATION_S
        seen.append("benchmark")
        return measure(self, budget_s=0.001)

    monkeypatch.setattr(host._Training, "iterate", iterated)
    monkeypatch.setattr(DispatchBenchmark, "measure_us", measured)
    return seen


def test_every_measurement_follows_a_training_iteration(order: list[str]) -> None:
    figures = host._benchmark("cpu", 0.0)
    assert order == ["iteration", *["iteration", "benchmark"] * host._ITERATIONS]
    assert figures.in_training
    assert figures.version == BENCHMARK_VERSION
    assert 0 < figures.dispatch_us[0] < 1e6
    costs = HostCosts(op_us=1.0, dispatch_us=1.0, view_us=1.0, benchmark=figures)
    assert _comparable(costs, [], given=False) == figures  # no factor from one state to the other


def test_training_changes_parameters() -> None:
    training = host._Training("cpu", blocks=1)
    before = [p.detach().clone() for p in training._model.parameters()]
    training.iterate()
    assert any((p != q).any() for p, q in zip(training._model.parameters(), before, strict=True))
