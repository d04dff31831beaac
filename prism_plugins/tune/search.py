"""The search: bounds prune, reduced slices compose what is left, full emulations judge the best."""

from __future__ import annotations

import copy
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from prism_plugins.costs.cluster import check_world, load_cluster
from prism_plugins.costs.efficiency import efficiency_of
from prism_plugins.costs.model import load_calibration
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.errors import Interrupted, PrismError
from prism_plugins.integration.tuning import Launch, Point, Space, Tuner, Verdict
from prism_plugins.options import Job
from prism_plugins.program.slices import SliceSpec
from prism_plugins.script import check_script
from prism_plugins.tune.finals import LEAST_ERROR, Finals
from prism_plugins.tune.probes import Probes
from prism_plugins.tune.progress import TuneProgress
from prism_plugins.tune.result import Candidate, Counts, Miss, TuneDir, TuneResult, Variant, describe
from prism_plugins.tune.settings import Settings
from prism_plugins.tune.warm import WarmScript

_BATCH = 24
"""Points that are judged and composed at a time, best bound first."""
_BATCH_OF_WHOLES = 4
"""The same where each takes slices of its own."""
_SLACK = 1.10
"""A point is composed unless its bound is that far above the best composed time: composed times have an error."""
_MAX_ILLEGAL_REASONS = 40


class _Open(NamedTuple):
    """A legal point that fits by its bound."""

    bound_ms: float
    bound_bytes: float
    point: Point


