"""Compares what was predicted for a rank with what a real rank did, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration, Figure
from prism_plugins.diff.read_kineto import COMPILED
from prism_plugins.diff.real import OpKey, OpTotal, RealRank
from prism_plugins.emit.spans import DeviceSpans, SpanKind
from prism_plugins.emit.trace_names import op_name
from prism_plugins.program.model import EventKind, OpSignature, Program

SAME_CALLS = 0.01
"""Numbers of calls that differ by less are equal (a profile may cut an iteration's edge)."""
WRONG_BY = 0.1
MATTERS_FROM = 0.002
"""Of the iteration's device time: smaller differences are not worth measuring."""


class PredictedOp(msgspec.Struct, kw_only=True):
    """An op of one rank in the prediction."""

    calls: int = 0
    ms: float = 0.0
    alone_ms: float = 0.0
    """As priced, before what overlapping kernels and collectives cost each other."""
    provenance: str = ""
    signatures: list[OpSignature] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One op on both sides. Times are ms of one iteration."""

    key: OpKey
    predicted: OpTotal | None
    real: OpTotal | None
    alone_ms: float = 0.0
    """Predicted, without what overlap costs; 0 for communication."""
    provenance: str = ""
    by_name: bool = False
    """Shapes did not match: all that is left of this name, together."""

    @property
    def delta_ms(self) -> float:
        """Predicted less real."""
        return (self.predicted.ms if self.predicted else 0.0) - (self.real.ms if self.real else 0.0)

    @property
    def price_error_ms(self) -> float:
        """What was priced less real: the part of the difference that a measurement of the op mends."""
        return self.alone_ms - (self.real.ms if self.real else 0.0)

    @property
    def stretched(self) -> bool:
        """Whether overlap made it longer than priced by more than a tenth."""
        return self.predicted is not None and self.predicted.ms > (1 + WRONG_BY) * self.alone_ms > 0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One rank on both sides."""

    rank: int
    rows: tuple[Row, ...]
    """Largest difference first."""
    phases: dict[str, tuple[float, float]]
    """Kernel time by phase: (predicted, real), ms."""
    transfers: dict[str, tuple[float, float]]
    """Transfer time by group, without waiting for members: (predicted, real), ms; where several members' traces tell it."""
    predicted_ms: float
    """Device time, summed over kernels."""
    real_ms: float

    def matched(self) -> list[Row]:
        """Rows that are on both sides."""
        return [row for row in self.rows if row.predicted is not None and row.real is not None]

    def missing(self) -> list[Row]:
        """Predicted, but not in the real run."""
        return [row for row in self.rows if row.real is None]

    def extra(self) -> list[Row]:
        """In the real run, but not predicted."""
        return [row for row in self.rows if row.predicted is None]

    def to_measure(self) -> list[Row]:
        """Matched ops whose price is wrong enough to matter, the one with most wrong time first."""
        least = MATTERS_FROM * self.real_ms
        wrong = [
            row
            for row in self.matched()
            if not row.key.group
            and abs(row.price_error_ms) > least
            and abs(row.price_error_ms) > WRONG_BY * (row.real.ms if row.real else 0.0)
        ]
        return sorted(wrong, key=lambda row: -abs(row.price_error_ms))


def predicted_ops(program: Program, spans: DeviceSpans, costs: CostModel) -> dict[OpKey, PredictedOp]:
    """Every op and call of a rank's iteration."""
    model = costs.in_state_of(program.signatures)
    events = program.events
    kernels = spans.kind != SpanKind.COMMUNICATION
    refs = events["ref"][spans.row[kernels]]
    length = (spans.end_ns - spans.transfer_start_ns)[kernels] / 1e6
    total = np.bincount(refs, weights=length, minlength=len(program.signatures))
    calls = np.bincount(refs, minlength=len(program.signatures))
    found: dict[OpKey, PredictedOp] = {}
    for ref in np.flatnonzero(calls).tolist():
        signature = program.signatures[ref]
        op = found.setdefault(_key(signature), PredictedOp(signatures=[]))
        op.calls += int(calls[ref])
        op.ms += float(total[ref])
        price = model.price_op(signature)
        op.alone_ms += int(calls[ref]) * price.duration_ns / 1e6
        op.provenance = price.provenance
        op.signatures.append(signature)
    for i in np.flatnonzero(~kernels).tolist():
        comms = [program.comms[r] for r in events["ref"][spans.members.get(i, spans.row[i : i + 1])].tolist()]
        group = program.groups[comms[0].group]
        kinds = {c.kind for c in comms}
        elements = max(sum(c.in_numel for c in comms), sum(c.out_numel for c in comms))
        key = OpKey(
            kinds.pop() if len(kinds) == 1 else "coalesced",
            ((elements,),),
            group.desc or "unnamed group",
        )
        op = found.setdefault(key, PredictedOp(signatures=[], provenance="NCCL model"))
        op.calls += 1
        op.ms += float(spans.end_ns[i] - spans.start_ns[i]) / 1e6
    return found


def real_ops(real: RealRank, predicted: Mapping[OpKey, PredictedOp]) -> dict[OpKey, OpTotal]:
    """A real rank's ops under the names that the prediction uses: of the op that launched a kernel and those around it
    the innermost that was predicted with these shapes, else by name, else the innermost."""
    names = {_by_name(key) for key in predicted}
    regions = {op_name(s) for op in predicted.values() for s in op.signatures if s.op == "prism::fused"}
    totals: dict[OpKey, list[float]] = {}
    for given, total in real.ops.items():
        chain = tuple(
            OpKey(COMPILED) if k.name in regions else k for k in given
        )  # a trace of ours names them
        key = next(
            (k for k in chain if k in predicted), next((k for k in chain if _by_name(k) in names), chain[0])
        )
        sums = totals.setdefault(key, [0.0, 0.0])
        # Several kernels of one call, launched by different ops inside it, are one call.
        sums[0] = max(sums[0], total.calls) if key != chain[0] else sums[0] + total.calls
        sums[1] += total.ms
    return {key: OpTotal(calls=calls, ms=ms) for key, (calls, ms) in totals.items()}


def predicted_calls(program: Program) -> dict[OpKey, PredictedOp]:
    """Every call of an iteration by itself, also those that run as one kernel: what a flight recorder lists."""
    refs = program.events["ref"][program.events["kind"] == EventKind.COMM]
    found: dict[OpKey, PredictedOp] = {}
    for ref, count in zip(*(x.tolist() for x in np.unique(refs, return_counts=True)), strict=True):
        comm = program.comms[ref]
        group = program.groups[comm.group]
        key = OpKey(comm.kind, ((max(comm.in_numel, comm.out_numel),),), group.desc or "unnamed group")
        found.setdefault(key, PredictedOp(signatures=[])).calls += count
    return found


def predicted_phases(program: Program, spans: DeviceSpans) -> dict[str, float]:
    """Kernel time by kind of phase, ms: ``forward``, ``backward``, ``optimizer``; what is outside counts as forward,
    which is where a profile has it."""
    phase = np.zeros(len(program.events), dtype=np.int8)
    for each, begin, end in program.iter_phases():
        phase[begin : end + 1] = {"backward": 1, "optimizer": 2}.get(each.kind, 0)
    kernels = spans.kind != SpanKind.COMMUNICATION
    length = (spans.end_ns - spans.transfer_start_ns)[kernels] / 1e6
    total = np.bincount(phase[spans.row[kernels]], weights=length, minlength=3)
    return dict(zip(("forward", "backward", "optimizer"), total.tolist(), strict=True))


def compare(rank: int, program: Program, spans: DeviceSpans, costs: CostModel, real: RealRank) -> Comparison:
    """A rank's kernels beside those of a trace."""
    mine = predicted_ops(program, spans, costs)
    phases = predicted_phases(program, spans) if real.phase_ms else {}
    theirs = real_ops(real, mine)
    return Comparison(
        rank=rank,
        rows=_match(mine, theirs),
        phases={name: (phases[name], real.phase_ms.get(name, 0.0)) for name in phases},
        transfers=_transfers(program, spans, real),
        predicted_ms=sum(op.ms for op in mine.values()),
        real_ms=sum(op.ms for op in theirs.values()),
    )


def compare_calls(rank: int, program: Program, real: RealRank) -> Comparison:
    """A rank's communication calls beside those of a flight recorder's buffer, without times."""
    mine = predicted_calls(program)
    rows = _match(mine, real_ops(real, mine))
    return Comparison(rank=rank, rows=rows, phases={}, transfers={}, predicted_ms=0.0, real_ms=0.0)


def _transfers(program: Program, spans: DeviceSpans, real: RealRank) -> dict[str, tuple[float, float]]:
    predicted: dict[str, float] = {}
    for i in np.flatnonzero(spans.kind == SpanKind.COMMUNICATION).tolist():
        group = program.groups[program.comms[int(program.events["ref"][spans.row[i]])].group]
        name = group.desc or "unnamed group"
        predicted[name] = predicted.get(name, 0.0) + float(spans.end_ns[i] - spans.transfer_start_ns[i]) / 1e6
    return {name: (predicted[name], ms) for name, ms in real.transfer_ms.items() if name in predicted}


def _match(mine: Mapping[OpKey, PredictedOp], theirs: Mapping[OpKey, OpTotal]) -> tuple[Row, ...]:
    """By name and shapes, and what is left by name; largest difference first."""
    left_mine, left_real = dict(mine), dict(theirs)
    rows = []
    for key in mine.keys() & theirs.keys():
        predicted = left_mine.pop(key)
        rows.append(
            Row(
                key=key,
                predicted=OpTotal(calls=predicted.calls, ms=predicted.ms),
                real=left_real.pop(key),
                alone_ms=predicted.alone_ms,
                provenance=predicted.provenance,
            )
        )
    for name in {_by_name(key) for key in (*left_mine, *left_real)}:
        ops = {key: op for key, op in left_mine.items() if _by_name(key) == name}
        totals = {key: total for key, total in left_real.items() if _by_name(key) == name}
        alone = [*ops, *totals]
        rows.append(
            Row(
                key=alone[0] if len(alone) == 1 else name,
                predicted=_sum([*ops.values()]),
                real=_sum([*totals.values()]),
                alone_ms=sum(op.alone_ms for op in ops.values()),
                provenance=", ".join(sorted({op.provenance for op in ops.values()})),
                by_name=len(alone) > 1,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-abs(row.delta_ms), row.key)))


