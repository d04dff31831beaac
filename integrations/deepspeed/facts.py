"""``JobFacts`` of a DeepSpeed job, computed before its first iteration."""

from __future__ import annotations

from typing import Any

from prism_plugins.integrations.deepspeed.layout import make_layout
from prism_plugins.integrations.deepspeed.pipeline import stage_schedules
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.integrations.deepspeed.stages import stage_contents
from prism_plugins.program.slices import JobFacts, StageInfo


def job_facts(session: Session, engine: Any) -> JobFacts:
    """The facts of the job that this engine trains."""
    layout = make_layout(session.context.spec.world_size, engine)
    return JobFacts(
        framework="deepspeed",
        layout=layout,
        stages=_stages(session, engine, layout.pp),
        samples_per_iteration=int(engine.train_batch_size()),
        stage_headers=layout.pp > 1,
    )


def _stages(session: Session, engine: Any, pp: int) -> tuple[StageInfo, ...]:
    if pp == 1:
        return (StageInfo(fingerprint="the whole model"),)
    contents = stage_contents(engine.module)
    if contents.layer_numbers:
        session.context.assume(
            f"layers that differ only in their number ({', '.join(contents.layer_numbers)}) do the same"
        )
    return tuple(
        StageInfo(fingerprint=fingerprint, schedule=schedule)
        for fingerprint, schedule in zip(contents.fingerprints, stage_schedules(engine), strict=True)
    )