class Search:
    """One search. :meth:`run` does it; what was found so far is always on disk."""

    def __init__(
        self, job: Job, tuners: Mapping[str, Tuner], settings: Settings, *, progress: TuneProgress
    ) -> None:
        """``tuners``: by the name of their integration."""
        check_script(job.run_as, job.argv[0])
        self._job = job
        self._tuners = tuners
        self._settings = settings
        self._progress = progress
        self._began = time.monotonic()
        self._deadline = self._began + settings.budget_s
        self._cluster = load_cluster(job.options.cluster)
        check_world(self._cluster, job.options.world_size)
        nccl, calibration = parse_settings(os.environ), load_calibration(job.options.calibration)
        self._dir = TuneDir(Path(settings.out).absolute())
        earlier = self._dir.claim(job, settings.chosen)
        self.result = TuneResult(
            job=job,
            chosen=settings.chosen,
            cluster=self._cluster.name,
            capacity_bytes=self._cluster.gpu.memory_bytes,
        )
        self._earlier_seconds = (earlier.seconds, earlier.cpu_seconds) if earlier else (0.0, 0.0)
        self._probes = Probes(
            job,
            self._cluster,
            self._dir,
            nccl=nccl,
            calibration=calibration,
            earlier_host=earlier.host_us if earlier else (0.0, 0.0, 0.0),
        )
        self._composed: dict[Point, Candidate] = {}
        self._illegal: Counter[str] = Counter()
        self._verdicts: dict[tuple[str, ...], Verdict] = {}
        """Of launches that are legal, by argv."""
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
                self._scout(space, script)
                self._compose_all(space, self._bounded(space), script)
                for what, value in self._settings.variants:
                    self._vary(what, value, space, script)
            finals = Finals(
                self._job,
                self._settings,
                self._dir,
                result=result,
                composed=self._composed,
                lowest_pruned_ms=self._lowest_pruned_ms,
                deadline=self._deadline,
                progress=self._progress,
                failed=lambda why: self._illegal.update([f"its emulation failed: {why}"]),
                save=self._save,
            )
            finals.run(space)
            finals.verify(space, self._fitting()[: self._settings.verify])
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
            apex=self._job.options.apex,
        )
        self._progress.stage(f"starting {Path(self._job.argv[0]).name}")
        return WarmScript(spec, self._dir.path)

    def _space(self, script: WarmScript) -> Space:
        options = self._job.options
        verdicts = script.judge([self._job.argv], world_size=options.world_size)
        if not verdicts:
            raise PrismError(
                "prism tune knows no framework that this script had imported when it read its command line "
                "(supported: Megatron, DeepSpeed)"
            )
        verdict = verdicts[0]
        if verdict.legal:
            self._verdicts[self._job.argv] = verdict
        elif self._job.argv in self._verdicts:
            verdict = self._verdicts[
                self._job.argv
            ]  # On another number of GPUs, where its own layout is none.
        else:
            raise PrismError(f"the launch itself is not legal: {verdict.reason}")
        launch = Launch(
            argv=self._job.argv,
            arguments=verdict.arguments,
            world_size=options.world_size,
            gpus_per_node=self._cluster.gpus_per_node,
            chosen=self._settings.chosen,
            directory=self._dir.path,
        )
        return self._tuners[verdict.framework].space(launch)

    def _scout(self, space: Space, script: WarmScript) -> None:
        if space.scout is not None:
            self._progress.stage("a first slice of the launch")
            space.learn(self._probes.scout(space.scout, script, space))

    def _bounded(self, space: Space) -> list[_Open]:
        """Legal points that may fit, best bound first."""
        self._progress.stage("bounds")
        counts, gpu = self.result.counts, self._cluster.gpu
        rate = {
            dtype: gpu.peak_flops.get("tf32" if dtype == "float32" else dtype, 0.0)
            * efficiency_of(gpu.capability).gemm_burst
            for dtype in ("float32", "float16", "bfloat16")
        }
        node = self._cluster.node
        nic = node.nic_bytes_per_s * node.num_nics / node.num_gpus
        if self._cluster.gpus_per_domain > self._cluster.gpus_per_node or not nic:
            nic = float("inf")
        opened: list[_Open] = []
        for point, reason in space.points():
            counts.points += 1
            if reason:
                self._illegal[reason] += 1
                continue
            counts.legal += 1
            limits = space.limits(point)
            bound_ms = 1e3 * (
                limits.flops / rate[limits.dtype]
                + limits.link_bytes / node.nvlink_bytes_per_s
                + limits.nic_bytes / nic
                + limits.hbm_bytes / gpu.hbm_bytes_per_s
            )
            if limits.memory_bytes > gpu.memory_bytes and point != space.own:
                counts.too_big_by_bound += 1
                self._missed(space, point, int(limits.memory_bytes), "bound")
                continue
            opened.append(_Open(bound_ms, limits.memory_bytes, point))
        if not counts.legal:
            raise PrismError(self._why_none_is_legal())
        self.result.assumptions = space.assumptions
        opened.sort(
            key=lambda item: (item.point != space.own, item.bound_ms, _distance(item.point, space.own))
        )
        return opened

    def _why_none_is_legal(self) -> str:
        reasons = "; ".join(f"{reason} ({n})" for reason, n in self._illegal.most_common(3))
        chosen = " ".join(f"{name}={','.join(values)}" for name, values in self._settings.chosen.items())
        world = self._job.options.world_size
        head = (
            f"the choices {chosen} contradict each other" if chosen else f"no layout is legal on {world} GPUs"
        )
        return f"{head}: none of {self.result.counts.points} points is legal: {reasons}"

    # ── composition ──────────────────────────────────────────────────────────────────────────────────────────

    def _compose_all(self, space: Space, opened: list[_Open], script: WarmScript) -> None:
        counts = self.result.counts
        position, size = 0, _BATCH if space.scout is None else _BATCH_OF_WHOLES
        while position < len(opened) and time.monotonic() < self._deadline:
            batch: list[_Open] = []
            while position < len(opened) and len(batch) < size:
                item = opened[position]
                position += 1
                slower = item.bound_ms > self._best_ms() * _SLACK and not self._settings.everything
                if slower and item.point != space.own:
                    counts.slower_by_bound += 1
                    self._lowest_pruned_ms = min(self._lowest_pruned_ms, item.bound_ms)
                else:
                    batch.append(item)
            batch = self._judged(space, batch, script)
            self._probes.run(
                space,
                [item.point for item in batch],
                script,
                deadline=self._deadline,
                on_end=self._progress.probed,
            )
            for item in batch:
                self._compose(space, item)
            self._progress.composed(
                self._best(), done=position, total=len(opened), kinds=len(self._probes), counts=counts
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

    def _compose(self, space: Space, item: _Open) -> None:
        counts = self.result.counts
        kinds = self._probes.kinds(space, item.point)
        if kinds is None:  # the budget was over
            counts.left += 1
            return
        if isinstance(kinds, str):
            if item.point == space.own and not self._is_side:
                raise PrismError(f"a reduced job of the launch itself does not run: {kinds}")
            self._illegal[f"its reduced job does not run: {kinds}"] += 1
            counts.legal -= 1
            return
        shape = space.shape(item.point)
        if item.point != space.own and not self._settings.everything:
            least = self._probes.at_least_ms(shape, kinds)
            if least > self._best_ms():
                counts.slower_by_layers += 1
                return
        estimate = self._probes.compose(shape, kinds)
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
        if not self._probes.settled or time.monotonic() > self._deadline:
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
                settled = msgspec.structs.replace(self._probes.cluster, node=node)
                other._probes = self._probes.on(settled)
            check_world(other._cluster, other._job.options.world_size)
            varied = other._space(script)
            other._scout(varied, script)
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

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self) -> None:
        if self._is_side:
            return
        result = self.result
        result.host_us = self._probes.host_us if self._probes.settled else result.host_us
        fitting = self._fitting()
        judged = next((c for c in fitting if c.emulated), None)
        if judged is not None and self._best_ms() * (1 + self._error()) < judged.emulated.iteration_ms:
            judged = None  # Others are composed that are faster by more than their error.
        result.candidates = tuple(sorted(fitting, key=lambda c: judged is not None and c is not judged))
        own = [c for c in self._composed.values() if not c.arguments]
        result.own = own[0] if own else None
        result.counts.illegal = dict(self._illegal.most_common(_MAX_ILLEGAL_REASONS))
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        result.seconds = self._earlier_seconds[0] + time.monotonic() - self._began
        result.cpu_seconds = self._earlier_seconds[1] + sum(u.ru_utime + u.ru_stime for u in usage)
        self._dir.write(result)

    def _error(self) -> float:
        """Of composed times, relative."""
        return max(LEAST_ERROR, self.result.composition_error or 0.0)

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
            full = math.ceil(miss.memory_bytes * self._job.options.world_size / result.capacity_bytes)
            raise PrismError(
                f"nothing fits: of {result.counts.legal} legal layouts the closest miss, {describe(miss.knobs)}, needs {least}"
                f"{miss.memory_bytes / 2**30:.1f} GiB a GPU, and {self._cluster.gpu.name} has "
                f"{result.capacity_bytes / 2**30:.1f} (spread evenly it would fill {full} GPUs); more GPUs, a shorter sequence or "
                "a smaller model"
            )
        reasons = "; ".join(list(result.counts.illegal)[:3])
        raise PrismError(f"no layout could be composed: {reasons}")


def _distance(point: Point, own: Point) -> int:
    """Knobs in which they differ."""
    return sum(a != b for a, b in zip(point.values, own.values, strict=True))
