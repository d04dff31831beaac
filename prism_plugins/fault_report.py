"""What faults do to a job: slow ranks and NICs, jitter, a rank that fails. See ``prism what-if``."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from prism_plugins.checks.stalls import Stall, stalls
from prism_plugins.costs.base import CostModel
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.slow_links import CostsWithSlowLinks, SlowLink
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.ranks import format_ranks
from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import Program
from prism_plugins.program.replay import ReplaySummary
from prism_plugins.report.critical_path import CriticalPath, critical_path
from prism_plugins.report.path_ops import PathOp, PathTotal, path_ops, totals
from prism_plugins.report.rank_spans import RankSpans
from prism_plugins.simulate.disturbance import Disturbance
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.expand import CallStarts
from prism_plugins.simulate.timeline import OpTimes
from prism_plugins.simulate.vector import Failure, VectorMachine, VectorTimes

_SIGMAS = 5.0
_SMALLEST = 0.05
_TOP = 5
_MOST_WAITING = 4
_TOTALS = 12


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags ask for."""

    slow_ranks: dict[int, float] = {}
    slow_links: tuple[SlowLink, ...] = ()
    jitter: float = 0.0
    """Standard deviation of the ranks' speeds, as a fraction."""
    seeds: int = 1
    first_seed: int = 0
    failure: Failure | None = None

    def __bool__(self) -> bool:
        return bool(self.slow_ranks or self.slow_links or self.jitter or self.failure)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits for one rank, as the last to come to a call. Times in ms."""

    rank: int
    total_ms: float
    """Summed over the ranks that wait and their calls."""
    in_groups: dict[str, float]
    """The same by the group of the calls, most first."""
    by_ranks: tuple[tuple[str, float], ...]
    """(ranks of a class, what each waits on average), most first."""


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the faults do to the job. Times in ms; stable keys for ``--json``."""

    undisturbed_ms: float
    iteration_ms: tuple[float, ...]
    """By seed; empty when a rank fails."""
    waited_for: tuple[Waiting, ...] = ()
    """The ranks that are waited for most; of the first seed."""
    waiting_ms: float = 0.0
    """Mean over ranks of the time in calls before the last member came; of the first seed."""
    critical_path: tuple[PathTotal, ...] = ()
    """The ops that take most of it; without jitter."""
    critical_path_ms: dict[str, float] = {}
    """All of it by kind."""
    critical_path_ranks: tuple[tuple[int, float], ...] = ()
    """(rank, time on it), most first."""
    stalled: tuple[Stall, ...] = ()
    """Ranks that a failure stops, the failed one first."""
    num_stalled: int = 0
    replay: tuple[ReplaySummary, ...] = ()
    """Ranks that ran again on a GPU among these faults."""
    seconds: float = 0.0


def simulate_faults(
    job: JobPrograms,
    costs: CostModel,
    cluster: Cluster,
    faults: Faults,
    *,
    costs_of: Callable[[Cluster], CostModel],
    jobs: int = 0,
    on_path: Callable[[Iterator[PathOp]], None] | None = None,
) -> FaultReport:
    """Simulate the job without and with the faults. ``job`` without optimizer shards; ``costs_of`` prices on another
    cluster; ``on_path`` is given every op of the critical path, where there is one.

    Raises:
        SimulationFault: the job would hang anyway.
        PrismError: its ranks cannot have speeds of their own.
    """
    began = time.perf_counter()
    undisturbed = Simulation(job, costs).timeline.iteration_time_ns / 1e6
    simulation = disturbed(job, costs, cluster, faults, costs_of=costs_of)
    costs = simulation.costs
    spread = _SIGMAS * faults.jitter
    bounds = (max(1 - spread, _SMALLEST), 1 + spread)
    machine = simulation.vector_machine(bounds)
    num_ranks = job.layout.world_size
    draws = [
        draw(faults.jitter, seed, num_ranks, bounds)
        for seed in range(faults.first_seed, faults.first_seed + (faults.seeds if faults.jitter else 1))
    ]
    first = machine.run(draws[0], failure=faults.failure, explain=faults.failure is None)
    report = FaultReport(
        undisturbed_ms=undisturbed,
        iteration_ms=(),
        waited_for=_waited_for(job, first) if faults.failure is None else (),
        waiting_ms=float(first.waited_ns.mean()) / 1e6,
    )
    if faults.failure is not None:
        stalled = stalls(job, first, faults.failure)
        report = msgspec.structs.replace(
            report, stalled=stalled, num_stalled=int(np.isinf(first.finish_ns).sum())
        )
    else:
        finish = [float(first.finish_ns.max()), *_finish_times(machine, draws[1:], jobs)]
        report = msgspec.structs.replace(report, iteration_ms=tuple(t / 1e6 for t in finish))
        if not faults.jitter:
            path, spans = _critical_path(job, costs, cluster, simulation)
            ops = list(path_ops(path, spans))
            if on_path is not None:
                on_path(iter(ops))
            report = msgspec.structs.replace(
                report,
                critical_path=tuple(totals(ops)[:_TOTALS]),
                critical_path_ms=path.by_kind_ms,
                critical_path_ranks=_ranks_of_path(path),
            )
    return msgspec.structs.replace(report, seconds=time.perf_counter() - began)


