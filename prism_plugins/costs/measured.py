"""Prices ops by a calibration: what was measured as measured, what lies near by interpolation, the rest by the rules.

* The exact signature was measured: its figure.
* Its family was measured near by: :mod:`.interpolate`.
* Otherwise: the roofline, as without a calibration; :meth:`MeasuredCosts.assumptions` says how much of a job's
  compute time each of the three is.

A calibration of another GPU is scaled by the ratio of the two rules, that is by data-sheet peaks, bandwidths and the
documented efficiencies of both architectures, and marked ``scaled``. Figures are moved to the clocks of each program
(:mod:`.power`): a program with other proportions of ops settles at other clocks.
"""

from __future__ import annotations

import functools
import importlib.resources
import weakref

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel, Price, SteadyClock
from prism_plugins.costs.calibration import Calibration, FamilyError, parse_calibration, signature_key
from prism_plugins.costs.cluster import Cluster, load_cluster, presets
from prism_plugins.costs.interpolate import Interpolation
from prism_plugins.costs.modelled import ModelledCosts
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.costs.power import dynamic_w, family_dynamic_w, solve_scale
from prism_plugins.costs.roofline import Roofline
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import CommSignature, EventKind, OpSignature
from prism_plugins.program.prediction import Finding

SHIPPED = "h200"
"""Name of the calibration in the package."""
_SCALE_STEP = 0.002
"""Clocks that differ by less are one state."""


class _Base(msgspec.Struct, frozen=True):
    """A priced signature in the state it was measured in."""

    price: Price
    compute_share: float = 0.0
    headroom: float = 1.0
    """Burst clock over measured clock."""
    dynamic_w: float = 0.0


@functools.cache
def shipped_calibration() -> Calibration:
    """The H200 calibration of the package."""
    file = importlib.resources.files("prism_plugins.costs") / "calibrations" / f"{SHIPPED}.json"
    return parse_calibration(file.read_bytes(), source=f"shipped {SHIPPED}")


def build_measured(
    cluster: Cluster, calibration: Calibration | None = None, *, nccl: NcclSettings | None = None
) -> CostModel:
    """The cost model for a cluster with a calibration the user gave, or the shipped one.

    A calibration that was measured on the user's machine also tells the host's speed, which counts unless slices of the
    job told it; the shipped one does not. One that holds collectives only leaves the ops to the shipped one.
    """
    if calibration is None:
        return MeasuredCosts(ModelledCosts(cluster, nccl=nccl), shipped_calibration(), given=False)
    if calibration.host is not None and not cluster.host.measured_in_slices:
        host = calibration.host
        changes = {"op_us": host.op_us, "view_us": host.view_us, "comm_us": host.comm_us}
        changes = {name: us for name, us in changes.items() if us > 0}
        cluster = msgspec.structs.replace(cluster, host=msgspec.structs.replace(cluster.host, **changes))
        if host.h2d_bytes_per_s and host.d2h_bytes_per_s:
            both_ways = (host.h2d_bytes_per_s + host.d2h_bytes_per_s) / 2
            node = msgspec.structs.replace(cluster.node, pcie_bytes_per_s=both_ways)
            cluster = msgspec.structs.replace(cluster, node=node)
    own = calibration.gpu in ("", cluster.gpu.name)  # links of other GPUs have other rates
    modelled = ModelledCosts(cluster, nccl=nccl, collectives=calibration.collectives if own else ())
    if not calibration.figures:
        return MeasuredCosts(modelled, shipped_calibration(), given=False)
    return MeasuredCosts(modelled, calibration, given=True)


