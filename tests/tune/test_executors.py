"""Where emulations run: by default here, elsewhere by packages that may be missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.options import Job, Options
from prism_plugins.physical import launch_from_environment, led_elsewhere
from prism_plugins.tune.emulate import alone
from prism_plugins.tune.executors import Task, make_executor


def task_of(tmp_path: Path, name: str, seconds: float = 60.0) -> Task:
    job = Job(options=Options(world_size=1), run_as="script", argv=("/nowhere.py",))
    return Task(job=job, argv=job.argv, cluster=tmp_path / "none.toml", out=tmp_path / name, seconds=seconds)


def executor_of(name: str, tmp_path: Path, **given):
    return make_executor(name, directory=tmp_path, width=2, cpus=1, **given)


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_a_missing_package_is_one_line(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrismError, match=f"pip install {name}"):
        executor_of(name, tmp_path)


def test_an_emulation_is_a_launch_of_its_own() -> None:
    environ = {"PRISM_TUNE": "10m", "PRISM_WORLD_SIZE": "8", "PATH": "/bin", "RANK": "1", "WORLD_SIZE": "2"}
    kept = alone(environ)
    assert kept["PATH"] == "/bin"
    assert not [name for name in kept if name.startswith("PRISM_")]
    assert launch_from_environment(kept).world == 1
    assert led_elsewhere({**kept, "SLURM_PROCID": "3"}) is None


def test_what_an_emulation_says_reaches_the_search(tmp_path: Path) -> None:
    [(index, told)] = executor_of("local", tmp_path).run([task_of(tmp_path, "a")])
    assert index == 0
    assert "does not exist" in told


def test_submitit_runs_tasks_in_processes_of_its_own(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    executor = executor_of("submitit", tmp_path, slurm=("slurm_partition=cpu",))
    if executor._executor.cluster != "local":
        pytest.skip(f"submitit {submitit.__version__} found {executor._executor.cluster}")
    told = dict(executor.run([task_of(tmp_path, "a"), task_of(tmp_path, "b", seconds=float("inf"))]))
    assert set(told) == {0, 1}
    assert all("does not exist" in text for text in told.values())
    with pytest.raises(PrismError, match="KEY=VALUE"):
        executor_of("submitit", tmp_path, slurm=("cpu",))


def test_a_ray_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch) -> None:
    def init(**given: object) -> None:
        raise Exception("The current node timed out\nduring startup.")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(PrismError, match="does not start: The current node timed out during startup"):
        executor_of("ray", tmp_path)
