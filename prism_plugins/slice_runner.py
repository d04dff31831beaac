"""Runs slices in dependency order: from the cache where it can, in child processes otherwise."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from prism_plugins.cache import SliceCache
from prism_plugins.errors import PrismError, SliceFailed
from prism_plugins.local_rank import with_local_rank
from prism_plugins.options import Job
from prism_plugins.program.slices import GpuFacts, JobFacts, ScriptFailure, SliceReport, SliceSpec
from prism_plugins.progress import Progress
from prism_plugins.rundir import RunDir, read_json

_POLL_S = 0.05


class Executor(Protocol):
    """Something that runs slices: the local pool, or the other physical ranks."""

    def free(self) -> int:
        """How many more it takes now."""
        ...

    def start(self, spec: SliceSpec, *, stream: bool) -> None:
        """Start one."""
        ...

    def collect(self) -> list[tuple[SliceSpec, SliceReport]]:
        """Those that ended since the last call; their files are in the run directory."""
        ...


class SliceRunner:
    """The slices of one run. Ranks are added at any time, also while others run."""

    def __init__(
        self,
        job: Job,
        *,
        gpu: GpuFacts,
        gpus_per_node: int,
        rundir: RunDir,
        cache: SliceCache | None,
        executors: list[Executor],
        progress: Progress,
    ) -> None:
        self.reports: dict[int, SliceReport] = {}
        self.audited: set[int] = set()
        """Ranks sliced only to be compared; inference must not see them."""
        self._job = job
        self._gpu = gpu
        self._gpus_per_node = gpus_per_node
        self._rundir = rundir
        self._cache = cache
        self._executors = executors
        self._progress = progress
        self._waiting: dict[int, tuple[int, ...]] = {}
        self._running: set[int] = set()
        self._to_keep: list[SliceSpec] = []
        self._streamed = {0, job.options.world_size - 1}

    @property
    def facts(self) -> JobFacts:
        """What the lead slice told; it must have ended."""
        facts = self.reports[0].facts
        if facts is None:
            raise SliceFailed("prism: error: the script trained, but its framework told no layout")
        return facts

    @property
    def sliced(self) -> dict[int, SliceReport]:
        """Reports of the slices that inference may use."""
        return {rank: report for rank, report in self.reports.items() if rank not in self.audited}

    def add(self, plan: dict[int, tuple[int, ...]], *, audit: bool = False) -> None:
        """Queue ranks (rank → ranks whose journals it needs); those known already are not run again."""
        if audit:
            self.audited |= set(plan)
        else:
            self.audited -= set(plan)
        for rank, depends_on in plan.items():
            if rank not in self.reports and rank not in self._running:
                self._waiting.setdefault(rank, depends_on)
        self._progress.planned(len(self.reports) + len(self._running) + len(self._waiting))

    def forget(self, ranks: Iterable[int]) -> None:
        """Drop what slices found, so that they can be added again."""
        for rank in ranks:
            del self.reports[rank]
            shutil.rmtree(self._rundir.slice(rank).path)

    def run(self, *, on_facts: Callable[[JobFacts], None] | None = None) -> None:
        """Run until nothing is queued. ``on_facts`` is called once, as soon as the lead slice (rank 0) told the
        layout, and may add ranks.

        Raises:
            SliceFailed: a slice crashed or never trained.
            PrismError: a mistake of the user found inside a slice.
        """
        while self._waiting or self._running or on_facts is not None:
            if on_facts is not None and (facts := self._lead_facts()) is not None:
                on_facts(facts)
                on_facts = None
            self._start_ready()
            ended = [pair for executor in self._executors for pair in executor.collect()]
            for spec, report in ended:
                self._ended(spec, report)
            if not ended:
                time.sleep(_POLL_S)

    def run_for_real(self, store: str) -> None:
        """Run every rank of the target world at the same time, one per executor; their groups really communicate
        through the TCPStore at ``store``. Nothing is virtual but the GPU, nothing is cached."""
        ranks = tuple(range(self._job.options.world_size))
        self._progress.planned(len(ranks))
        for rank, executor in zip(ranks, self._executors, strict=True):
            spec = msgspec.structs.replace(self.spec(rank, ()), real_ranks=ranks, store=store)
            self._running.add(rank)
            self._progress.started(rank, "for real")
            executor.start(spec, stream=rank in self._streamed)
        self._cache = None
        self.run()

    def spec(self, rank: int, depends_on: tuple[int, ...]) -> SliceSpec:
        """What the slice of a rank is told."""
        return slice_spec(
            self._job,
            self._rundir,
            rank,
            depends_on,
            gpu=self._gpu,
            gpus_per_node=self._gpus_per_node,
        )

    def _lead_facts(self) -> JobFacts | None:
        if 0 in self.reports:
            return self.facts
        path = self._rundir.slice(0).facts
        return read_json(path, JobFacts, versioned=False) if path.exists() else None

    def _start_ready(self) -> None:
        for rank, depends_on in list(self._waiting.items()):
            if not all(self._serves(needed) for needed in depends_on):
                continue
            executor = next((e for e in self._executors if e.free() > 0), None)
            if executor is None:
                return
            del self._waiting[rank]
            spec = self.spec(rank, depends_on)
            final = all(needed in self.reports for needed in depends_on)
            kept = self._cache.fetch(spec) if self._cache is not None and final else None
            if kept is not None:
                self._replay_log(spec)
                self._finished(rank, kept)
                continue
            self._running.add(rank)
            self._progress.started(rank, self._what(rank))
            executor.start(spec, stream=rank in self._streamed)

    def _what(self, rank: int) -> str:
        if rank in self.audited:
            return "audit"
        return "lead" if rank == 0 else ""

    def _ended(self, spec: SliceSpec, report: SliceReport) -> None:
        self._running.discard(spec.rank)
        if report.status != "ok":
            raise failure(report, self._rundir)
        if report.failure is None:  # What a script fails of (a full disk) may be gone the next time.
            self._to_keep.append(spec)
        self._finished(spec.rank, report)
        self._keep_finished()

    def _serves(self, rank: int) -> bool:
        """Whether a slice's journal can be read: it ended, or it did its first iteration and stays ahead of who
        starts now."""
        return rank in self.reports or (rank in self._running and self._rundir.slice(rank).journal.exists())

    def _keep_finished(self) -> None:
        """Put slices into the cache whose journals are final: their contents are part of the key."""
        if self._cache is None:
            return
        unfinished = {str(self._rundir.slice(rank).journal) for rank in self._running}
        for spec in list(self._to_keep):
            if not unfinished & set(spec.journals):
                self._to_keep.remove(spec)
                self._cache.keep(spec)

    def _finished(self, rank: int, report: SliceReport) -> None:
        self.reports[rank] = report
        self._progress.finished(rank, report)

    def _replay_log(self, spec: SliceSpec) -> None:
        if spec.rank in self._streamed:
            log = Path(spec.slice_dir) / "log.txt"
            for line in log.read_text(errors="replace").splitlines():
                self._progress.output(line)


def failure(report: SliceReport, rundir: RunDir) -> Exception:
    """What the user sees of a slice that did not end well."""
    if report.status in ("user_error", "out_of_memory"):
        return PrismError(report.message)
    log = rundir.slice(report.rank).log
    if report.status == "never_trained":
        return SliceFailed(f"prism: error: rank {report.rank}: {report.message}; its output: {log}")
    what = f"the slice of rank {report.rank} {report.status}"
    if report.status == "script_failed":
        what = f"the script failed as rank {report.rank}"
    return SliceFailed(_told(what, report, log))


def late_failures(reports: Mapping[int, SliceReport], rundir: RunDir) -> list[str]:
    """What the user sees, beside the prediction, of scripts that failed after iterations that count."""
    return [
        _told(f"the script failed as rank {rank}", report.failure, rundir.slice(rank).log)
        for rank, report in sorted(reports.items())
        if report.failure is not None
    ]


def _told(what: str, failure: ScriptFailure | SliceReport, log: Path) -> str:
    trace = failure.traceback.rstrip()
    head = f"prism: error: {what} ({failure.phase}): {failure.message}"
    return "\n".join([head, *([trace] if trace else []), f"prism: its whole output: {log}"])


def slice_spec(
    job: Job,
    rundir: RunDir,
    rank: int,
    depends_on: tuple[int, ...],
    *,
    gpu: GpuFacts,
    gpus_per_node: int,
) -> SliceSpec:
    """What the slice of a rank is told; ``depends_on``: slices whose journals it reads, where there are such."""
    options = job.options
    # On a real GPU a slice sees one.
    local_rank = 0 if options.device == "cuda" else rank % min(gpus_per_node, options.world_size)
    journals = [rundir.slice(r).journal for r in depends_on]
    return SliceSpec(
        rank=rank,
        world_size=options.world_size,
        gpus_per_node=gpus_per_node,
        argv=with_local_rank(job.argv, local_rank),
        run_as=job.run_as,
        device=options.device,
        iterations=options.iterations,
        gpu=gpu,
        slice_dir=str(rundir.slice(rank).path),
        journals=tuple(str(j) for j in journals if j.exists()),
        moe_load=options.moe_load,
        apex=options.apex,
        gpu_memory_bytes=options.gpu_memory,
    )
