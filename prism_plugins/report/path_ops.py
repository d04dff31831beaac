"""The critical path op by op: each kernel, call and stretch of host time on it, by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from prism_plugins.emit.op_table import phase_of_row
from prism_plugins.emit.trace_names import kernel_name, phase_name
from prism_plugins.program.model import EventKind, OpSignature, Program
from prism_plugins.report.critical_path import CriticalPath, Segment
from prism_plugins.report.rank_spans import RankSpans


class PathOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op on the path. Times are milliseconds from the start of the iteration."""

    rank: int
    start_ms: float
    duration_ms: float
    """On the path: without what it waits for, which is on the path elsewhere."""
    kind: str
    """``compute``, ``optimizer``, ``communication``, ``host`` or ``wait``."""
    name: str
    """The op with its inputs' shapes, the call with its size and source line, or what the host does."""
    group: str = ""
    """Communication: dimensions of the group, ``dp``, or its description where it is none of them."""
    phase: str = ""


class PathTotal(msgspec.Struct, frozen=True, kw_only=True):
    """What one op takes on the whole path."""

    name: str
    kind: str
    group: str
    times: int
    duration_ms: float


def path_ops(path: CriticalPath, ranks: RankSpans) -> Iterator[PathOp]:
    """The ops of a path in time order; their durations sum to the iteration."""
    known: dict[int, _Names] = {}
    for segment in path.segments:
        if segment.rank not in known:
            known[segment.rank] = _Names(ranks, segment.rank)
        yield from known[segment.rank].ops(segment)


def totals(ops: Iterable[PathOp]) -> list[PathTotal]:
    """By name, the longest first."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for op in ops:
        entry = times.setdefault((op.name, op.kind, op.group), [0, 0.0])
        entry[0] += 1
        entry[1] += op.duration_ms
    found = (
        PathTotal(name=name, kind=kind, group=group, times=int(count), duration_ms=duration)
        for (name, kind, group), (count, duration) in times.items()
    )
    return sorted(found, key=lambda total: -total.duration_ms)


class _Names:
    """What the spans of one rank are called."""

    def __init__(self, ranks: RankSpans, rank: int) -> None:
        self._program, self._times, self._spans = ranks.of(rank)
        self._phases = [*(phase_name(phase) for phase in self._program.phases), ""]
        self._phase_of_row = phase_of_row(self._program)
        self._names = [_op_text(signature) for signature in self._program.signatures]

    def ops(self, segment: Segment) -> Iterator[PathOp]:
        """The ops of a segment."""
        if not segment.spans:
            yield from self._without_op(segment)
            return
        at = segment.start_ns
        for i, span in enumerate(segment.spans):
            row = int(self._spans.row[span])
            last = i == len(segment.spans) - 1
            end = segment.end_ns if last else min(float(self._spans.end_ns[span]), segment.end_ns)
            name, phase = self._name(span, row), self._phases[int(self._phase_of_row[row])]
            yield _op(segment, at, max(end, at), name=name, phase=phase)
            at = max(end, at)

    def _without_op(self, segment: Segment) -> Iterator[PathOp]:
        """The device has nothing to do: what the host is in meanwhile, phase by phase."""
        if segment.kind != "host":
            yield _op(segment, segment.start_ns, segment.end_ns, name="a cause that was not found")
            return
        host = self._times.host_ns[: len(self._phase_of_row)]
        first, last = np.searchsorted(host, (segment.start_ns, segment.end_ns), side="right")
        rows = np.arange(max(first - 1, 0), max(last, 1))
        owner = self._phase_of_row[rows]
        begins = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist()]
        edges = [segment.start_ns, *host[rows[begins[1:]]].tolist(), segment.end_ns]
        for begin, (start, end) in zip(begins, itertools.pairwise(edges), strict=True):
            phase = self._phases[int(owner[begin])]
            where = phase.partition(" ")[0] or "between phases"
            yield _op(segment, start, end, name=f"the device idles, the host is in: {where}", phase=phase)

    def _name(self, span: int, row: int) -> str:
        program = self._program
        if program.events["kind"][row] != EventKind.COMM:
            return self._names[int(program.events["ref"][row])]
        rows = self._spans.members.get(span, (row,))
        calls = [_call_text(program, int(program.events["ref"][r])) for r in rows]
        return " + ".join(calls[:2]) + (f" + {len(calls) - 2} more" if len(calls) > 2 else "")


def _op(segment: Segment, start_ns: float, end_ns: float, *, name: str, phase: str = "") -> PathOp:
    return PathOp(
        rank=segment.rank,
        start_ms=start_ns / 1e6,
        duration_ms=(end_ns - start_ns) / 1e6,
        kind=segment.kind,
        name=name,
        group=segment.what,
        phase=phase,
    )


def _op_text(signature: OpSignature) -> str:
    """``aten::mm bfloat16[2048x4096] [4096x512]``."""
    shapes = " ".join(
        f"[{'x'.join(map(str, tensor.shape))}]" for tensor in signature.inputs[:3] if tensor.shape
    )
    dtype = signature.inputs[0].dtype if signature.inputs else ""
    return f"{kernel_name(signature)} {dtype}{shapes}".strip()


def _call_text(program: Program, index: int) -> str:
    from prism_plugins.checks.calls import call_text

    return call_text(program.comms[index])
