"""The chain of events that decides how long the iteration takes, walked backwards over all ranks.

Every start has a cause: the kernel before it on its stream, the collective it waited for, the host that had not issued it
yet, or, for a collective, the last member to arrive. From the end of the slowest rank the walk goes from cause to
cause to the start of the iteration; where the cause is another rank's arrival it goes on there. The segments are
disjoint and cover the iteration, so the time of a category on the path bounds what removing it can gain: another
path may take over.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from prism_plugins.costs.families import family_of
from prism_plugins.emit.spans import SpanKind
from prism_plugins.program.model import CommSignature, EventKind, Program
from prism_plugins.report.groups import dims_of_group
from prism_plugins.report.rank_spans import RankSpans
from prism_plugins.simulate.expand import CallStarts
from prism_plugins.simulate.timeline import OpTimes

_SAME_NS = 0.5
"""Times closer than this are one time."""
_MAX_STEPS = 2_000_000
_MAX_PEERS = 64
_LOOK_BACK = 4096


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the path on one rank, ns from the start of the iteration."""

    rank: int
    start_ns: float
    end_ns: float
    kind: str
    """``compute``, ``optimizer``, ``communication``, ``host`` or ``wait`` (a cause that was not found)."""
    what: str
    """Dimensions of the group for communication; empty elsewhere."""
    spans: tuple[int, ...] = ()
    """The device spans it consists of, in time order: indices into those of the rank (:class:`RankSpans`). None where the host
    is the cause."""


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring."""

    segments: tuple[Segment, ...]
    """In time order; neighbours of one rank, kind and subject are joined."""
    by_kind_ms: dict[str, float]
    """``compute``, ``communication tp``, …: they sum to the iteration time."""
    by_family_ms: dict[str, float]
    """Compute and optimizer time on the path by :func:`kind_of_op`."""


def kind_of_op(op: str) -> str:
    """What an op is for a reader: the family its cost rule has, fused regions and the loss's softmax apart."""
    if op == "prism::fused":
        return "fused"
    return "log_softmax" if "log_softmax" in op else family_of(op) or "other"


def critical_path(ranks: RankSpans) -> CriticalPath:
    """The critical path of a simulated job. The view needs a timeline."""
    walk = _Walk(ranks)
    walk.run()
    return walk.result()


