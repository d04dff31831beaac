"""``JobFacts`` of a DeepSpeed job, computed before its first iteration."""

from __future__ import annotations

from typing import Any

from prism_plugins.integrations.deepspeed.layout import make_layout
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.slices import JobFacts, StageInfo


def job_facts(session: Session, engine: Any) -> JobFacts:
    """The facts of the job that this engine trains."""
    layout = make_layout(session.context.spec.world_size, engine)
    stages = tuple(StageInfo(fingerprint=f"stage {stage}") for stage in range(layout.pp))
    return JobFacts(framework="deepspeed", layout=layout, stages=stages)
