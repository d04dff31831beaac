"""The fault flags of ``prism what-if``: slow ranks and NICs, jitter, a rank that fails."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.console import Console

from prism_plugins.checks.calls import call_text, few
from prism_plugins.costs.base import CostModel
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.slow_links import CostsWithSlowLinks, SlowLink
from prism_plugins.emit.console import milliseconds
from prism_plugins.emit.job_view import JobView
from prism_plugins.errors import PrismError
from prism_plugins.program.calls import phase_at
from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EventKind, Program
from prism_plugins.simulate.disturbance import Disturbance
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.expand import CallStarts
from prism_plugins.simulate.timeline import OpTimes
from prism_plugins.simulate.vector import Failure, VectorMachine, VectorTimes

NCCL_TIMEOUT_S = 600
"""torch.distributed's default for NCCL groups: so long a hang lasts until the watchdog ends the job."""
_SIGMAS = 5.0
_SMALLEST = 0.05
_TOP = 5
_PATH = 12


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


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the critical path."""

    rank: int
    kind: str
    what: str
    start_ms: float
    duration_ms: float


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the faults do to the job. Times in ms; stable keys for ``--json``."""

    undisturbed_ms: float
    iteration_ms: tuple[float, ...]
    """By seed; empty when a rank fails."""
    waited_for: tuple[tuple[int, float], ...] = ()
    """(rank, time that others waited for it as the last to come, summed over ranks and calls), most first; of the first
    seed."""
    waiting_ms: float = 0.0
    """Mean over ranks of the time in calls before the last member came; of the first seed."""
    critical_path: tuple[PathPart, ...] = ()
    """The longest stretches, in time order; without jitter."""
    critical_path_ms: dict[str, float] = {}
    """All of it by kind."""
    stalled: tuple[tuple[str, float, str], ...] = ()
    """(ranks, when they stop, what they wait in) of ranks that a failure stops."""
    num_stalled: int = 0
    seconds: float = 0.0