class _Rank:
    """One rank's device spans, arranged for the walk."""

    def __init__(self, ranks: RankSpans, rank: int) -> None:
        self.program, self.times, self.spans = ranks.of(rank)
        spans = self.spans
        self.is_comm = spans.kind == SpanKind.COMMUNICATION
        self.by_end = np.argsort(spans.end_ns, kind="stable")
        self.ends = spans.end_ns[self.by_end]
        lane_order = np.lexsort((spans.start_ns, spans.lane))
        self.lane_order = lane_order
        self.position = np.empty(len(lane_order), dtype=np.int64)
        self.position[lane_order] = np.arange(len(lane_order))
        lane, start, end = spans.lane[lane_order], spans.start_ns[lane_order], spans.end_ns[lane_order]
        touches = np.zeros(len(lane_order), dtype=bool)
        touches[1:] = (lane[1:] == lane[:-1]) & (np.abs(start[1:] - end[:-1]) <= _SAME_NS)
        touches &= ~self.is_comm[lane_order]
        self.run_start = np.maximum.accumulate(np.where(touches, 0, np.arange(len(lane_order))))
        """Per position: where its run of back-to-back kernels begins."""
        syncs = np.flatnonzero(
            np.isin(
                self.program.events["kind"],
                (int(EventKind.EVENT_SYNC), int(EventKind.STREAM_SYNC), int(EventKind.DEVICE_SYNC)),
            )
        )
        self.syncs = np.union1d(syncs, self._waits_for_room(_launch_queue(ranks)))
        """Rows after which the host had to wait."""
        self.in_optimizer = _optimizer_rows(self.program)

    def _waits_for_room(self, depth: int) -> np.ndarray:
        """Rows before launches that waited until the kernel ``depth`` launches ahead of them had ended: the host goes on with
        them at just that time."""
        kernels = np.flatnonzero(~self.is_comm)
        kernels = kernels[np.argsort(self.spans.row[kernels], kind="stable")]
        if not depth or len(kernels) <= depth:
            return np.zeros(0, dtype=np.int64)
        rows, ends = self.spans.row[kernels[depth:]], self.spans.end_ns[kernels[:-depth]]
        return rows[np.abs(self.times.host_ns[rows] - ends) <= _SAME_NS] - 1

    def calls_in(self, span: int) -> np.ndarray:
        """Rows of the calls in a span of communication."""
        return self.spans.members.get(span, self.spans.row[span : span + 1])

    def ended_at(self, t: float, before_row: int) -> int:
        """The span that ends at ``t``: a kernel rather than a collective, -1 where none does. Spans issued after
        ``before_row`` cause nothing (-1: any)."""
        low, high = np.searchsorted(self.ends, (t - _SAME_NS, t + _SAME_NS))
        best = -1
        for i in self.by_end[low:high].tolist():
            if self.spans.end_ns[i] <= self.spans.start_ns[i] or 0 <= before_row <= self.spans.row[i]:
                continue
            if best < 0 or (self.is_comm[best] and not self.is_comm[i]):
                best = i
        return best

    def ended_before(self, t: float, before_row: int) -> int:
        """The span issued before a row that ends last, at ``t`` or earlier; -1 for none."""
        high = int(np.searchsorted(self.ends, t + _SAME_NS))
        for i in self.by_end[max(0, high - _LOOK_BACK) : high][::-1].tolist():
            if self.spans.row[i] < before_row:
                return i
        return -1


def _launch_queue(ranks: RankSpans) -> int:
    model = getattr(ranks.view.costs, "interference", None)
    return model.launch_queue if model is not None else 0


class _Calls:
    """The calls of a rank: when it comes to each, and whom it meets there. The n-th of one rank meets the n-th of the others."""

    def __init__(self, program: Program, starts: CallStarts) -> None:
        events = program.events
        self._rows = rows = np.flatnonzero(events["kind"] == EventKind.COMM)
        work = events["value"][rows]
        _, first, inverse = np.unique(work, return_index=True, return_inverse=True)
        self._issued = rows[first][inverse]
        """Per call: the first row of what it was coalesced into."""
        by_work = np.argsort(starts.work)
        self._start = starts.start_ns[by_work][np.searchsorted(starts.work[by_work], work)]
        numbers: dict[tuple, int] = {}
        of_comm = [numbers.setdefault(_meeting(program, comm), len(numbers)) for comm in program.comms]
        meeting = np.array(of_comm, dtype=np.int64)[events["ref"][rows]]
        order = np.lexsort((rows, self._issued, meeting))
        begin = np.searchsorted(meeting[order], np.arange(len(numbers) + 1))
        self._met = {key: order[begin[n] : begin[n + 1]] for key, n in numbers.items()}
        self._meetings = list(numbers)
        self._meeting = meeting
        self._ordinal = np.empty(len(rows), dtype=np.int64)
        self._ordinal[order] = np.arange(len(rows)) - begin[meeting[order]]

    def meetings(self, rows: np.ndarray) -> list[tuple[tuple, int]]:
        """(meeting, ordinal) of the calls at these rows."""
        at = np.searchsorted(self._rows, rows)
        numbers, ordinals = self._meeting[at].tolist(), self._ordinal[at].tolist()
        return [(self._meetings[n], ordinal) for n, ordinal in zip(numbers, ordinals, strict=True)]

    def arrival(self, meeting: tuple, ordinal: int) -> tuple[float, int] | None:
        """(when, row) this rank comes to a meeting for the n-th time; None where it does not."""
        met = self._met.get(meeting, ())
        if ordinal >= len(met):
            return None
        call = met[ordinal]
        return float(self._start[call]), int(self._issued[call])


