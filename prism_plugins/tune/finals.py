"""The last stage of a search: the best composed layouts, and the launch's own, emulated in full or run on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from prism_plugins.integration.tuning import Point, Space
from prism_plugins.options import Job
from prism_plugins.tune.emulate import emulate, estimate_of, finished_prediction, hang_of
from prism_plugins.tune.executors import Executor, Task, make_executor
from prism_plugins.tune.probes import digest
from prism_plugins.tune.progress import TuneProgress
from prism_plugins.tune.result import Candidate, TuneDir, TuneResult, describe
from prism_plugins.tune.settings import Settings

_MOST = 3
"""Times as many layouts are emulated at most as were asked for, where they turn out not to fit."""
LEAST_ERROR = 0.03
"""Of composed times, where emulations found less."""


class Finals:
    """Emulates composed layouts until none that is left can be better; ``composed`` is kept up to date."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        directory: TuneDir,
        *,
        result: TuneResult,
        composed: dict[Point, Candidate],
        lowest_pruned_ms: float,
        deadline: float,
        progress: TuneProgress,
        failed: Callable[[str], None],
        save: Callable[[], None],
    ) -> None:
        """``failed`` is told why an emulation did not come to its end, ``save`` writes what was found so far;
        ``lowest_pruned_ms`` is the smallest bound of a point that was left out as slower."""
        self._job = job
        self._settings = settings
        self._dir = directory
        self._result = result
        self._composed = composed
        self._lowest_pruned_ms = lowest_pruned_ms
        self._deadline = deadline
        self._progress = progress
        self._failed = failed
        self._save = save

    def run(self, space: Space) -> None:
        """The best composed layouts and the own launch in full, until none that is left can be better."""
        settings = self._settings
        executor = make_executor(
            settings.executor,
            directory=self._dir.path,
            width=settings.workers,
            cpus=self._job.options.jobs,
            slurm=settings.slurm,
        )
        done = 0
        tried: set[Point] = set()
        everything = settings.everything and settings.emulations > 0
        while (everything or done < settings.emulations) and time.monotonic() < self._deadline:
            order = [p for p in self._order() if p not in tried]
            if not order or (len(tried) >= _MOST * max(1, settings.emulations) and not everything):
                break
            if self._is_proven(order) and not everything:
                break
            most = executor.width if everything else min(executor.width, settings.emulations - done)
            batch = order[:most]
            tried.update(batch)
            self._emulate(space, batch, executor)
            done += sum(self._fits(point) for point in batch)
        waits = settings.emulations > 0 and space.own in self._composed and space.own not in tried
        if waits and time.monotonic() < self._deadline:
            tried.add(space.own)
            self._emulate(space, [space.own], executor)
        self._result.proven = bool(tried) and self._is_proven([p for p in self._order() if p not in tried])

    def _order(self) -> list[Point]:
        """Points that fit, best first by composed time."""
        capacity = self._result.capacity_bytes
        fitting = [
            (c.composed.iteration_ms, p)
            for p, c in self._composed.items()
            if c.composed and not c.failed and c.composed.memory_bytes <= capacity
        ]
        return [p for _, p in sorted(fitting, key=lambda item: item[0])]

    def _fits(self, point: Point) -> bool:
        """It was emulated and has room. One that has not does not count: its composed memory was a little too low."""
        found = self._composed[point].emulated
        return found is not None and found.memory_bytes <= self._result.capacity_bytes

    def _best(self) -> Candidate | None:
        """The fastest emulated layout that fits."""
        fitting = [
            (c.emulated.iteration_ms, c) for p, c in self._composed.items() if c.emulated and self._fits(p)
        ]
        return min(fitting, key=lambda item: item[0])[1] if fitting else None

    def _is_proven(self, left: list[Point]) -> bool:
        """No composed layout that is left, less the error found so far, is faster than the best emulated one."""
        result = self._result
        emulated = [
            c.emulated.iteration_ms
            for c in self._composed.values()
            if c.emulated and c.emulated.memory_bytes <= result.capacity_bytes
        ]
        if not emulated or result.counts.left or self._lowest_pruned_ms < min(emulated):
            return False
        error = max(LEAST_ERROR, result.composition_error or 0.0)
        times = [c.composed.iteration_ms for p in left if (c := self._composed[p]).composed]
        return all(ms * (1 - error) >= min(emulated) for ms in times)

    def _emulate(self, space: Space, points: list[Point], executor: Executor) -> None:
        seconds = max(0.0, self._deadline - time.monotonic())
        told = ", ".join(describe(self._composed[point].knobs) for point in points)
        self._progress.stage(f"emulating {told} in full ({self._job.options.world_size} ranks)")
        tasks = [
            Task(
                job=self._job,
                argv=command,
                cluster=self._dir.cluster,
                out=self._dir.runs / digest(command),
                seconds=seconds,
            )
            for command in map(space.command, points)
        ]
        for index, failure in executor.run(tasks):
            self._emulated(points[index], tasks[index], failure)
            self._save()

    def _emulated(self, point: Point, task: Task, failure: str) -> None:
        candidate = self._composed[point]
        found = finished_prediction(task.out)
        if found is None:
            if failure:
                self._composed[point] = msgspec.structs.replace(candidate, failed=failure)
                self._failed(failure)
            return
        self._result.counts.emulated += 1
        estimate = estimate_of(found)
        hang = hang_of(found)
        self._composed[point] = msgspec.structs.replace(
            candidate,
            emulated=estimate,
            run=str(task.out),
            tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
            failed=hang,
        )
        if candidate.composed and not hang and estimate.iteration_ms:
            error = abs(candidate.composed.iteration_ms / estimate.iteration_ms - 1)
            self._result.composition_error = max(error, self._result.composition_error or 0.0)
        self._progress.emulated(self._composed[point], best=self._best())

    def verify(self, space: Space, best: list[Candidate]) -> None:
        """These layouts again, their slices on a real GPU."""
        options = msgspec.structs.replace(self._job.options, device="cuda", jobs=1)
        job = msgspec.structs.replace(self._job, options=options)
        points = {id(c): point for point, c in self._composed.items()}
        for candidate in best:
            point = points[id(candidate)]
            command = space.command(point)
            self._progress.stage(f"running slices of {describe(candidate.knobs)} on the GPU")
            found = emulate(
                job,
                command,
                cluster=self._dir.cluster,
                out=self._dir.path / "verified" / digest(command),
                seconds=max(0.0, self._deadline - time.monotonic()),
            )
            if found is None or isinstance(found, str):
                told = msgspec.structs.replace(candidate, unverified=found or "the budget was over")
            else:
                estimate = msgspec.structs.replace(estimate_of(found), source="verified")
                told = msgspec.structs.replace(candidate, verified=estimate)
            self._composed[point] = told
            self._save()
