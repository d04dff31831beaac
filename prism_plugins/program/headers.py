"""What pipeline stages tell each other about the tensors they will send, checked along the pipeline.

Stages of equal layers receive different tensors where layers change the shape of what passes through. And a slice
whose predecessor was not sliced read the header of another pair of stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.slices import JobFacts, SliceReport, StageInfo
from prism_plugins.world.classes import captured_stages


def check_headers(facts: JobFacts, reports: Mapping[int, SliceReport]) -> None:
    """Raise :class:`CannotDeriveError` for the first stage that is sent other tensors than the slice that stands for
    it received: one that is to be derived has to be sliced, one that was sliced has to be sliced again."""
    if not facts.stage_headers:
        return
    layout, captured = facts.layout, captured_stages(facts.stages)
    known: dict[int, StageInfo] = {}
    ranks_of: dict[int, list[int]] = {}
    for rank, report in sorted(reports.items()):
        stage = layout.coords(rank)["pp"]
        ranks_of.setdefault(stage, []).append(rank)
        if report.facts is not None:
            known.setdefault(stage, report.facts.stages[stage])
    for stage in range(1, layout.pp):
        before, own = (known.get(s, known.get(captured[s])) for s in (stage - 1, stage))
        if before is None or own is None or before.sends == own.receives:
            continue
        message = f"stage {stage} is sent {before.sends}, its slice received {own.receives}"
        if stage in known:
            raise CannotDeriveError(message, again=tuple(ranks_of[stage]))
        raise CannotDeriveError(
            message, ranks=(layout.rank_of(dict.fromkeys(layout.sizes(), 0) | {"pp": stage}),)
        )