def disturbed(
    job: JobPrograms,
    costs: CostModel,
    cluster: Cluster,
    faults: Faults,
    *,
    costs_of: Callable[[Cluster], CostModel],
) -> Simulation:
    """The job with its slow ranks and links. Raises SimulationFault."""
    if faults.slow_links:
        costs = CostsWithSlowLinks(costs, _slow_costs(faults.slow_links, cluster, costs_of), cluster)
    return Simulation(job, costs, Disturbance(slow_ranks=faults.slow_ranks))


def draw(jitter: float, seed: int, num_ranks: int, bounds: tuple[float, float]) -> np.ndarray:
    """Factors of all ranks' kernels for one seed."""
    return np.clip(np.random.default_rng(seed).normal(1.0, jitter, num_ranks), *bounds)


def _slow_costs(
    links: Sequence[SlowLink], cluster: Cluster, costs_of: Callable[[Cluster], CostModel]
) -> dict[int, CostModel]:
    by_factor: dict[float, CostModel] = {}
    slow: dict[int, CostModel] = {}
    for link in sorted(links, key=lambda x: -x.factor):
        if link.factor not in by_factor:
            node = msgspec.structs.replace(
                cluster.node, nic_bytes_per_s=cluster.node.nic_bytes_per_s * link.factor
            )
            by_factor[link.factor] = costs_of(msgspec.structs.replace(cluster, node=node))
        slow.update(dict.fromkeys(link.ranks(cluster), by_factor[link.factor]))
    return slow


_shared: tuple[VectorMachine, list[np.ndarray]] | None = None
"""What forked workers inherit."""


def _finish_times(machine: VectorMachine, draws: list[np.ndarray], jobs: int) -> list[float]:
    global _shared
    workers = min(jobs or os.cpu_count() or 1, len(draws))
    if workers < 2:
        return [float(machine.run(factors).finish_ns.max()) for factors in draws]
    _shared = (machine, draws)
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            return pool.map(_finish_of, range(len(draws)), chunksize=1)
    finally:
        _shared = None


def _finish_of(index: int) -> float:
    assert _shared is not None
    machine, draws = _shared
    return float(machine.run(draws[index]).finish_ns.max())


def _waited_for(job: JobPrograms, times: VectorTimes) -> tuple[Waiting, ...]:
    found = []
    for rank in np.argsort(-times.caused_ns, kind="stable")[:_TOP].tolist():
        total = float(times.caused_ns[rank]) / 1e6
        if total <= 0:
            break
        groups = {label: float(caused[rank]) / 1e6 for label, caused in times.caused_in.items()}
        by_class = [
            (format_ranks(others, max_runs=4), float(ms) / 1e6 / len(others))
            for cls, ms in zip(job.classes, times.caused_of_class[rank], strict=True)
            if ms > 0 and (others := [other for other in cls.ranks if other != rank])
        ]
        found.append(
            Waiting(
                rank=rank,
                total_ms=total,
                in_groups={
                    label: ms for label, ms in sorted(groups.items(), key=lambda entry: -entry[1]) if ms > 0
                },
                by_ranks=tuple(sorted(by_class, key=lambda entry: -entry[1])[:_MOST_WAITING]),
            )
        )
    return tuple(found)


def _ranks_of_path(path: CriticalPath) -> tuple[tuple[int, float], ...]:
    on_path: dict[int, float] = {}
    for segment in path.segments:
        on_path[segment.rank] = on_path.get(segment.rank, 0.0) + (segment.end_ns - segment.start_ns) / 1e6
    return tuple(sorted(on_path.items(), key=lambda entry: -entry[1])[:_TOP])


class _DisturbedView(JobView, frozen=True, kw_only=True):
    """A job whose classes were split where the faults make ranks differ."""

    simulation: Simulation
    whole: JobPrograms

    def program(self, rank: int) -> Program:
        """The program of a rank."""
        return program_of(self.whole, rank)

    def timed_program(self, rank: int) -> tuple[Program, OpTimes]:
        """The program of a rank and its times with the faults."""
        return self.program(rank), self.simulation.op_times(rank)

    def call_starts(self, rank: int) -> CallStarts:
        """When a rank comes to each of its calls, with the faults."""
        return self.simulation.call_starts(rank)

    def cell_of_rank(self) -> np.ndarray:
        """Which ranks have the same times, with the faults."""
        return self.simulation.cell_of_rank


def _split(job: JobPrograms, simulation: Simulation) -> JobPrograms:
    """A class for each set of ranks with equal times."""
    classes = tuple(
        RankClass(
            name=job.classes[cell.class_index].name,
            ranks=cell.ranks,
            representative=int(cell.ranks[0]),
            exemplar=cell.program,
        )
        for cell in simulation.cells
    )
    return msgspec.structs.replace(job, classes=classes)


def _critical_path(
    job: JobPrograms, costs: CostModel, cluster: Cluster, simulation: Simulation
) -> tuple[CriticalPath, RankSpans]:
    view = _DisturbedView(
        simulation=simulation,
        whole=job,
        job=_split(job, simulation),
        costs=costs,
        timeline=simulation.timeline,
        gpu=cluster.gpu_facts(),
        gpus_per_node=cluster.gpus_per_node,
    )
    spans = RankSpans(view)
    return critical_path(spans), spans
