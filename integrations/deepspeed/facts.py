"""``JobFacts`` of a DeepSpeed job, computed before its first iteration."""

from __future__ import annotations

from typing import Any

import msgspec

from prism_plugins.integrations.deepspeed.layout import make_layout
from prism_plugins.integrations.deepspeed.partitions import shard_kinds
from prism_plugins.integrations.deepspeed.pipeline import stage_schedules
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.integrations.deepspeed.stages import stage_contents
from prism_plugins.integrations.deepspeed.work import flops_per_token, tokens_of_batch, tokens_of_iteration
from prism_plugins.program.slices import JobFacts, StageInfo


def job_facts(session: Session, engine: Any) -> JobFacts:
    """The facts of the job that this engine trains."""
    layout = make_layout(session.context.spec.world_size, engine)
    kinds = shard_kinds(engine.optimizer, layout.dp * layout.cp)
    return JobFacts(
        framework="deepspeed",
        layout=layout,
        stages=_stages(session, engine, layout.pp),
        samples_per_iteration=int(engine.train_batch_size()),
        stage_headers=layout.pp > 1,
        shard_kinds=kinds.sizes,
        kind_of=kinds.kind_of,
        partitions=kinds.partitions,
    )


def with_work(facts: JobFacts, model: Any, inputs: Any) -> JobFacts:
    """The facts with the tokens and model FLOPs of an iteration, from the inputs of a micro-batch. With a pipeline,
    of whose model a rank holds a part, the FLOPs are told of its stage."""
    layout = facts.layout
    tokens = tokens_of_iteration(layout, tokens_of_batch(inputs))
    flops = flops_per_token(model, tp=layout.tp)
    if layout.pp == 1:
        return msgspec.structs.replace(
            facts, tokens_per_iteration=tokens, model_flops_per_iteration=flops * tokens
        )
    own = msgspec.structs.replace(facts.stages[model.stage_id], flops_per_token=flops)
    stages = (*facts.stages[: model.stage_id], own, *facts.stages[model.stage_id + 1 :])
    return msgspec.structs.replace(facts, tokens_per_iteration=tokens, stages=stages)


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
