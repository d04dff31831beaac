"""The reduced jobs of a search: which have run, what they cost, and the prices by which everything of the search is told."""

from __future__ import annotations

import copy
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration
from prism_plugins.costs.cluster import Cluster, load_cluster
from prism_plugins.costs.model import build_cost_model, host_of
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.errors import PrismError
from prism_plugins.host_speed import with_host_of_slices
from prism_plugins.integration.tuning import Point, Probe, Scouted, Shape, Space, Whole
from prism_plugins.options import Job
from prism_plugins.predict import device_overhead, nvls_groups
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import Program
from prism_plugins.program.slices import SliceReport
from prism_plugins.program.store import load_program
from prism_plugins.rundir import SliceDir, read_json
from prism_plugins.tune.cluster_file import write_cluster
from prism_plugins.tune.compose import Composer, Estimate
from prism_plugins.tune.emulate import emulate, estimate_of, hang_of
from prism_plugins.tune.layers import LayerCosts, measure, other_kind, reduce_other
from prism_plugins.tune.result import TuneDir
from prism_plugins.tune.warm import WarmScript
from prism_plugins.tune.whole import WholeCosts, estimate_whole, extended, matrix_flops

Costs = LayerCosts | WholeCosts
HostTimes = tuple[float, float, float]
"""Host time of an op, a view and a collective, microseconds."""


