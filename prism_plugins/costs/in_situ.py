"""Prices ops by what the job's own slices took on a real GPU; collectives, and ops that no slice ran, by another model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from prism_plugins.costs.base import CostModel, Price, SteadyClock
from prism_plugins.costs.cluster import Cluster
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.measured import Measured
from prism_plugins.program.model import CommSignature, OpSignature
from prism_plugins.program.prediction import Finding

LAUNCH_QUEUE = 1022
"""Seen in traces of an H200 (CUDA 13, driver 580): launches wait as soon as 1021 before them have not ended."""


class InSituCosts(SteadyClock):
    """See the module docstring.

    Args:
        base: prices collectives, and ops that were not measured.
        cluster: host times of calls and of what was not measured.
        measured: of the slices. A program is priced by its own slice where it has one (GPUs differ, and clocks go with
            what a rank does); otherwise an op that several slices ran costs their mean, by occurrences.
    """

    def __init__(self, base: CostModel, cluster: Cluster, measured: Iterable[Measured]) -> None:
        measured = list(measured)
        self._base = base
        self._cluster = cluster
        self.interference = base.interference
        if self.interference is not None:
            self.interference = msgspec.structs.replace(
                self.interference, streams_share=_take_turns(measured), launch_queue=LAUNCH_QUEUE
            )
        self._gpus = sorted({m.gpu.name for m in measured if m.gpu.name})
        self.name = f"measured in the job's own slices on {', '.join(self._gpus) or 'a GPU'} + {base.name}"
        self._of_rank = {
            one.rank: {_key(op.signature): (op.ns, op.host_ns) for op in one.ops} for one in measured
        }
        totals: dict[tuple, tuple[float, float, int]] = {}
        for one in measured:
            for op in one.ops:
                ns, host_ns, count = totals.get(_key(op.signature), (0.0, 0.0, 0))
                totals[_key(op.signature)] = (
                    ns + op.ns * op.count,
                    host_ns + op.host_ns * op.count,
                    count + op.count,
                )
        self._ns = {
            key: (ns / count, host_ns / count) for key, (ns, host_ns, count) in totals.items() if count
        }
        self._host_known = bool(measured) and all(any(op.host_ns for op in one.ops) for one in measured)
        self._not_measured = 0
        self._views: dict[int, tuple[list[OpSignature], _OfSlice]] = {}

    def price_op(self, signature: OpSignature) -> Price:
        """As measured; by the base model where no slice launched such an op."""
        return self.price_by(signature, {})

    def price_by(self, signature: OpSignature, own: Mapping[tuple, tuple[float, float]]) -> Price:
        """The same, by the figures of one slice (key → ns on the GPU, of the host) where it has them."""
        known = own.get(_key(signature)) or self._ns.get(_key(signature))
        if known is None:
            self._not_measured += 1
            return self._base.price_op(signature)
        # What the op computes and moves is not known to the profiler: the base's estimate, for what overlaps it.
        rule = self._base.price_op(signature)
        return msgspec.structs.replace(
            rule,
            duration_ns=known[0],
            rule="measured/in situ",
            provenance="measured",
            host_ns=known[1] if self._host_known else self._cluster.host.op_us * 1e3,
        )

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """By the base model. What the host takes for a call is part of the op after it, where that was measured."""
        price = self._base.price_comm(comm, ranks, rank)
        return msgspec.structs.replace(price, host_ns=0.0) if self._host_known else price

    def settle(self, job: JobPrograms) -> None:
        """Find the slice of each program; it ran at the clocks of the job."""
        for cls in job.classes:
            own = self._of_rank.get(cls.representative)
            if own is None or cls.exemplar.source == "derived":
                continue
            for program in (cls.exemplar, *cls.variants.values()):
                table = program.signatures  # kept, so that its id is not reused
                self._views.setdefault(id(table), (table, _OfSlice(self, own)))

    def in_state_of(self, signatures: list[OpSignature]) -> CostModel:
        """The model by the slice whose program has this table."""
        view = self._views.get(id(signatures))
        return self if view is None else view[1]

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes."""
        lines = [
            f"ops cost what they took in this job's slices on {', '.join(self._gpus)} (kernels by CUPTI, corrected by "
            f"iterations without profiler), {len(self._ns)} distinct ops"
        ]
        if self._not_measured:
            lines.append(f"{self._not_measured} distinct ops ran in no slice: priced by {self._base.name}")
        return (*lines, *self._base.assumptions()[1:])

    def findings(self) -> tuple[Finding, ...]:
        """A warning where the cluster has other GPUs."""
        target = self._cluster.gpu.name
        others = [gpu for gpu in self._gpus if gpu != target]
        if not others:
            return ()
        message = f"slices ran on {', '.join(others)}, the cluster has {target}: op times are those of the GPU that was there"
        return (Finding(kind="calibration", severity="warning", ranks="", phase="", message=message),)


class _OfSlice(SteadyClock):
    """The model for the program of one slice."""

    def __init__(self, costs: InSituCosts, own: Mapping[tuple, tuple[float, float]]) -> None:
        self.name = costs.name
        self.interference = costs.interference
        self._costs = costs
        self._own = own

    def price_op(self, signature: OpSignature) -> Price:
        """As this slice measured it."""
        return self._costs.price_by(signature, self._own)

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """By the base model."""
        return self._costs.price_comm(comm, ranks, rank)

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes."""
        return self._costs.assumptions()


def _take_turns(measured: Iterable[Measured]) -> bool:
    """Whether kernels of several streams were seen to run one after the other, as large ones do: their measured times then
    hold nothing of each other. Where they ran side by side, what that cost them was measured."""
    watched = [one.watched for one in measured if one.watched is not None]
    beside = sum(one.beside_ms for one in watched)
    return beside > 0 and sum(one.overlap_ms for one in watched) < beside / 2


def _key(s: OpSignature) -> tuple:
    return (s.op, s.inputs, s.outputs, s.scalars)
