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
from prism_plugins.report.groups import dims_of
from prism_plugins.report.rank_spans import RankSpans
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


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring."""

    segments: tuple[Segment, ...]
    """In time order; neighbours of one rank, kind and subject are joined."""
    by_kind_ms: dict[str, float]
    """``compute``, ``communication tp``, …: they sum to the iteration time."""
    by_family_ms: dict[str, float]
    """Compute and optimizer time on the path by op family."""


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
        self.syncs = np.flatnonzero(
            np.isin(
                self.program.events["kind"],
                (int(EventKind.EVENT_SYNC), int(EventKind.STREAM_SYNC), int(EventKind.DEVICE_SYNC)),
            )
        )
        self.in_optimizer = _optimizer_rows(self.program)
        self._calls: dict[tuple, list[int]] | None = None
        self._key_of_span: dict[int, list[tuple[tuple, int]]] = {}

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

    def calls(self) -> dict[tuple, list[int]]:
        """Meeting → spans, in order: the n-th of one rank meets the n-th of the others."""
        if self._calls is None:
            self._calls = {}
            events, members = self.program.events, self.spans.members
            keys = [_meeting(self.program, comm) for comm in self.program.comms]
            met: list[list[int]] = [self._calls.setdefault(key, []) for key in keys]
            indices = np.flatnonzero(self.is_comm)
            for i, ref in zip(indices.tolist(), events["ref"][self.spans.row[indices]].tolist(), strict=True):
                refs = events["ref"][members[i]].tolist() if i in members else (ref,)
                self._key_of_span[i] = found = []
                for each in refs:
                    found.append((keys[each], len(met[each])))
                    met[each].append(i)
        return self._calls

    def meetings(self, span: int) -> list[tuple[tuple, int]]:
        """(meeting, ordinal) of each call in a span."""
        self.calls()
        return self._key_of_span[span]


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
        self.parts: list[tuple[int, float, float, str, str]] = []
        self.families: dict[str, float] = {}
        self._dims: dict[tuple[int, ...], str] = {}
        self._class_of_rank = np.empty(self.view.job.layout.world_size, np.int64)
        for index, cls in enumerate(self.view.job.classes):
            self._class_of_rank[cls.ranks] = index

    def rank(self, rank: int) -> _Rank:
        if rank not in self.ranks:
            self.ranks[rank] = _Rank(self._spans, rank)
        return self.ranks[rank]

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
        self.parts.append((rank, 0.0, t, "wait", ""))

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
            family = "fused" if signature.op == "prism::fused" else family_of(signature.op) or "other"
            self.families[family] = self.families.get(family, 0.0) + float(by_ref[ref])
        edges = np.flatnonzero(np.diff(optimizer.astype(np.int8))) + 1
        bounds = [0, *edges.tolist(), len(index)]
        for low, high in reversed(list(itertools.pairwise(bounds))):
            begin, end = float(spans.start_ns[index[low]]), float(spans.end_ns[index[high - 1]])
            kind = "optimizer" if optimizer[low] else "compute"
            self.parts.append((rank, begin, min(end, t), kind, ""))
            t = begin
        return t, int(spans.row[index[0]])

    def _comm(self, here: _Rank, rank: int, span: int, t: float) -> tuple[int, float, int]:
        """A collective: its transfer, then whoever came last."""
        spans = here.spans
        start, moving = float(spans.start_ns[span]), float(spans.transfer_start_ns[span])
        comm = here.program.comms[int(here.program.events["ref"][spans.row[span]])]
        ranks = here.program.groups[comm.group].ranks
        if ranks not in self._dims:
            self._dims[ranks] = dims_of(ranks, self.view.job.layout)
        moving = min(max(moving, start), t)
        dims = self._dims[ranks]
        peer, at, row = rank, start, int(spans.row[span])
        if span in spans.members:  # ends with its last part, which starts when both sides have come
            peer, at, row = self._last_to_come(here, rank, span, t)
            moving = max(moving, at) if peer != rank else moving
        elif moving - start > _SAME_NS:
            peer, at, row = self._last_to_come(here, rank, span, moving)
        self.parts.append((rank, moving, t, "communication", dims))
        if peer == rank and moving - start > _SAME_NS:
            self.parts.append((rank, start, moving, "wait", dims))
            at = start
        return peer, min(at, moving), row

    def _last_to_come(self, here: _Rank, rank: int, span: int, until: float) -> tuple[int, float, int]:
        """(rank, when, row) of the member that came last, but not after ``until``."""
        best = (rank, float(here.spans.start_ns[span]), int(here.spans.row[span]))
        for key, ordinal in here.meetings(span):
            members = key[3:] if len(key) > 3 else key[0]
            for peer in self._distinct(members, rank):
                other = self.rank(peer)
                met = other.calls().get(key, ())
                if ordinal >= len(met):
                    continue
                start = float(other.spans.start_ns[met[ordinal]])
                if best[1] + _SAME_NS < start <= until + _SAME_NS:
                    best = (peer, min(start, until), int(other.spans.row[met[ordinal]]))
                if abs(start - until) <= _SAME_NS:
                    return best
        return best

    def _distinct(self, members: tuple[int, ...], rank: int) -> list[int]:
        """One member per class and optimizer shard: others have the same times."""
        job = self.view.job
        seen: dict[tuple[int, int], int] = {}
        for member in members:
            if member == rank:
                continue
            index = int(self._class_of_rank[member])
            seen.setdefault((index, job.classes[index].variant_of.get(member, -1)), member)
        return list(seen.values())[:_MAX_PEERS]

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
                self.parts.append((rank, done, t, "host", ""))
                return done, sync
            k -= 1
        self.parts.append((rank, 0.0, t, "host", ""))
        return 0.0, -1

    def result(self) -> CriticalPath:
        segments: list[Segment] = []
        by_kind: dict[str, float] = {}
        for rank, start, end, kind, what in reversed(self.parts):
            if end <= start:
                continue
            name = f"{kind} {what}".strip()
            by_kind[name] = by_kind.get(name, 0.0) + (end - start) / 1e6
            last = segments[-1] if segments else None
            if last is not None and (last.rank, last.kind, last.what) == (rank, kind, what):
                segments[-1] = msgspec.structs.replace(last, end_ns=end)
            else:
                segments.append(Segment(rank=rank, start_ns=start, end_ns=end, kind=kind, what=what))
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
