"""``JobFacts`` of a Megatron job, computed before its first iteration."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from prism_plugins.integrations.megatron.flops import transformer_flops
from prism_plugins.integrations.megatron.layout import make_layout
from prism_plugins.integrations.megatron.moe import expert_kinds
from prism_plugins.integrations.megatron.schedule import ScheduleInputs, is_supported, stage_schedules
from prism_plugins.integrations.megatron.session import BatchShape, Session
from prism_plugins.integrations.megatron.shards import optimizer_shards
from prism_plugins.integrations.megatron.stages import LayerFunctions, layers_of_stages, stage_fingerprints
from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.layout import Layout


def layer_functions() -> LayerFunctions:
    """Megatron's own functions about layers and stages."""
    return LayerFunctions(
        importlib.import_module("megatron.core.parallel_state"),
        importlib.import_module("megatron.core.transformer.transformer_block"),
        importlib.import_module("megatron.core.transformer.transformer_layer"),
    )


def job_facts(session: Session, model: list[Any], config: Any, batch: BatchShape) -> JobFacts:
    """The facts of the job whose model (this rank's chunks) and configuration these are."""
    sizes = session.sizes
    layout = make_layout(session.context.spec.world_size, sizes, num_microbatches=batch.num_microbatches)
    _say_unknown_sharding(session, model)
    shards = optimizer_shards(session.optimizers)
    kinds, kind_of = expert_kinds(session, layout, config)
    return JobFacts(
        framework="megatron",
        layout=layout,
        stages=_stages(session, model, config, batch, layout),
        shards=shards,
        shard_kinds=kinds,
        kind_of=kind_of,
        kinds_are_classes=bool(kinds),
        context_ranks_differ=layout.cp > 1 and _context_ranks_differ(config),
        tokens_per_iteration=_samples(layout, batch) * batch.seq_length,
        model_flops_per_iteration=_flops(config, model, layout, batch),
    )


def _context_ranks_differ(config: Any) -> bool:
    """Not where all attention is exchanged for heads (``a2a``): then every rank sees the whole sequence."""
    kinds = getattr(config, "cp_comm_type", None) or "p2p"
    return set([kinds] if isinstance(kinds, str) else kinds) != {"a2a"}


def _stages(
    session: Session, model: list[Any], config: Any, batch: BatchShape, layout: Layout
) -> tuple[StageInfo, ...]:
    module = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    if not is_supported(module, config, pp=layout.pp):
        session.context.assume(
            "the pipeline schedule of this configuration (overlapped expert communication, hybrid context "
            "parallelism, megatron-core before 0.14) cannot be told in advance: every stage is sliced"
        )
    schedules = stage_schedules(
        module,
        ScheduleInputs(
            pp=layout.pp,
            chunks=layout.vpp,
            num_microbatches=batch.num_microbatches,
            seq_length=batch.seq_length,
            micro_batch_size=batch.micro_batch_size,
            config=config,
            tp=layout.tp,
            cp=layout.cp,
            align_param_gather=_aligns_param_gather(model),
        ),
    )
    fingerprints = stage_fingerprints(layer_functions(), config, shared_embedding=_shares_embedding(model))
    layers = layers_of_stages(layer_functions(), config)
    return tuple(
        StageInfo(fingerprint=text, schedule=schedule, layers=count)
        for text, schedule, count in zip(fingerprints, schedules, layers, strict=True)
    )


def _say_unknown_sharding(session: Session, model: list[Any]) -> None:
    """State that is sharded in a way that is not computed here: all data-parallel ranks count as the sliced one."""
    ddp = getattr(model[0], "ddp_config", None)
    ways = {
        "Megatron FSDP": getattr(ddp, "use_megatron_fsdp", False),
        "torch FSDP2": type(model[0]).__name__ == "TorchFullyShardedDataParallel",
        "the layer-wise distributed optimizer": session.layer_wise_optimizer,
    }
    for name, is_used in ways.items():
        if is_used:
            session.context.assume(
                f"{name} shards differently from rank to rank: every data-parallel rank is taken to hold as much "
                "as the sliced one"
            )


def _aligns_param_gather(model: list[Any]) -> bool:
    ddp = getattr(model[0], "ddp_config", None)
    return bool(
        ddp is not None
        and ddp.use_distributed_optimizer
        and ddp.overlap_param_gather
        and getattr(ddp, "align_param_gather", False)
    )


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _shares_embedding(model: list[Any]) -> bool:
    return any(getattr(_unwrapped(c), "share_embeddings_and_output_weights", False) for c in model)


def _samples(layout: Layout, batch: BatchShape) -> int:
    return batch.num_microbatches * batch.micro_batch_size * layout.dp


def _flops(config: Any, model: list[Any], layout: Layout, batch: BatchShape) -> float:
    samples = _samples(layout, batch)
    training = sys.modules.get("megatron.training.training")
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if training is not None and args is not None:
        return float(training.num_floating_point_operations(args, samples))
    vocab = max((getattr(_unwrapped(chunk), "vocab_size", 0) or 0 for chunk in model), default=0)
    return transformer_flops(config, num_samples=samples, seq_length=batch.seq_length, vocab_size=vocab)
