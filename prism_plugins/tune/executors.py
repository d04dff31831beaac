"""Where full emulations run: here one after the other, as jobs of a Slurm array (submitit), or as Ray tasks.

Workers see the same file system: results are read from the run directories, not carried by the executor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prism_plugins.errors import PrismError
from prism_plugins.options import Job
from prism_plugins.tune.emulate import emulate

_MOST_MINUTES = 7 * 24 * 60
"""Of a job of a Slurm array; more is left to the partition's own limit."""
EXECUTORS = ("local", "submitit", "ray")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One emulation."""

    job: Job
    argv: tuple[str, ...]
    cluster: Path
    out: Path
    seconds: float
    """It is ended after that long."""


class Executor(Protocol):
    """Runs emulations."""

    width: int
    """How many at a time."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, str]]:
        """(index of the task, what went wrong or "" when it ended by itself) as they end."""
        ...


def run_task(task: Task) -> str:
    """In a worker: the emulation of a task; its prediction is in the run directory afterwards."""
    found = emulate(task.job, task.argv, cluster=task.cluster, out=task.out, seconds=task.seconds)
    return found if isinstance(found, str) else ""


class LocalExecutor:
    """In this process, one at a time: the slices of one emulation already use the cores."""

    width = 1

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, str]]:
        """See :class:`Executor`."""
        for index, task in enumerate(tasks):
            yield index, run_task(task)


class SubmititExecutor:
    """A Slurm array where there is Slurm, processes of this machine otherwise (submitit decides)."""

    def __init__(self, folder: Path, *, width: int, cpus: int, slurm: dict[str, Any]) -> None:
        self.width = width
        executor = _imported("submitit").AutoExecutor(folder=folder)
        executor.update_parameters(cpus_per_task=cpus, name="prism-tune", **slurm)
        self._executor = executor

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, str]]:
        """See :class:`Executor`."""
        minutes = max(task.seconds for task in tasks) / 60
        if minutes < _MOST_MINUTES:
            self._executor.update_parameters(timeout_min=int(minutes) + 1)
        jobs = self._executor.map_array(run_task, list(tasks))
        try:
            for index, job in enumerate(jobs):
                error = job.exception()
                yield index, (f"its job failed: {error}" if error is not None else job.result())
        finally:
            for job in jobs:
                if not job.done():
                    job.cancel(check=False)


class RayExecutor:
    """Tasks of the Ray cluster that ``ray.init()`` finds, or starts on this machine."""

    def __init__(self, *, width: int, cpus: int) -> None:
        self.width = width
        self._ray = _imported("ray")
        self._cpus = cpus
        try:
            if not self._ray.is_initialized():
                self._ray.init(log_to_driver=False)
        except Exception as error:  # Ray raises bare ones, too.
            told = " ".join(str(error).split()) or type(error).__name__
            raise PrismError(f"--executor ray: Ray does not start: {told}") from None

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, str]]:
        """See :class:`Executor`."""
        remote = self._ray.remote(num_cpus=self._cpus)(run_task)
        pending = {remote.remote(task): index for index, task in enumerate(tasks)}
        try:
            while pending:
                done, _ = self._ray.wait(list(pending), num_returns=1)
                try:
                    told = self._ray.get(done[0])
                except self._ray.exceptions.RayError as error:
                    told = f"its task failed: {' '.join(str(error).split())[:300]}"
                yield pending.pop(done[0]), told
        finally:
            for reference in pending:
                self._ray.cancel(reference)


def make_executor(
    name: str, *, directory: Path, width: int, cpus: int, slurm: Sequence[str] = ()
) -> Executor:
    """The executor of that name. ``slurm``: ``key=value`` parameters of submitit, e.g. ``slurm_partition=cpu``.

    Raises :class:`PrismError` for an unknown name, a package that is not installed, or parameters without a value.
    """
    if name == "local":
        return LocalExecutor()
    if name == "ray":
        return RayExecutor(width=width, cpus=cpus)
    if name != "submitit":
        raise PrismError(f"no executor {name}; there are {', '.join(EXECUTORS)}")
    parameters: dict[str, Any] = {}
    for text in slurm:
        key, equals, value = text.partition("=")
        if not equals:
            raise PrismError(f"--slurm expects KEY=VALUE, not {text!r}")
        parameters[key] = int(value) if value.isdecimal() else value
    return SubmititExecutor(directory / "submitit", width=width, cpus=cpus, slurm=parameters)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise PrismError(f"--executor {name} needs the package {name}: pip install {name}") from None
