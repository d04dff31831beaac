"""The pipeline as it runs: when each stage's device works on which phase."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.spans import SpanKind
from prism_plugins.emit.trace_names import phase_name
from prism_plugins.report.rank_spans import RankSpans
from prism_plugins.simulate.expand import measure, union

_GAP = 0.004
"""Of the iteration: a longer time without kernels inside a phase divides its bar."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of one phase in which its kernels follow each other closely, ns."""

    kind: str
    name: str
    microbatch: int
    start_ns: float
    end_ns: float


class StageSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage, by one of its ranks."""

    stage: int
    rank: int
    bars: tuple[Bar, ...]
    busy_share: float
    """Of the iteration in which the device runs kernels other than communication."""


def stage_ranks(view: JobView) -> list[int]:
    """For every pipeline stage the rank that differs from the slowest one in nothing else."""
    layout = view.job.layout
    coords = layout.coords(view.timeline.slowest_rank)
    return [layout.rank_of({**coords, "pp": stage}) for stage in range(layout.pp)]


def schedule(ranks: RankSpans) -> list[StageSchedule]:
    """The schedule of all stages. The view needs a timeline."""
    view = ranks.view
    total = view.timeline.iteration_time_ns
    stages = []
    for stage, rank in enumerate(stage_ranks(view)):
        program, _, spans = ranks.of(rank)
        compute = np.flatnonzero(spans.kind != SpanKind.COMMUNICATION)
        rows, starts, ends = spans.row[compute], spans.start_ns[compute], spans.end_ns[compute]
        bars = []
        for phase, begin, end in program.iter_phases():
            low, high = np.searchsorted(rows, (begin, end))
            if low == high or phase.kind.startswith(("send", "recv")):
                continue
            gaps = np.flatnonzero(
                starts[low + 1 : high] - np.maximum.accumulate(ends[low : high - 1]) > _GAP * total
            )
            for first, last in itertools.pairwise([low, *(gaps + low + 1).tolist(), high]):
                bars.append(
                    Bar(
                        kind=phase.kind,
                        name=phase_name(phase),
                        microbatch=phase.microbatch if first == low else -1,
                        start_ns=float(starts[first:last].min()),
                        end_ns=float(ends[first:last].max()),
                    )
                )
        busy = measure(union([(starts, ends)]))
        stages.append(
            StageSchedule(stage=stage, rank=rank, bars=tuple(bars), busy_share=busy / total if total else 0.0)
        )
    return stages