class Probes:
    """Runs reduced jobs and keeps what they cost. Slices lie under ``probes`` in the search's directory and are used again by
    a later start."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        directory: TuneDir,
        *,
        nccl: NcclSettings,
        calibration: Calibration | Literal["none"] | None,
        earlier_host: HostTimes,
    ) -> None:
        """``earlier_host``: of an earlier start of the search, zeros where there was none."""
        self.cluster = cluster
        self._job = job
        self._dir = directory
        self._nccl = nccl
        self._calibration = calibration
        self._earlier_host = earlier_host
        self._is_varied = False
        self._costs: CostModel | None = None
        self._composer: Composer | None = None
        self._found: dict[tuple[str, ...], Costs | str] = {}
        """By the probes' key: costs, or why there are none."""

    def __len__(self) -> int:
        return len(self._found)

    @property
    def settled(self) -> bool:
        """Something can be priced."""
        return self._costs is not None

    @property
    def host_us(self) -> HostTimes:
        """The host times that all layouts of the search share; zeros where each has those of its own slices."""
        if self.cluster.host.from_slices:
            return (0.0, 0.0, 0.0)
        return (self.cluster.host.op_us, self.cluster.host.view_us, self.cluster.host.comm_us)

    def on(self, cluster: Cluster) -> Probes:
        """The same slices priced on another cluster (its host as it is settled here)."""
        other = copy.copy(self)
        other.cluster, other._found, other._is_varied = cluster, {}, True
        other._build()
        return other

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────

    def scout(self, probe: Probe, script: WarmScript, space: Space) -> Scouted:
        """The slice that the space wants to see before it gives bounds. Raises :class:`PrismError` where it does not run."""
        list(self._sliced(script, [probe], space.probe_world, float("inf")))
        ended = self._ended(probe, space.probe_world)
        if isinstance(ended, str) or ended is None:
            raise PrismError(f"a reduced job of the launch itself does not run: {ended}")
        report, program = ended
        assert report.facts is not None
        if self._costs is None:
            self._take(self.cluster)
        assert self._costs is not None
        flops = matrix_flops(program, self._costs, report.facts.layout.num_microbatches)
        return Scouted(facts=report.facts, flops=flops)

    def run(
        self,
        space: Space,
        points: Iterable[Point],
        script: WarmScript,
        *,
        deadline: float,
        on_end: Callable[[], None],
    ) -> None:
        """Run the reduced jobs that the points need and nobody has run yet; none is started after the monotonic time
        ``deadline``."""
        missing: dict[tuple[str, ...], list[Probe]] = {}
        base_of: dict[tuple[str, ...], tuple[str, ...]] = {}
        for point in points:
            probes = space.probes(point)
            for probe in probes:
                base_of[probe.key] = probes[0].key
                if probe.key not in self._found and probe not in missing.setdefault(probe.key, []):
                    missing[probe.key].append(probe)
        wanted = list(itertools.chain(*missing.values()))
        for _ in self._sliced(script, [p for p in wanted if not p.emulated], space.probe_world, deadline):
            on_end()
        for key, probes in missing.items():
            found = self._measured(space, probes, self._found.get(base_of[key]), deadline) if probes else None
            if found is not None:
                self._found[key] = found

    def _sliced(
        self, script: WarmScript, probes: Iterable[Probe], world_size: int, deadline: float
    ) -> Iterator[None]:
        """Slice those that have not been sliced yet, one after the other or side by side."""
        commands = {
            _name(probe, world_size): probe.command
            for probe in probes
            if self._report(probe, world_size) is None
        }
        for _ in script.run(
            commands.items(), world_size=world_size, jobs=self._job.options.jobs, give_up_at=deadline
        ):
            yield

    def _report(self, probe: Probe, world_size: int) -> tuple[SliceReport, SliceDir] | None:
        folder = SliceDir(self._dir.path / "probes" / _name(probe, world_size))
        if not folder.report.exists():
            return None
        try:
            return read_json(folder.report, SliceReport), folder
        except PrismError:
            return None

    def _ended(self, probe: Probe, world_size: int) -> tuple[SliceReport, Program] | str | None:
        """What a slice found, or why it found nothing; None where it has not run."""
        ended = self._report(probe, world_size)
        if ended is None:
            return None
        report, folder = ended
        if report.status != "ok" or report.facts is None:
            return report.message or "its reduced slice told no layout"
        return report, load_program(folder.program)

    # ── what they cost ───────────────────────────────────────────────────────────────────────────────────────

    def kinds(self, space: Space, point: Point) -> dict[str, Costs] | str | None:
        """The costs of a point's probes by kind, or why there are none; None where one was not run."""
        kinds: dict[str, Costs] = {}
        for probe in space.probes(point):
            costs = self._found.get(probe.key)
            if costs is None or isinstance(costs, str):
                return costs
            kinds[probe.kind] = costs
        return kinds

    def at_least_ms(self, shape: Shape | Whole, kinds: Mapping[str, Costs]) -> float:
        """No composed time is below; 0 where composing is as cheap as that."""
        assert self._composer is not None
        return 0.0 if isinstance(shape, Whole) else self._composer.at_least_ms(shape, kinds)

    def compose(self, shape: Shape | Whole, kinds: Mapping[str, Costs]) -> Estimate:
        """Time and memory of a point."""
        assert self._composer is not None
        if isinstance(shape, Whole):
            return extended(shape, next(iter(kinds.values())))
        return self._composer.compose(shape, kinds)

    def _measured(
        self, space: Space, probes: list[Probe], base: Costs | str | None, deadline: float
    ) -> Costs | str | None:
        """The costs of probes of one key, or why there are none; None where the time was over before."""
        probes = sorted(probes, key=lambda p: p.size)
        if probes[0].emulated:
            return self._emulated(probes, space.probe_world, deadline)
        ended = [self._ended(probe, space.probe_world) for probe in probes]
        for one in ended:
            if one is None or isinstance(one, str):
                return one
        reports, programs = zip(*ended, strict=True)
        facts = reports[-1].facts
        try:
            if probes[0].whole:
                return self._whole(probes, programs, reports)
            self._settle(programs[-1], reports[-1])
            assert self._costs is not None
            if len(programs) == 1:
                if not isinstance(base, LayerCosts):
                    return base
                return other_kind(base, reduce_other(programs[0], facts, base))
            nvls = frozenset(
                program.groups[g].desc or program.groups[g].name
                for program in programs
                for g in nvls_groups(program, self._costs)
            )
            domain = self.cluster.gpus_per_domain
            return measure(
                programs,
                facts,
                self._costs,
                nvls=nvls,
                gpus_per_domain=domain,
                sharded=probes[0].sharded,
            )
        except PrismError as error:
            return str(error)

    def _whole(
        self, probes: list[Probe], programs: Sequence[Program], reports: Sequence[SliceReport]
    ) -> WholeCosts:
        """Whole points at the host times of their own slices: what a kernel costs to issue differs between ZeRO stages."""
        cluster = self._with_host_of(programs, reports)
        costs = build_cost_model(cluster, nccl=self._nccl, calibration=self._calibration)
        overhead = device_overhead(cluster, self._nccl)
        found = {}
        for probe, program, report in zip(probes, programs, reports, strict=True):
            _check_tokens(probe, report.facts.tokens_per_iteration)
            found[probe.size] = estimate_whole(program, report, report.facts, costs, overhead)
        return WholeCosts(by_microbatches=found)

    def _emulated(self, probes: list[Probe], world_size: int, deadline: float) -> WholeCosts | str | None:
        """Probes that are ordinary emulations."""
        if self._is_varied:
            return "configurations with a pipeline are emulated on the launch's own cluster only"
        options = msgspec.structs.replace(self._job.options, world_size=world_size)
        job = msgspec.structs.replace(self._job, options=options)
        estimates = {}
        for probe in probes:
            found = emulate(
                job,
                probe.command,
                cluster=self._dir.cluster,
                out=self._dir.path / "probes" / f"{_name(probe, world_size)}-run",
                seconds=max(0.0, deadline - time.monotonic()),
            )
            if found is None or isinstance(found, str):
                return found
            if hang := hang_of(found):
                return hang
            estimates[probe.size] = estimate_of(found)
        return WholeCosts(by_microbatches=estimates)

    # ── prices ───────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self, program: Program, report: SliceReport) -> None:
        """Take the host's speed once, from the first reduced slice: layouts must not be ranked by the machine's mood."""
        if self._costs is not None:
            return
        cluster = self.cluster
        if self._job.options.device == "virtual" and cluster.host.from_slices:
            if any(self._earlier_host) and self._dir.cluster.exists():
                cluster = load_cluster(str(self._dir.cluster))
            else:
                cluster = self._with_host_of([program], [report])
            host = msgspec.structs.replace(cluster.host, from_slices=False, measured_in_slices=False)
            cluster = msgspec.structs.replace(cluster, host=host)
        self._take(cluster)

    def _with_host_of(self, programs: Sequence[Program], reports: Sequence[SliceReport]) -> Cluster:
        """The cluster at the host times of slices of one point."""
        layout = reports[-1].facts.layout
        classes = tuple(
            RankClass(name=str(i), ranks=np.arange(layout.world_size), representative=i, exemplar=program)
            for i, program in enumerate(programs)
        )
        job = JobPrograms(layout=layout, classes=classes)
        return with_host_of_slices(
            self.cluster, job, dict(enumerate(reports)), host_of(self._calibration, self.cluster)
        )

    def _take(self, cluster: Cluster) -> None:
        """Emulations and further probes are priced on this cluster."""
        self.cluster = cluster
        write_cluster(self._dir.cluster, cluster)
        self._build()

    def _build(self) -> None:
        self._costs = build_cost_model(self.cluster, nccl=self._nccl, calibration=self._calibration)
        self._composer = Composer(self._costs, device_overhead(self.cluster, self._nccl))


def _check_tokens(probe: Probe, found: int) -> None:
    """Raise :class:`PrismError` where the script did not do what its point says."""
    if probe.tokens and found and found != probe.tokens:
        raise PrismError(
            f"an iteration of its reduced job had {found} tokens instead of {probe.tokens}: the script does not follow the "
            "batch sizes of its configuration"
        )


def _name(probe: Probe, world_size: int) -> str:
    """Of the directory of its slice: a command may be that of several worlds."""
    return digest((str(world_size), *probe.command))


def digest(words: Iterable[str]) -> str:
    """A short name for a command line."""
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()
