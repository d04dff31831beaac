"""What no emulation of a Megatron layout can be below, by formula. See docs/tuning.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from prism_plugins.integration.tuning import Chunk, Limits, Shape
from prism_plugins.integrations.megatron.tune_knobs import MegatronLaunch

_KINDS = ("none", "selective", "full")


class _Work(NamedTuple):
    """Compared by FLOPs first."""

    flops: float = 0.0
    link: float = 0.0
    hbm: float = 0.0
    nic: float = 0.0

    def plus(self, other: _Work, times: int = 1) -> _Work:
        return _Work(*(a + times * b for a, b in zip(self, other, strict=True)))


def limits(launch: MegatronLaunch, p: Mapping[str, Any], shape: Shape) -> Limits:
    """Lower bounds of a point ``p`` (knobs by name) with its ``shape``."""
    critical = _critical_path(launch, p, shape)
    return Limits(
        memory_bytes=_memory(launch, p, shape),
        flops=critical.flops,
        link_bytes=critical.link,
        nic_bytes=critical.nic,
        hbm_bytes=critical.hbm,
        dtype=launch.model.dtype,
    )


def _critical_path(launch: MegatronLaunch, p: Mapping[str, Any], shape: Shape) -> _Work:
    """A stage's work for all micro-batches and, before and after them, one through the first chunks of the stages before it;
    of the stage where that is most."""
    of_layer = {kind: _layer(launch, p, kind) for kind in _KINDS}
    loss = _Work(flops=launch.model.loss_flops(p["micro_batch"]) / (p["tp"] * p["cp"]))

    def work_of(chunk: Chunk) -> _Work:
        work = loss if chunk.loss else _Work()
        for kind, layers in chunk.layers:
            work = work.plus(of_layer[kind], layers)
        return work

    before, critical = _Work(), _Work()
    for stage in shape.chunks:
        work = [work_of(chunk) for chunk in stage]
        total = before
        for chunk in work:
            total = total.plus(chunk, shape.layout.num_microbatches)
        critical = max(critical, total.plus(_after(launch, p, shape, stage)))
        before = before.plus(work[0])
    return critical


def _layer(launch: MegatronLaunch, p: Mapping[str, Any], kind: str) -> _Work:
    """A layer's forward and backward of one micro-batch on a rank."""
    model, micro_batch, tp, cp = launch.model, p["micro_batch"], p["tp"], p["cp"]
    recomputed = kind == "full"
    link = 0.0
    if not launch.args.get("tp_comm_overlap"):
        link = (tp - 1) / tp * model.layer_traffic(micro_batch, sp=bool(p["sp"]), recomputed=recomputed) / cp
    return _Work(
        flops=model.layer_flops(micro_batch, recomputed=recomputed) / (tp * cp),
        link=link,
        hbm=model.softmax_bytes(micro_batch, tp, cp, kind=kind),
    )


def _memory(launch: MegatronLaunch, p: Mapping[str, Any], shape: Shape) -> float:
    """States and the activations that backward needs, on the stage with most."""
    model, layout, pp, vpp = launch.model, shape.layout, p["pp"], p["vpp"]
    most = 0.0
    for s, stage in enumerate(shape.chunks):
        states = 0.0
        data = (layout.dp * layout.cp, layout.edp)
        for params, ranks in zip(_params_of(launch, p, stage), data, strict=True):
            shards = ranks if shape.sharded_optimizer else 1
            states += params * (model.param_bytes + model.grad_bytes + model.optimizer_bytes / shards)
        in_flight = pp - s + (vpp - 1) * pp if vpp > 1 else pp - s
        kept = sum(
            n * model.kept_bytes(p["micro_batch"], p["tp"], p["cp"], bool(p["sp"]), kind=kind)
            for kind, n in stage[0].layers
        )
        most = max(most, states + min(layout.num_microbatches * vpp, in_flight) * kept)
    return most


def expert_share(launch: MegatronLaunch, p: Mapping[str, Any]) -> float:
    """Share of a layer's parameters on a rank that are experts'."""
    model = launch.model
    if not model.experts:
        return 0.0
    return model.expert_params(p["ep"], p["etp"]) / model.layer_params(p["tp"], p["ep"], p["etp"])


def _params_of(launch: MegatronLaunch, p: Mapping[str, Any], stage: tuple[Chunk, ...]) -> tuple[float, float]:
    """Parameters of a rank of a stage: of dense layers, and of experts."""
    model, layers = launch.model, sum(n for c in stage for _, n in c.layers)
    ends = sum(c.embedding + c.loss for c in stage)
    experts = layers * model.expert_params(p["ep"], p["etp"])
    params = layers * model.layer_params(p["tp"], p["ep"], p["etp"]) - experts
    return params + model.embedding_params(p["tp"]) * (min(ends, 1) if launch.tied else ends), experts


def _after(launch: MegatronLaunch, p: Mapping[str, Any], shape: Shape, stage: tuple[Chunk, ...]) -> _Work:
    """What a stage has to do when its last micro-batch is done: data-parallel communication that nothing overlaps, and the
    optimizer. Experts have data-parallel groups of their own; nothing is counted for them."""
    model, layout = launch.model, shape.layout
    if model.experts:
        return _Work()
    params, members = _params_of(launch, p, stage)[0], layout.dp * layout.cp
    kind, _, overlap = str(p["optimizer"]).partition("+")
    nbytes = 0.0
    if not overlap and "--overlap-grad-reduce" in launch.flags:
        nbytes = params * (model.grad_bytes + (model.param_bytes if kind == "distributed" else 0))
    near = max(1, min(members, launch.gpus_per_node // p["tp"]))
    nodes = math.ceil(members / near)
    optimizer = model.optimizer_traffic(params, members if shape.sharded_optimizer else 1)
    if nodes == 1:
        return _Work(link=nbytes * (members - 1) / members, hbm=optimizer)
    return _Work(nic=nbytes * (nodes - 1) / nodes / near, hbm=optimizer)