class MeasuredCosts:
    """See the module docstring. Collectives are priced by the wrapped model."""

    def __init__(self, modelled: ModelledCosts, calibration: Calibration, *, given: bool) -> None:
        self.cluster = modelled.cluster
        self.interference = modelled.interference
        self.calibration = calibration
        self._modelled = modelled
        self._given = given
        self._same_gpu = calibration.gpu == self.cluster.gpu.name
        reference = reference_cluster(calibration.gpu, self.cluster)
        self._known_gpu = reference is not None
        # GPUs of one architecture are held at their power cap alike; of others nothing is known.
        self._settles = self._same_gpu or (
            reference is not None and reference.gpu.capability == self.cluster.gpu.capability
        )
        self._reference = Roofline(reference or self.cluster)
        kind = "measured" if self._same_gpu else "scaled"
        self.name = (
            f"{kind} on {calibration.gpu} ({calibration.date[:10]}) + NCCL model on {self.cluster.name}"
        )
        self._figures = {signature_key(f.signature): f for f in calibration.figures}
        self._interpolation = Interpolation(calibration.figures, self._reference)
        self._bases: dict[tuple, _Base] = {}
        self._states: dict[int, tuple[list[OpSignature], float]] = {}
        self._views: dict[float, _AtScale] = {}
        self._shares: dict[str, float] = {}

    # ── prices ───────────────────────────────────────────────────────────────────────────────────────────────

    def price_op(self, signature: OpSignature) -> Price:
        """Price a device op in the power state of the calibration."""
        return self._base(signature).price

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price a collective or p2p call from the arrival of the last member."""
        return self._modelled.price_comm(comm, ranks, rank)

    def price_at(self, signature: OpSignature, scale: float) -> Price:
        """Price a device op with all clocks moved by a factor."""
        base = self._base(signature)
        if base.compute_share == 0.0 or scale == 1.0:
            return base.price
        own = min(scale, base.headroom)
        factor = base.compute_share / own + 1 - base.compute_share
        return msgspec.structs.replace(base.price, duration_ns=base.price.duration_ns * factor)

    def _base(self, signature: OpSignature) -> _Base:
        key = signature_key(signature)
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = self._make_base(signature, key)
        return base

    def _make_base(self, signature: OpSignature, key: tuple) -> _Base:
        rule = self._modelled.price_op(signature)
        if rule.provenance in ("free", "unpriced") or rule.duration_ns <= 0:
            return _Base(rule)
        power = self.calibration.power
        figure = self._figures.get(key)
        if figure is not None:
            duration_ns = figure.us * 1e3 * self._gpu_ratio(signature, rule.duration_ns)
            price = self._priced(rule, duration_ns, "measured", "measured")
            dynamic = dynamic_w(power, figure) if power else 0.0
            return _Base(
                price, figure.compute_share, _headroom(figure.burst_clock_mhz, figure.clock_mhz), dynamic
            )
        near = self._interpolation.estimate(signature)
        if near is None:
            return _Base(rule, 0.0, 1.0, family_dynamic_w(power, signature.op, 0.0) if power else 0.0)
        price = self._priced(rule, rule.duration_ns * near.ratio, "interpolated", "interpolated")
        dynamic = family_dynamic_w(power, signature.op, near.clock_mhz) if power else 0.0
        return _Base(price, near.compute_share, _headroom(near.burst_clock_mhz, near.clock_mhz), dynamic)

    def _gpu_ratio(self, signature: OpSignature, target_ns: float) -> float:
        """How much longer the rules say an op takes on this GPU than on the measured one."""
        if self._same_gpu or not self._known_gpu:
            return 1.0
        return target_ns / self._reference.price(signature).duration_ns

    def _priced(self, rule: Price, duration_ns: float, name: str, provenance: str) -> Price:
        return msgspec.structs.replace(
            rule,
            duration_ns=duration_ns,
            rule=f"{name}/{rule.rule.removeprefix('roofline/')}",
            provenance=provenance if self._same_gpu else "scaled",
        )

    # ── the power state of a job ─────────────────────────────────────────────────────────────────────────────

    def in_state_of(self, signatures: list[OpSignature]) -> CostModel:
        """The model at the clocks of the ranks whose programs use this table."""
        state = self._states.get(id(signatures))
        scale = state[1] if state is not None else 1.0
        view = self._views.get(scale)
        if view is None:
            view = self._views[scale] = _AtScale(weakref.proxy(self), scale)
        return view

    def settle(self, job: JobPrograms) -> None:
        """Find the clocks of every class; see :class:`CostModel`."""
        self._shares = {}
        tables: dict[int, tuple[list[OpSignature], list[float]]] = {}
        for cls in job.classes:
            scale = self._scale_of(cls)
            for program in (cls.exemplar, *cls.variants.values()):
                tables.setdefault(id(program.signatures), (program.signatures, []))[1].append(scale)
        for table, (signatures, scales) in tables.items():
            scale = round(sum(scales) / len(scales) / _SCALE_STEP) * _SCALE_STEP
            self._states[table] = (signatures, scale)  # keeps the table, so its id is not reused

    def _scale_of(self, cls: RankClass) -> float:
        program = cls.exemplar
        refs = program.events["ref"][program.events["kind"] == EventKind.KERNEL]
        counts = np.bincount(refs, minlength=len(program.signatures))
        used = np.flatnonzero(counts)
        bases = [self._base(program.signatures[i]) for i in used.tolist()]
        us = counts[used] * np.array([b.price.duration_ns / 1e3 for b in bases])
        for base, total in zip(bases, us.tolist(), strict=True):
            kind = (
                base.price.provenance if base.price.rule.split("/")[0] != "interpolated" else "interpolated"
            )
            self._shares[kind] = self._shares.get(kind, 0.0) + total * len(cls.ranks)
        power = self.calibration.power
        if power is None or not self._settles or not len(used):
            return 1.0
        timed = us > 0
        return solve_scale(
            power,
            ops=[program.signatures[i].op for i in used[timed].tolist()],
            us=us[timed],
            compute_share=np.array([b.compute_share for b in bases])[timed],
            dynamic=np.array([b.dynamic_w for b in bases])[timed],
            headroom=np.array([b.headroom for b in bases])[timed],
        )

    # ── for the report ───────────────────────────────────────────────────────────────────────────────────────

    def findings(self) -> tuple[Finding, ...]:
        """A warning when the user's calibration was measured on another GPU."""
        if self._same_gpu or not self._given:
            return ()
        how = (
            "figures are scaled by data-sheet ratios"
            if self._known_gpu
            else "that GPU is in no preset, so its figures are used as they are"
        )
        message = f"the calibration was measured on {self.calibration.gpu}, the cluster has {self.cluster.gpu.name}; {how}"
        return (Finding(kind="calibration", severity="warning", ranks="", phase="", message=message),)

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes."""
        c = self.calibration
        total = sum(self._shares.values()) or 1.0
        parts = ", ".join(
            f"{100 * share / total:.0f} % {kind}"
            for kind, share in sorted(self._shares.items(), key=lambda item: -item[1])
            if share > 0.005 * total
        )
        source = f"ops are priced by {'the given' if self._given else 'the shipped'} calibration of {c.gpu} ({c.date[:10]})"
        if not self._same_gpu:
            source += f", scaled to {self.cluster.gpu.name} by data-sheet ratios"
        rest = self._modelled.assumptions()[1:]  # all but the line on compute
        return (source + (f"; of the compute time {parts}" if parts else ""), *rest)


class _AtScale(SteadyClock):
    """A measured model with all clocks moved by one factor."""

    def __init__(self, costs: MeasuredCosts, scale: float) -> None:
        self.name = costs.name
        self.interference = costs.interference
        self._costs = costs
        self._scale = scale

    def price_op(self, signature: OpSignature) -> Price:
        """Price a device op."""
        return self._costs.price_at(signature, self._scale)

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price a collective or p2p call."""
        return self._costs.price_comm(comm, ranks, rank)

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes."""
        return self._costs.assumptions()


def reference_cluster(gpu: str, cluster: Cluster) -> Cluster | None:
    """A description of the GPU that a calibration names: the cluster at hand, or a preset; None when there is none."""
    if cluster.gpu.name == gpu:
        return cluster
    return next((c for c in map(load_cluster, presets()) if c.gpu.name == gpu), None)


def expected_errors(calibration: Calibration) -> dict[str, FamilyError]:
    """Leave-one-out errors of its interpolation by family; empty for a GPU that no preset describes."""
    reference = reference_cluster(calibration.gpu, load_cluster())
    if reference is None:
        return {}
    return Interpolation(calibration.figures, Roofline(reference)).leave_one_out()


def _headroom(burst_mhz: float, clock_mhz: float) -> float:
    return max(1.0, burst_mhz / clock_mhz) if burst_mhz and clock_mhz else 1.0
