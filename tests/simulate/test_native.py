"""The compiled loop of the machine against the one in Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from builders import TableCosts, one_class_per_rank, random_programs
from symmetric import random_job

from prism_plugins.simulate import native
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No library is loaded yet, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    yield tmp_path / "prism_plugins"
    native._library.cache_clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("seed", range(8))
def test_both_loops_give_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    if seed % 2:
        job = one_class_per_rank(random_programs(rng, num_ranks=5, num_actions=300))
    else:
        job = random_job(rng, layout=Layout(world_size=16, tp=2, pp=4, dp=2), num_actions=60)
    assert native._library() is not None
    compiled = Simulation(job, TableCosts())
    monkeypatch.setattr(native, "_library", lambda: None)
    interpreted = Simulation(job, TableCosts())
    assert compiled.timeline.class_time_ns == interpreted.timeline.class_time_ns
    assert compiled.timeline.breakdown == interpreted.timeline.breakdown
    for name in ("_times", "_trace"):
        assert np.array_equal(getattr(compiled._machine, name), getattr(interpreted._machine, name))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_compiled_once_into_the_users_cache(fresh_library: Path) -> None:
    assert native._library() is not None
    (built,) = fresh_library.iterdir()
    before = built.stat().st_mtime_ns
    native._library.cache_clear()
    assert native._library() is not None
    assert built.stat().st_mtime_ns == before


@pytest.mark.parametrize("obstacle", ["no compiler", "broken compiler", "foreign file"])
def test_python_stands_in(obstacle: str, fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle == "no compiler":
        monkeypatch.setattr(native, "_found", lambda compiler: False)
    elif obstacle == "broken compiler":
        monkeypatch.setenv("CXX", "false")
    else:
        monkeypatch.setattr(native, "_compiled", lambda folders, name: Path(__file__))
    assert native._library() is None
    job = random_job(np.random.default_rng(1), layout=Layout(world_size=8, tp=2, pp=2, dp=2), num_actions=20)
    assert Simulation(job, TableCosts()).timeline.iteration_time_ns > 0
