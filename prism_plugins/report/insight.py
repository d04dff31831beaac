"""Adds to a prediction what the simulated job tells about itself."""

from __future__ import annotations

import msgspec

from prism_plugins.emit.job_view import JobView
from prism_plugins.program.prediction import Prediction
from prism_plugins.report.critical_path import CriticalPath, critical_path
from prism_plugins.report.expected_error import expected_error
from prism_plugins.report.gains import opportunities
from prism_plugins.report.groups import GroupUse, group_uses
from prism_plugins.report.rank_spans import RankSpans


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """The slowest rank's communication, and the critical path."""

    ranks: RankSpans
    rank: int
    """The slowest."""
    groups: tuple[GroupUse, ...]
    path: CriticalPath


def look_into(view: JobView) -> Insight:
    """Analyse a job. The view needs a timeline."""
    rank = view.timeline.slowest_rank
    ranks = RankSpans(view)
    program, _, spans = ranks.of(rank)
    return Insight(
        ranks=ranks,
        rank=rank,
        groups=tuple(group_uses(program, spans, view.costs, view.job.layout)),
        path=critical_path(ranks),
    )


def with_insight(prediction: Prediction, view: JobView, insight: Insight) -> Prediction:
    """The prediction with expected error, exposed communication by group, and what to change first."""
    program, _, spans = insight.ranks.of(insight.rank)
    exposed: dict[str, float] = {}
    for use in insight.groups:
        exposed[use.dims] = exposed.get(use.dims, 0.0) + use.exposed_ms
    return msgspec.structs.replace(
        prediction,
        expected_error=expected_error(view, program, spans, prediction.breakdown_ms),
        exposed_communication_ms=dict(sorted(exposed.items(), key=lambda item: -item[1])),
        opportunities=opportunities(view, insight.path, prediction.breakdown_ms),
    )