def add_fault_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags."""
    group = parser.add_argument_group("faults")
    group.add_argument("--slow-rank", action="append", default=[], metavar="R=F",
                       help="kernels of rank R last F times as long; may be given again")  # fmt: skip
    group.add_argument("--slow-link", action="append", default=[], metavar="nodeN:nicM=F",
                       help="that NIC has only this share of its rate (0.5: half); may be given again")  # fmt: skip
    group.add_argument("--jitter", metavar="P%",
                       help="speeds of ranks differ: a normal factor with this standard deviation on each one's kernels")  # fmt: skip
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="draws of the jitter (default 1)")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="the first of them (default 0)")
    group.add_argument("--fail", metavar="rank=R@T", help="rank R stops T (12ms, 0.5s) into the iteration")
    group.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="processes for seeds (default: cores)"
    )


def parse_faults(arguments: argparse.Namespace, cluster: Cluster, world_size: int) -> Faults:
    """The flags as data. Raises :class:`PrismError` naming the flag that is wrong."""
    return Faults(
        slow_ranks=dict(_slow_rank(text, world_size) for text in arguments.slow_rank),
        slow_links=tuple(_slow_link(text, cluster, world_size) for text in arguments.slow_link),
        jitter=_jitter(arguments.jitter),
        seeds=_seeds(arguments.seeds),
        first_seed=arguments.seed,
        failure=_failure(arguments.fail, world_size),
    )


def _match(flag: str, pattern: str, text: str, example: str) -> re.Match:
    found = re.fullmatch(pattern, text.strip())
    if found is None:
        raise PrismError(f"{flag} {text!r} is not of the form {example}")
    return found


def _rank(flag: str, rank: int, world_size: int) -> int:
    if rank >= world_size:
        raise PrismError(f"{flag}: rank {rank} is outside the world of {world_size} ranks")
    return rank


def _slow_rank(text: str, world_size: int) -> tuple[int, float]:
    found = _match("--slow-rank", r"(\d+)=(\d+(?:\.\d+)?)", text, "37=1.3")
    factor = float(found[2])
    if not 0.01 <= factor <= 1000:
        raise PrismError(f"--slow-rank {text!r}: the factor must be between 0.01 and 1000")
    return _rank("--slow-rank", int(found[1]), world_size), factor


def _slow_link(text: str, cluster: Cluster, world_size: int) -> SlowLink:
    found = _match("--slow-link", r"node(\d+):nic(\d+)=(\d+(?:\.\d+)?)", text, "node3:nic2=0.5")
    link = SlowLink(node=int(found[1]), nic=int(found[2]), factor=float(found[3]))
    if not 0 < link.factor <= 1:
        raise PrismError(f"--slow-link {text!r}: the share of the rate must be above 0 and at most 1")
    if link.nic >= cluster.node.num_nics:
        raise PrismError(f"--slow-link {text!r}: nodes of {cluster.name} have {cluster.node.num_nics} NICs")
    if link.node * cluster.gpus_per_node >= world_size:
        raise PrismError(f"--slow-link {text!r}: the job has {-(-world_size // cluster.gpus_per_node)} nodes")
    return link


def _jitter(text: str | None) -> float:
    if text is None:
        return 0.0
    share = float(_match("--jitter", r"(\d+(?:\.\d+)?)\s*%", text, "3%")[1]) / 100
    if not 0 < share <= 0.3:
        raise PrismError(f"--jitter {text!r} must be above 0 and at most 30%")
    return share


def _seeds(seeds: int) -> int:
    if not 1 <= seeds <= 10_000:
        raise PrismError(f"--seeds {seeds} must be between 1 and 10000")
    return seeds


def _failure(text: str | None, world_size: int) -> Failure | None:
    if text is None:
        return None
    found = _match("--fail", r"(?:rank=)?(\d+)@(\d+(?:\.\d+)?)(us|ms|s)", text, "rank=100@12ms")
    scale = {"us": 1e3, "ms": 1e6, "s": 1e9}[found[3]]
    return Failure(rank=_rank("--fail", int(found[1]), world_size), at_ns=float(found[2]) * scale)


# ── simulation ───────────────────────────────────────────────────────────────────────────────────────────────


def simulate_faults(
    job: JobPrograms,
    costs: CostModel,
    cluster: Cluster,
    faults: Faults,
    *,
    costs_of: Callable[[Cluster], CostModel],
    jobs: int = 0,
) -> FaultReport:
    """Simulate the job without and with the faults. ``job`` without optimizer shards; ``costs_of`` prices on another
    cluster.

    Raises:
        SimulationFault: the job would hang anyway.
        PrismError: its ranks cannot have speeds of their own.
    """
    import time

    began = time.perf_counter()
    undisturbed = Simulation(job, costs).timeline.iteration_time_ns / 1e6
    if faults.slow_links:
        costs = CostsWithSlowLinks(costs, _slow_costs(faults.slow_links, cluster, costs_of), cluster)
    simulation = Simulation(job, costs, Disturbance(slow_ranks=faults.slow_ranks))
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
        waited_for=_most(first.caused_ns / 1e6),
        waiting_ms=float(first.waited_ns.mean()) / 1e6,
    )
    if faults.failure is not None:
        stalled = _stalled(job, first, faults.failure)
        report = msgspec.structs.replace(
            report, stalled=stalled, num_stalled=int(np.isinf(first.finish_ns).sum())
        )
    else:
        finish = [float(first.finish_ns.max()), *_finish_times(machine, draws[1:], jobs)]
        report = msgspec.structs.replace(report, iteration_ms=tuple(t / 1e6 for t in finish))
        if not faults.jitter:
            parts, by_kind = _critical_path(job, costs, cluster, simulation)
            report = msgspec.structs.replace(report, critical_path=parts, critical_path_ms=by_kind)
    return msgspec.structs.replace(report, seconds=time.perf_counter() - began)


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


def _most(caused_ms: np.ndarray) -> tuple[tuple[int, float], ...]:
    order = np.argsort(-caused_ms, kind="stable")[:_TOP]
    return tuple((int(rank), float(caused_ms[rank])) for rank in order if caused_ms[rank] > 0)


def _stalled(job: JobPrograms, times: VectorTimes, failure: Failure) -> tuple[tuple[str, float, str], ...]:
    """Stalled ranks by what they wait in, those that stop first before the others."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in np.flatnonzero(np.isinf(times.finish_ns)).tolist():
        if rank != failure.rank:
            groups.setdefault((job.class_of(rank), int(times.stalled_event[rank])), []).append(rank)
    found = []
    for (_, event), ranks in groups.items():
        program = program_of(job, ranks[0])
        what = "its host waits"
        if 0 <= event < len(program.events):
            what = f"phase {phase_at(program, event)}"
            if program.events["kind"][event] == EventKind.COMM:
                comm = program.comms[int(program.events["ref"][event])]
                group = program.groups[comm.group]
                what = f"{call_text(comm)} in {group.desc or group.name}, {what}"
        when = float(np.nanmin(times.stalled_ns[ranks])) / 1e6
        found.append((few(ranks), when, what))
    return tuple(sorted(found, key=lambda entry: entry[1]))


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
) -> tuple[tuple[PathPart, ...], dict[str, float]]:
    from prism_plugins.report.critical_path import critical_path
    from prism_plugins.report.rank_spans import RankSpans

    view = _DisturbedView(
        simulation=simulation,
        whole=job,
        job=_split(job, simulation),
        costs=costs,
        timeline=simulation.timeline,
        gpu=cluster.gpu_facts(),
        gpus_per_node=cluster.gpus_per_node,
    )
    path = critical_path(RankSpans(view))
    longest = sorted(path.segments, key=lambda s: s.start_ns - s.end_ns)[:_PATH]
    parts = tuple(
        PathPart(
            rank=s.rank,
            kind=s.kind,
            what=s.what,
            start_ms=s.start_ns / 1e6,
            duration_ms=(s.end_ns - s.start_ns) / 1e6,
        )
        for s in sorted(longest, key=lambda s: s.start_ns)
    )
    return parts, path.by_kind_ms


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────