def _meeting(program: Program, comm: CommSignature) -> tuple:
    """What members of a call agree on: the group, and for messages sender and receiver."""
    group = program.groups[comm.group]
    key: tuple = (group.ranks, group.desc, group.name if not group.desc else "")
    if comm.kind in ("send", "recv") and 0 <= comm.peer < len(group.ranks):
        ends = (program.rank, group.ranks[comm.peer])
        key += ends if comm.kind == "send" else ends[::-1]
    return key


class _Walk:
    def __init__(self, ranks: RankSpans) -> None:
        self.view = ranks.view
        self._spans = ranks
        self.ranks: dict[int, _Rank] = {}
        self.parts: list[tuple[int, float, float, str, str, tuple[int, ...]]] = []
        self.families: dict[str, float] = {}
        self._calls: dict[int, _Calls] = {}
        self._dims: dict[tuple[tuple[int, ...], str], str] = {}
        self._others: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._cell_of_rank = self.view.cell_of_rank()

    def rank(self, rank: int) -> _Rank:
        if rank not in self.ranks:
            self.ranks[rank] = _Rank(self._spans, rank)
        return self.ranks[rank]

    def calls(self, rank: int) -> _Calls:
        if rank not in self._calls:
            self._calls[rank] = _Calls(self.view.program(rank), self.view.call_starts(rank))
        return self._calls[rank]

    def run(self) -> None:
        rank = self.view.timeline.slowest_rank
        t = float(self.view.timeline.iteration_time_ns)
        row = -1
        for _ in range(_MAX_STEPS):
            if t <= _SAME_NS:
                return
            here = self.rank(rank)
            span = here.ended_at(t, row)
            if span < 0:
                t, row = self._host(here, rank, t, row)
            elif here.is_comm[span]:
                rank, t, row = self._comm(here, rank, span, t)
            else:
                t, row = self._kernels(here, rank, span, t)
        self.parts.append((rank, 0.0, t, "wait", "", ()))

    def _kernels(self, here: _Rank, rank: int, span: int, t: float) -> tuple[float, int]:
        """A run of back-to-back kernels, to its start."""
        last = int(here.position[span])
        first = int(here.run_start[last])
        index = here.lane_order[first : last + 1]
        spans = here.spans
        optimizer = here.in_optimizer[spans.row[index]]
        length = spans.end_ns[index] - spans.start_ns[index]
        refs = here.program.events["ref"][spans.row[index]]
        by_ref = np.bincount(refs, weights=length)
        for ref in np.flatnonzero(by_ref).tolist():
            signature = here.program.signatures[ref]
            family = kind_of_op(signature.op)
            self.families[family] = self.families.get(family, 0.0) + float(by_ref[ref])
        edges = np.flatnonzero(np.diff(optimizer.astype(np.int8))) + 1
        bounds = [0, *edges.tolist(), len(index)]
        for low, high in reversed(list(itertools.pairwise(bounds))):
            begin, end = float(spans.start_ns[index[low]]), float(spans.end_ns[index[high - 1]])
            kind = "optimizer" if optimizer[low] else "compute"
            self.parts.append((rank, begin, min(end, t), kind, "", tuple(index[low:high].tolist())))
            t = begin
        return t, int(spans.row[index[0]])

    def _comm(self, here: _Rank, rank: int, span: int, t: float) -> tuple[int, float, int]:
        """A collective: its transfer, then whoever came last."""
        spans = here.spans
        start, moving = float(spans.start_ns[span]), float(spans.transfer_start_ns[span])
        comm = here.program.comms[int(here.program.events["ref"][spans.row[span]])]
        group = here.program.groups[comm.group]
        if (key := (group.ranks, group.desc)) not in self._dims:
            self._dims[key] = dims_of_group(group, self.view.job.layout)
        moving = min(max(moving, start), t)
        dims = self._dims[key]
        peer, at, row = rank, start, int(spans.row[span])
        if span in spans.members:  # ends with its last part, which starts when both sides have come
            peer, at, row = self._last_to_come(here, rank, span, t)
            moving = max(moving, at) if peer != rank else moving
        elif moving - start > _SAME_NS:
            peer, at, row = self._last_to_come(here, rank, span, moving)
        self.parts.append((rank, moving, t, "communication", dims, (span,)))
        if peer == rank and moving - start > _SAME_NS:
            self.parts.append((rank, start, moving, "wait", dims, (span,)))
            at = start
        return peer, min(at, moving), row

    def _last_to_come(self, here: _Rank, rank: int, span: int, until: float) -> tuple[int, float, int]:
        """(rank, when, row) of the member that came last, but not after ``until``."""
        best = (rank, float(here.spans.start_ns[span]), int(here.spans.row[span]))
        for meeting, ordinal in self.calls(rank).meetings(here.calls_in(span)):
            for peer in self._distinct(meeting[3:] or meeting[0], rank):
                arrival = self.calls(peer).arrival(meeting, ordinal)
                if arrival is None:
                    continue
                start, row = arrival
                if best[1] + _SAME_NS < start <= until + _SAME_NS:
                    best = (peer, min(start, until), row)
                if abs(start - until) <= _SAME_NS:
                    return best
        return best

    def _distinct(self, members: tuple[int, ...], rank: int) -> list[int]:
        """The other members, one of those that have the same times."""
        key = int(self._cell_of_rank[rank]), members
        if key not in self._others:
            cells, first = np.unique(self._cell_of_rank[list(members)], return_index=True)
            self._others[key] = [members[i] for i in np.sort(first[cells != key[0]]).tolist()][:_MAX_PEERS]
        return self._others[key]

    def _host(self, here: _Rank, rank: int, t: float, row: int) -> tuple[float, int]:
        """The host had not issued it: back to what it waited for last, or to the start."""
        end = len(here.program.events) if row < 0 else row
        k = int(np.searchsorted(here.syncs, end)) - 1
        times: OpTimes = here.times
        while k >= 0:
            sync = int(here.syncs[k])
            resumed = float(times.host_ns[sync + 1]) if sync + 1 < len(times.host_ns) else t
            resumed = min(resumed, t)
            blocked_by = here.ended_before(resumed, sync)
            if blocked_by >= 0 and float(here.spans.end_ns[blocked_by]) > float(times.host_ns[sync]):
                done = float(here.spans.end_ns[blocked_by])
                self.parts.append((rank, done, t, "host", "", ()))
                return done, sync
            k -= 1
        self.parts.append((rank, 0.0, t, "host", "", ()))
        return 0.0, -1

    def result(self) -> CriticalPath:
        segments: list[Segment] = []
        by_kind: dict[str, float] = {}
        for (rank, kind, what), parts in itertools.groupby(
            (part for part in reversed(self.parts) if part[2] > part[1]), key=lambda p: (p[0], p[3], p[4])
        ):
            joined = list(parts)
            name = f"{kind} {what}".strip()
            by_kind[name] = by_kind.get(name, 0.0) + sum(end - start for _, start, end, *_ in joined) / 1e6
            spans = tuple(itertools.chain.from_iterable(part[5] for part in joined))
            segments.append(
                Segment(
                    rank=rank, start_ns=joined[0][1], end_ns=joined[-1][2], kind=kind, what=what, spans=spans
                )
            )
        return CriticalPath(
            segments=tuple(segments),
            by_kind_ms=dict(sorted(by_kind.items(), key=lambda item: -item[1])),
            by_family_ms={
                name: ns / 1e6 for name, ns in sorted(self.families.items(), key=lambda item: -item[1])
            },
        )


def _optimizer_rows(program: Program) -> np.ndarray:
    """bool over the events: inside an optimizer phase."""
    inside = np.zeros(len(program.events), dtype=bool)
    for phase, begin, end in program.iter_phases():
        if phase.kind == "optimizer":
            inside[begin : end + 1] = True
    return inside