def _sum(totals: Sequence[PredictedOp | OpTotal]) -> OpTotal | None:
    return OpTotal(calls=sum(t.calls for t in totals), ms=sum(t.ms for t in totals)) if totals else None


def calibration_from(
    program: Program, spans: DeviceSpans, costs: CostModel, real: RealRank, *, date: str
) -> Calibration:
    """What the real run says its ops cost, for ops that are the same on both sides and called as often.

    Clocks are not known from a trace, so the figures hold at the clocks the real run had.
    """
    figures = []
    mine = predicted_ops(program, spans, costs)
    theirs = real_ops(real, mine)
    for key, op in mine.items():
        total = theirs.get(key)
        if total is None or len(op.signatures) != 1 or not total.ms:
            continue
        if abs(total.calls - op.calls) > SAME_CALLS * op.calls:
            continue
        figures.append(
            Figure(
                signature=op.signatures[0], us=1e3 * total.ms / total.calls, repetitions=round(total.calls)
            )
        )
    return Calibration(gpu=real.gpu, date=date, figures=figures)


def _key(signature: OpSignature) -> OpKey:
    if signature.op == "prism::fused":
        return OpKey(COMPILED)
    name = op_name(signature)
    return OpKey(_RENAMED.get(name, name), tuple(t.shape for t in signature.inputs if t.shape))


_RENAMED = {"prism::memset": "aten::fill_", "prism::sync": "aten::_local_scalar_dense"}
"""What stands for an op in a program → the op that a profile shows."""


def _by_name(key: OpKey) -> OpKey:
    return OpKey(key.name, (), key.group)