def print_report(report: FaultReport, console: Console, *, world_size: int) -> None:
    """The report as text."""
    console.print(f"undisturbed iteration  {milliseconds(report.undisturbed_ms)}")
    if report.iteration_ms:
        times = np.array(report.iteration_ms)
        mean = float(times.mean())
        console.print(
            f"with the faults        {milliseconds(mean)}  ({mean / report.undisturbed_ms - 1:+z.2%}, costs "
            f"{(mean - report.undisturbed_ms) / 1e3 * world_size / 3600:.4f} GPU hours an iteration)"
        )
        if len(times) > 1:
            texts = [f"p{q} {milliseconds(float(np.percentile(times, q)))}" for q in (5, 50, 95)]
            console.print(
                f"  over {len(times)} seeds       {', '.join(texts)}, min {milliseconds(float(times.min()))}, "
                f"max {milliseconds(float(times.max()))}, standard deviation {milliseconds(float(times.std(ddof=1)))}"
            )
        console.print(
            f"waiting                each rank waits {milliseconds(report.waiting_ms)} for others, on average"
        )
        for rank, caused in report.waited_for:
            console.print(f"  for rank {rank:<12} {milliseconds(caused)} in all, of all ranks together")
    if report.critical_path:
        by_kind = ", ".join(
            f"{kind} {milliseconds(ms)}" for kind, ms in report.critical_path_ms.items() if ms > 0
        )
        console.print(f"critical path          {by_kind}; its longest stretches:")
        for part in report.critical_path:
            console.print(
                f"  {milliseconds(part.start_ms):>12}  rank {part.rank}: {part.kind} {part.what} "
                f"{milliseconds(part.duration_ms)}"
            )
    if report.num_stalled:
        lost = NCCL_TIMEOUT_S * world_size / 3600
        console.print(
            f"the iteration never ends: {report.num_stalled} of {world_size} ranks stop. NCCL's watchdog ends the job after "
            f"{NCCL_TIMEOUT_S} s by default: {lost:,.1f} GPU hours until then"
        )
        for ranks, when, what in report.stalled[:_PATH]:
            console.print(f"  {milliseconds(when):>12}  ranks {ranks} wait in {what}")
        if len(report.stalled) > _PATH:
            console.print(f"  and {len(report.stalled) - _PATH} more groups of ranks")
