"""The search: bounds prune, reduced slices compose what is left, full emulations judge the best."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import resource
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.cluster import check_world, load_cluster
from prism_plugins.costs.efficiency import efficiency_of
from prism_plugins.costs.model import build_cost_model, host_of, load_calibration
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.errors import Interrupted, PrismError
from prism_plugins.host_speed import with_host_of_slices
from prism_plugins.integration.tuning import Point, Probe, Space, Tuner
from prism_plugins.options import Job
from prism_plugins.predict import device_overhead, nvls_groups
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import Program
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.program.store import load_program
from prism_plugins.rundir import SliceDir, read_json
from prism_plugins.script import check_script
from prism_plugins.tune.cluster_file import write_cluster
from prism_plugins.tune.compose import Composer
from prism_plugins.tune.emulate import emulate, estimate_of, finished_prediction
from prism_plugins.tune.executors import Executor, Task, make_executor
from prism_plugins.tune.layers import LayerCosts, measure, other_kind, reduce_other
from prism_plugins.tune.progress import TuneProgress
from prism_plugins.tune.result import Candidate, Counts, Miss, TuneDir, TuneResult, Variant, describe
from prism_plugins.tune.settings import Settings
from prism_plugins.tune.warm import WarmScript
from prism_plugins.world.layout import Layout

_BATCH = 24
"""Points that are judged and composed at a time, best bound first."""
_SLACK = 1.10
"""A point is composed unless its bound is that far above the best composed time: composed times have an error."""
_LEAST_ERROR = 0.03
"""Of composed times, where emulations found less."""
_MAX_ILLEGAL_REASONS = 40


class _Open(NamedTuple):
    """A legal point that fits by its bound."""

    bound_ms: float
    bound_bytes: float
    point: Point


class Search:
    """One search. :meth:`run` does it; what was found so far is always on disk."""

    def __init__(self, job: Job, tuner: Tuner, settings: Settings, *, progress: TuneProgress) -> None:
        check_script(job.run_as, job.argv[0])
        self._job = job
        self._tuner = tuner
        self._settings = settings
        self._progress = progress
        self._began = time.monotonic()
        self._deadline = self._began + settings.budget_s
        self._cluster = load_cluster(job.options.cluster)
        check_world(self._cluster, job.options.world_size)
        self._nccl = parse_settings(os.environ)
        self._calibration = load_calibration(job.options.calibration)
        self._dir = TuneDir(Path(settings.out).absolute())
        earlier = self._dir.claim(job, settings.chosen)
        self.result = TuneResult(
            job=job,
            chosen=settings.chosen,
            cluster=self._cluster.name,
            capacity_bytes=self._cluster.gpu.memory_bytes,
        )
        self._earlier_seconds = (earlier.seconds, earlier.cpu_seconds) if earlier else (0.0, 0.0)
        self._earlier_host = earlier.host_us if earlier else (0.0, 0.0, 0.0)
        self._composed: dict[Point, Candidate] = {}
        self._kinds: dict[tuple[str, ...], LayerCosts | str] = {}
        """By the one-layer probe's command: costs, or why there are none."""
        self._composer: Composer | None = None
        self._costs: CostModel | None = None
        self._illegal: Counter[str] = Counter()
        self._is_side = False
        """Composes a variant of the launch; only the search itself is written down."""
        self._lowest_pruned_ms = float("inf")
        """Smallest bound of a point that was left out as slower."""

    @property
    def composed(self) -> tuple[Candidate, ...]:
        """Every layout that was composed, whether it fits or not."""
        return tuple(self._composed.values())

    def run(self) -> TuneResult:
        """Search until done, the budget is over or somebody interrupts. Raises :class:`PrismError` when nothing can be
        found (no layout is legal, none fits, the budget was too short for the first one)."""
        result = self.result
        try:
            with self._warm() as script:
                space = self._space(script)
                self._compose_all(space, self._bounded(space), script)
                for what, value in self._settings.variants:
                    self._vary(what, value, space, script)
            self._emulate_best(space)
            self._verify_best(space)
            result.status = "budget over" if time.monotonic() > self._deadline else "done"
        except (Interrupted, KeyboardInterrupt):
            result.status = "interrupted"
            raise
        finally:
            self._save()
        self._check_found()
        return result

    # ── the space ────────────────────────────────────────────────────────────────────────────────────────────

    def _warm(self) -> WarmScript:
        gpu = self._cluster.gpu_facts()
        spec = SliceSpec(
            rank=0,
            world_size=self._job.options.world_size,
            gpus_per_node=self._cluster.gpus_per_node,
            argv=self._job.argv,
            run_as=self._job.run_as,
            device=self._job.options.device,
            iterations=self._job.options.iterations,
            gpu=gpu,
            slice_dir="",
            moe_load=self._job.options.moe_load,
        )
        self._progress.stage(f"starting {Path(self._job.argv[0]).name}")
        return WarmScript(spec, self._dir.path)

    def _space(self, script: WarmScript) -> Space:
        options = self._job.options
        verdicts = script.judge([self._job.argv], world_size=options.world_size)
        if not verdicts:
            raise PrismError("prism tune knows no framework that this script uses (supported: Megatron)")
        if not verdicts[0].legal:
            raise PrismError(f"the launch itself is not legal: {verdicts[0].reason}")
        return self._tuner.space(
            self._job.argv,
            verdicts[0].arguments,
            world_size=options.world_size,
            gpus_per_node=self._cluster.gpus_per_node,
            chosen=self._settings.chosen,
        )

    def _bounded(self, space: Space) -> list[_Open]:
        """Legal points that may fit, best bound first."""
        self._progress.stage("bounds")
        counts, gpu = self.result.counts, self._cluster.gpu
        rate = {
            dtype: gpu.peak_flops.get("tf32" if dtype == "float32" else dtype, 0.0)
            * efficiency_of(gpu.capability).gemm_burst
            for dtype in ("float32", "float16", "bfloat16")
        }
        link = self._cluster.node.nvlink_bytes_per_s
        opened: list[_Open] = []
        for point, reason in space.points():
            counts.points += 1
            if reason:
                self._illegal[reason] += 1
                continue
            counts.legal += 1
            limits = space.limits(point)
            bound_ms = (limits.flops / rate[limits.dtype] + limits.link_bytes / link) * 1e3
            if limits.memory_bytes > gpu.memory_bytes and point != space.own:
                counts.too_big_by_bound += 1
                self._missed(space, point, int(limits.memory_bytes), "bound")
                continue
            opened.append(_Open(bound_ms, limits.memory_bytes, point))
        if not counts.legal:
            worst = ", ".join(f"{reason} ({n})" for reason, n in self._illegal.most_common(3))
            raise PrismError(
                f"the choices contradict each other: none of {counts.points} points is legal: {worst}"
            )
        self.result.assumptions = space.assumptions
        opened.sort(key=lambda item: (item.point != space.own, item.bound_ms))
        return opened

    # ── composition ──────────────────────────────────────────────────────────────────────────────────────────

    def _compose_all(self, space: Space, opened: list[_Open], script: WarmScript) -> None:
        counts = self.result.counts
        position = 0
        while position < len(opened) and time.monotonic() < self._deadline:
            batch: list[_Open] = []
            while position < len(opened) and len(batch) < _BATCH:
                item = opened[position]
                position += 1
                slower = item.bound_ms > self._best_ms() * _SLACK and not self._settings.everything
                if slower and item.point != space.own:
                    counts.slower_by_bound += 1
                    self._lowest_pruned_ms = min(self._lowest_pruned_ms, item.bound_ms)
                else:
                    batch.append(item)
            batch = self._judged(space, batch, script)
            self._probe(space, batch, script)
            for item in batch:
                self._compose(space, item)
            self._progress.composed(
                self._best(), done=position, total=len(opened), kinds=len(self._kinds), counts=counts
            )
            self._save()
        counts.left += len(opened) - position

    def _best_ms(self) -> float:
        best = self._best()
        estimate = best.best if best is not None else None
        return estimate.iteration_ms if estimate is not None else float("inf")

    def _best(self) -> Candidate | None:
        fitting = self._fitting()
        return fitting[0] if fitting else None

    def _fitting(self) -> list[Candidate]:
        capacity = self.result.capacity_bytes
        kept = [
            c for c in self._composed.values() if c.best and c.best.memory_bytes <= capacity and not c.failed
        ]
        return sorted(kept, key=lambda c: c.best.iteration_ms if c.best else 0.0)

    def _judged(self, space: Space, batch: list[_Open], script: WarmScript) -> list[_Open]:
        """Without the points that the framework refuses."""
        counts = self.result.counts
        if not batch:
            return []
        verdicts = script.judge(
            [space.command(item.point) for item in batch], world_size=self._job.options.world_size
        )
        kept = []
        for item, verdict in zip(batch, verdicts, strict=True):
            counts.judged += 1
            if verdict.legal:
                kept.append(item)
            else:
                counts.legal -= 1
                self._illegal[verdict.reason] += 1
        return kept

    def _probe(self, space: Space, batch: Iterable[_Open], script: WarmScript) -> None:
        """Slice the reduced jobs that the batch needs and nobody has sliced yet."""
        missing: dict[tuple[str, ...], list[Probe]] = {}
        base_of: dict[tuple[str, ...], tuple[str, ...]] = {}
        for item in batch:
            probes = space.probes(item.point)
            for probe in probes:
                key = _kind_key(probe)
                base_of[key] = _kind_key(probes[0])
                if key not in self._kinds and probe not in missing.setdefault(key, []):
                    missing[key].append(probe)
        commands = {}
        for probe in itertools.chain(*missing.values()):
            name = _digest(probe.command)
            if self._probed(name) is None:
                commands[name] = probe.command
        for _ in script.run(
            commands.items(),
            world_size=space.probe_world,
            jobs=self._job.options.jobs,
            give_up_at=self._deadline,
        ):
            self._progress.probed()
        for key, probes in missing.items():
            if probes and (found := self._measured(probes, self._kinds.get(base_of[key]))) is not None:
                self._kinds[key] = found

    def _probed(self, name: str) -> tuple[SliceReport, SliceDir] | None:
        folder = SliceDir(self._dir.path / "probes" / name)
        if not folder.report.exists():
            return None
        try:
            return read_json(folder.report, SliceReport), folder
        except PrismError:
            return None

    def _measured(self, probes: list[Probe], base: LayerCosts | str | None) -> LayerCosts | str | None:
        """The costs of a kind of layer from its probes, or why there are none; None where the budget was over before."""
        programs, facts, last = [], None, None
        for probe in sorted(probes, key=lambda p: p.layers):
            ended = self._probed(_digest(probe.command))
            if ended is None:
                return None
            last, folder = ended
            if last.status != "ok" or last.facts is None:
                return last.message or "its reduced slice told no layout"
            facts = last.facts
            programs.append(load_program(folder.program))
        assert facts is not None
        assert last is not None
        if self._costs is None:
            self._settle_host(programs[-1], last, facts.layout)
        assert self._costs is not None
        try:
            if len(programs) == 1:
                if not isinstance(base, LayerCosts):
                    return base
                return other_kind(base, reduce_other(programs[0], facts, self._costs))
            one = programs[0]
            nvls = frozenset(one.groups[g].desc or one.groups[g].name for g in nvls_groups(one, self._costs))
            domain = self._cluster.gpus_per_domain
            return measure(programs, facts, self._costs, nvls=nvls, gpus_per_domain=domain)
        except PrismError as error:
            return str(error)

    def _settle_host(self, program: Program, report: SliceReport, layout: Layout) -> None:
        """Take the host's speed once, from the first reduced slice: layouts must not be ranked by the machine's mood."""
        cluster = self._cluster
        if self._job.options.device == "virtual" and cluster.host.from_slices:
            if any(self._earlier_host):
                op, view, comm = self._earlier_host
                target = host_of(self._calibration)
                calls = target.benchmark.enqueue_us if target is not None and target.benchmark else {}
                host = msgspec.structs.replace(
                    cluster.host, op_us=op, view_us=view, comm_us=comm, enqueue_us=calls
                )
                cluster = msgspec.structs.replace(cluster, host=host)
            else:
                ranks = np.arange(layout.world_size)
                cls = RankClass(name="all", ranks=ranks, representative=0, exemplar=program)
                cluster = with_host_of_slices(
                    cluster,
                    JobPrograms(layout=layout, classes=(cls,)),
                    {0: report},
                    host_of(self._calibration),
                )
            host = msgspec.structs.replace(cluster.host, from_slices=False, measured_in_slices=False)
            cluster = msgspec.structs.replace(cluster, host=host)
        self._cluster = cluster
        self.result.host_us = (cluster.host.op_us, cluster.host.view_us, cluster.host.comm_us)
        write_cluster(self._dir.cluster, cluster)
        self._costs = build_cost_model(cluster, nccl=self._nccl, calibration=self._calibration)
        self._composer = Composer(self._costs, device_overhead(cluster, self._nccl))

    def _compose(self, space: Space, item: _Open) -> None:
        counts = self.result.counts
        kinds: dict[str, LayerCosts] = {}
        for probe in space.probes(item.point):
            costs = self._kinds.get(_kind_key(probe))
            if costs is None:  # the budget was over
                counts.left += 1
                return
            if isinstance(costs, str):
                if item.point == space.own and not self._is_side:
                    raise PrismError(f"a reduced job of the launch itself does not run: {costs}")
                self._illegal[f"its reduced job does not run: {costs}"] += 1
                counts.legal -= 1
                return
            kinds[probe.kind] = costs
        assert self._composer is not None
        shape = space.shape(item.point)
        if item.point != space.own and not self._settings.everything:
            least = self._composer.at_least_ms(shape, kinds)
            if least > self._best_ms():
                counts.slower_by_layers += 1
                return
        estimate = self._composer.compose(shape, kinds)
        counts.composed += 1
        knobs = {knob.name: value for knob, value in zip(space.knobs, item.point.values, strict=True)}
        self._composed[item.point] = Candidate(
            knobs=knobs,
            tokens_per_s_per_gpu=self._rate_of(space, estimate.iteration_ms),
            arguments=space.changes(item.point),
            bound_ms=item.bound_ms,
            bound_bytes=int(item.bound_bytes),
            composed=estimate,
        )
        if estimate.memory_bytes > self.result.capacity_bytes:
            counts.too_big += 1
            self._missed(space, item.point, estimate.memory_bytes, "composed")

    def _rate_of(self, space: Space, iteration_ms: float) -> float | None:
        tokens = space.tokens_per_iteration / self._job.options.world_size
        return tokens / iteration_ms * 1e3 if iteration_ms else None

    def _missed(self, space: Space, point: Point, memory_bytes: int, source: str) -> None:
        closest = self.result.closest_miss
        if closest is None or memory_bytes < closest.memory_bytes:
            knobs = {knob.name: value for knob, value in zip(space.knobs, point.values, strict=True)}
            self.result.closest_miss = Miss(knobs=knobs, memory_bytes=memory_bytes, source=source)

    # ── sensitivity ──────────────────────────────────────────────────────────────────────────────────────────

    def _vary(self, what: str, value: float, space: Space, script: WarmScript) -> None:
        """Compose the best layout of a launch that differs in one thing. Probes are shared wherever they are the same."""
        if self._costs is None or time.monotonic() > self._deadline:
            return
        self._progress.stage(f"{what} {value:g}")
        other = copy.copy(self)
        other._is_side = True
        other._composed, other._illegal, other._lowest_pruned_ms = {}, Counter(), float("inf")
        other.result = msgspec.structs.replace(self.result, counts=Counts(), closest_miss=None, candidates=())
        note = ""
        try:
            other._job = self._varied_job(what, value, space)
            if what == "nic":
                node = msgspec.structs.replace(
                    self._cluster.node, nic_bytes_per_s=self._cluster.node.nic_bytes_per_s * value
                )
                other._cluster = msgspec.structs.replace(self._cluster, node=node)
                costs = build_cost_model(other._cluster, nccl=self._nccl, calibration=self._calibration)
                other._composer = Composer(costs, device_overhead(other._cluster, self._nccl))
            check_world(other._cluster, other._job.options.world_size)
            varied = other._space(script)
            other._compose_all(varied, other._bounded(varied), script)
        except PrismError as error:
            note = str(error)
        best = other._best()
        if best is None and not note:
            note = "nothing fits" if not other.result.counts.left else "the budget was over"
        variant = Variant(what=what, value=value, legal=other.result.counts.legal, best=best, note=note)
        self.result.sensitivity = (*self.result.sensitivity, variant)
        self._save()

    def _varied_job(self, what: str, value: float, space: Space) -> Job:
        if what == "gpus":
            options = msgspec.structs.replace(self._job.options, world_size=int(value))
            return msgspec.structs.replace(self._job, options=options)
        if what == "sequence":
            return msgspec.structs.replace(self._job, argv=space.with_sequence(int(value)))
        return self._job

    # ── emulation ────────────────────────────────────────────────────────────────────────────────────────────

    def _emulate_best(self, space: Space) -> None:
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
            if not order or (self._is_proven(order) and not everything):
                break
            most = executor.width if everything else min(executor.width, settings.emulations - done)
            batch = order[:most]
            tried.update(batch)
            self._emulate(space, batch, executor)
            done += len(batch)
        waits = settings.emulations > 0 and space.own in self._composed and space.own not in tried
        if waits and time.monotonic() < self._deadline:
            tried.add(space.own)
            self._emulate(space, [space.own], executor)
        self.result.proven = bool(tried) and self._is_proven([p for p in self._order() if p not in tried])

    def _order(self) -> list[Point]:
        """Points that fit, best first by composed time."""
        capacity = self.result.capacity_bytes
        fitting = [
            (c.composed.iteration_ms, p)
            for p, c in self._composed.items()
            if c.composed and not c.failed and c.composed.memory_bytes <= capacity
        ]
        return [p for _, p in sorted(fitting, key=lambda item: item[0])]

    def _is_proven(self, left: list[Point]) -> bool:
        """No composed layout that is left, less the error found so far, is faster than the best emulated one."""
        emulated = [
            c.emulated.iteration_ms
            for c in self._composed.values()
            if c.emulated and c.emulated.memory_bytes <= self.result.capacity_bytes
        ]
        if not emulated or self.result.counts.left or self._lowest_pruned_ms < min(emulated):
            return False
        error = max(_LEAST_ERROR, self.result.composition_error or 0.0)
        times = [c.composed.iteration_ms for p in left if (c := self._composed[p]).composed]
        return all(ms * (1 - error) >= min(emulated) for ms in times)

    def _emulate(self, space: Space, points: list[Point], executor: Executor) -> None:
        seconds = max(0.0, self._deadline - time.monotonic())
        told = ", ".join(describe(self._composed[point].knobs) for point in points)
        self._progress.stage(f"emulating {told} in full ({self._job.options.world_size} ranks)")
        tasks = [
            Task(
                job=self._job,
                argv=space.command(point),
                cluster=self._dir.cluster,
                out=self._dir.runs / _digest(space.command(point)),
                seconds=seconds,
            )
            for point in points
        ]
        for index, failure in executor.run(tasks):
            self._emulated(points[index], tasks[index].out, failure)
            self._save()

    def _emulated(self, point: Point, out: Path, failure: str) -> None:
        candidate = self._composed[point]
        found = finished_prediction(out)
        if found is None:
            if failure:
                self._composed[point] = msgspec.structs.replace(candidate, failed=failure)
                self._illegal[f"its emulation failed: {failure}"] += 1
            return
        self.result.counts.emulated += 1
        estimate = estimate_of(found)
        hang = next((f.message for f in found.findings if f.kind == "hang"), "")
        self._composed[point] = msgspec.structs.replace(
            candidate,
            emulated=estimate,
            run=str(out),
            tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
            failed=hang,
        )
        if candidate.composed and not hang and estimate.iteration_ms:
            error = abs(candidate.composed.iteration_ms / estimate.iteration_ms - 1)
            self.result.composition_error = max(error, self.result.composition_error or 0.0)
        self._progress.emulated(self._composed[point])

    def _verify_best(self, space: Space) -> None:
        """The best layouts again, their slices on a real GPU."""
        options = msgspec.structs.replace(self._job.options, device="cuda", jobs=1)
        job = msgspec.structs.replace(self._job, options=options)
        points = {id(c): point for point, c in self._composed.items()}
        for candidate in self._fitting()[: self._settings.verify]:
            point = points[id(candidate)]
            command = space.command(point)
            self._progress.stage(f"running slices of {describe(candidate.knobs)} on the GPU")
            found = emulate(
                job,
                command,
                cluster=self._dir.cluster,
                out=self._dir.path / "verified" / _digest(command),
                seconds=max(0.0, self._deadline - time.monotonic()),
            )
            if found is None:
                return
            if isinstance(found, str):
                raise PrismError(f"--verify: {found}")
            self._composed[point] = msgspec.structs.replace(
                candidate, verified=msgspec.structs.replace(estimate_of(found), source="verified")
            )

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self) -> None:
        if self._is_side:
            return
        result = self.result
        fitting = self._fitting()
        judged = next((c for c in fitting if c.emulated), None)
        result.candidates = tuple(sorted(fitting, key=lambda c: judged is not None and c is not judged))
        own = [c for c in self._composed.values() if not c.arguments]
        result.own = own[0] if own else None
        result.counts.illegal = dict(self._illegal.most_common(_MAX_ILLEGAL_REASONS))
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        result.seconds = self._earlier_seconds[0] + time.monotonic() - self._began
        result.cpu_seconds = self._earlier_seconds[1] + sum(u.ru_utime + u.ru_stime for u in usage)
        self._dir.write(result)

    def _check_found(self) -> None:
        """Raise :class:`PrismError` when there is no layout to show."""
        result = self.result
        if result.candidates or (self._settings.everything and self._composed):
            return
        if time.monotonic() > self._deadline and result.counts.left:
            raise PrismError(
                f"the budget of {self._settings.budget_s:g} s was over before a layout was composed; give more, the "
                f"search goes on where it stopped ({self._dir.path})"
            )
        if result.closest_miss is not None:
            miss = result.closest_miss
            least = "at least " if miss.source == "bound" else ""
            raise PrismError(
                f"nothing fits: of {result.counts.legal} legal layouts the closest miss, {describe(miss.knobs)}, needs {least}"
                f"{miss.memory_bytes / 2**30:.1f} GiB a GPU, and {self._cluster.gpu.name} has "
                f"{result.capacity_bytes / 2**30:.1f}; more GPUs, a shorter sequence or a smaller model"
            )
        reasons = "; ".join(list(result.counts.illegal)[:3])
        raise PrismError(f"no layout could be composed: {reasons}")


def _kind_key(probe: Probe) -> tuple[str, ...]:
    """Equal for the probes of one kind of layer: the command without the number of layers."""
    words = list(probe.command)
    where = len(words) - 1 - words[::-1].index("--num-layers")
    return (probe.kind, *words[:where], *words[where + 2 :])


def _digest(words: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()
