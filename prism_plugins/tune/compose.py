"""A layout put together from the costs of its layers: time and memory without running it.

Every rank of a stage is its chunks' layers, plus embedding or loss; the pipeline schedule is simulated step by step
(:mod:`.pipeline`), a step as long as device or host need for it; gradients and parameters are communicated in buckets, hidden behind the last backward and the first
forward where the layout overlaps them, and hold SMs there. Not composed: HBM and links that collectives and compute share,
and differences between data-parallel ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from prism_plugins.costs.base import CostModel
from prism_plugins.integration.tuning import FULL, Chunk, Shape
from prism_plugins.program.memory_device import WORLD_GROUP, CommunicatorUse, DeviceOverhead
from prism_plugins.program.model import DTYPE_BYTES, CommSignature, MemoryCategory
from prism_plugins.program.prediction import Breakdown
from prism_plugins.tune.exposed import NOTHING, Buckets, after_backward, before_forward
from prism_plugins.tune.layers import LayerCosts, recomputed
from prism_plugins.tune.pipeline import Stages, busy, critical_path, pipeline_ends


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Time and memory of a layout."""

    iteration_ms: float
    memory_bytes: int
    """Peak allocated plus what lies outside torch's allocator, on the rank with most."""
    compute_ms: float
    """Of the busiest stage, its collectives left out."""
    exposed_ms: float
    """Collectives and transfers that compute waits for."""
    bubble_ms: float
    optimizer_ms: float
    host_ms: float = 0.0
    """The device waits for the host."""
    source: str = "composed"
    """``composed`` or ``emulated``."""


def estimate_of_parts(iteration_ms: float, parts: Breakdown, memory_bytes: int, *, source: str) -> Estimate:
    """A simulation in the terms of a composition."""
    return Estimate(
        iteration_ms=iteration_ms,
        memory_bytes=memory_bytes,
        compute_ms=parts.compute,
        exposed_ms=parts.exposed_communication,
        bubble_ms=parts.bubble,
        optimizer_ms=parts.optimizer,
        host_ms=parts.host,
        source=source,
    )


class Composer:
    """Composes layouts on one cluster."""

    def __init__(self, costs: CostModel, overhead: DeviceOverhead) -> None:
        self._costs = costs
        self._overhead = overhead
        self._pipeline = functools.lru_cache(maxsize=4096)(pipeline_ends)

    def compose(self, shape: Shape, kinds: Mapping[str, LayerCosts]) -> Estimate:
        """``kinds``: the costs of each kind of layer that was sliced, the plain one first."""
        kinds = _with_full(shape, kinds)
        layout = shape.layout
        if shape.overlap_grad is None:
            shape = msgspec.structs.replace(shape, overlap_grad=next(iter(kinds.values())).overlaps)
        if shape.overlap_param is None:
            shape = msgspec.structs.replace(
                shape, overlap_param=bool(shape.overlap_grad) and shape.sharded_optimizer
            )
        stages = self._stages(shape, kinds)
        m = layout.num_microbatches
        steps = [sum(f) + sum(b) for f, b in zip(stages.forward, stages.backward, strict=True)]
        grad_ms, grads, first = [], [], []
        for s, stage in enumerate(shape.chunks):
            reductions, gathered = zip(*(self._data_parallel(shape, kinds, s, c) for c in stage), strict=True)
            late = after_backward(reductions, stages.backward[s], layout.pp)
            grad_ms.append(late if shape.overlap_grad else sum(r.ms for r in reductions))
            grads.append(0.0 if shape.overlap_param else sum(g.ms for g in gathered))
            first.append(gathered[0] if shape.overlap_param else NOTHING)
        ends = self._pipeline(stages, m)
        arrives = itertools.accumulate(
            (f[0] + t for f, t in zip(stages.forward[:-1], stages.transfer, strict=False)), initial=0.0
        )
        delay = before_forward(
            first, [f[0] for f in stages.forward], list(arrives), from_start=layout.vpp > 1
        )
        optimizer = max(self._optimizer(shape, kinds, stage) for stage in shape.chunks)
        rest = max(self._sum(kinds, stage, "rest") for stage in shape.chunks)
        finish = [end + grad for end, grad in zip(ends, grad_ms, strict=True)]
        total = delay + max(finish) + optimizer + max(grads) + rest
        slowest = max(range(len(steps)), key=lambda s: finish[s])
        waited = m * sum(
            self._chunk(kinds, c, "exposed_communication", c.embedding or c.loss)
            for c in shape.chunks[slowest]
        )
        work = busy(stages, m)[slowest]
        device = m * sum(
            self._by_layers(kinds, c, field)
            for c in shape.chunks[slowest]
            for field in ("forward", "backward")
        )
        exposed = waited + grad_ms[slowest] + delay + max(grads)
        return Estimate(
            iteration_ms=total,
            memory_bytes=self._memory(shape, kinds),
            compute_ms=max(0.0, device - waited),
            exposed_ms=exposed,
            bubble_ms=max(0.0, ends[slowest] - work),
            optimizer_ms=optimizer + rest,
            host_ms=max(0.0, work - device),
        )

    def at_least_ms(self, shape: Shape, kinds: Mapping[str, LayerCosts]) -> float:
        """No composed time is below: without the schedule, which takes most of :meth:`compose`."""
        return critical_path(self._stages(shape, _with_full(shape, kinds)), shape.layout.num_microbatches)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _stages(self, shape: Shape, kinds: Mapping[str, LayerCosts]) -> Stages:
        forward, backward = [], []
        for stage in shape.chunks:
            forward.append(tuple(self._step(shape, kinds, c, "forward") for c in stage))
            backward.append(tuple(self._step(shape, kinds, c, "backward") for c in stage))
        layout = shape.layout
        here = dict.fromkeys(layout.sizes(), 0)
        transfer = []
        for s in range(layout.pp):
            pair = (layout.rank_of(here | {"pp": s}), layout.rank_of(here | {"pp": (s + 1) % layout.pp}))
            transfer.append(self._transfer_ms(shape, pair) if layout.pp > 1 else 0.0)
        return Stages(
            forward=tuple(forward),
            backward=tuple(backward),
            transfer=tuple(transfer),
            async_p2p=shape.async_p2p,
        )

    def _step(self, shape: Shape, kinds: Mapping[str, LayerCosts], chunk: Chunk, field: str) -> float:
        """How long a forward or backward step takes: device or host, whichever is slower. Between stages the host waits for the
        device in each exchange (Megatron synchronises after batched sends and receives), so every step begins with an empty queue."""
        device, host = (self._by_layers(kinds, chunk, f) for f in (field, f"host_{field}"))
        lag = 0.0
        if shape.layout.pp > 1 and not shape.async_p2p:
            lag = max(
                (getattr(kinds[kind].two, f"lag_{field}") for kind, n in chunk.layers if n), default=0.0
            )
        return max(device + lag, host)

    def _by_layers(self, kinds: Mapping[str, LayerCosts], chunk: Chunk, field: str) -> float:
        """What a step takes of the device alone (``forward``, ``backward``) or of the host (``host_forward``, …), linear in its layers.

        Forward starts with the embedding, backward with the loss: what comes before the first layer of a reduced job is
        the one, the rest around its layers the other."""
        total = sum(n * kinds[kind].layer(field) for kind, n in chunk.layers)
        around = next(iter(kinds.values()))
        whole, head = around.around(field), getattr(around.one, f"head_{field}")
        head = min(head, whole)
        embedding, loss = (head, whole - head) if field.endswith("forward") else (whole - head, head)
        return total + embedding * chunk.embedding + loss * chunk.loss

    def _chunk(self, kinds: Mapping[str, LayerCosts], chunk: Chunk, field: str, with_ends: bool) -> float:
        total = sum(n * kinds[kind].layer(field) for kind, n in chunk.layers)
        return total + (next(iter(kinds.values())).around(field) if with_ends else 0.0)

    def _sum(self, kinds: Mapping[str, LayerCosts], stage: tuple[Chunk, ...], field: str) -> float:
        ends = any(c.embedding or c.loss for c in stage)
        return sum(self._chunk(kinds, c, field, False) for c in stage) + (
            next(iter(kinds.values())).around(field) if ends or field == "rest" else 0.0
        )

    def _optimizer(self, shape: Shape, kinds: Mapping[str, LayerCosts], stage: tuple[Chunk, ...]) -> float:
        """The step takes as long as there are states: those of a rank."""
        layers = sum(self._chunk(kinds, c, "optimizer", False) for c in stage)
        return _sharded(shape, layers, self._sum(kinds, stage, "optimizer") - layers)

    def _transfer_ms(self, shape: Shape, pair: tuple[int, int]) -> float:
        comm = CommSignature(
            kind="send", group=0, dtype=shape.transfer_dtype, in_numel=shape.transfer_elements, peer=1
        )
        return self._costs.price_comm(comm, pair, pair[0]).duration_ns * 1e-6

    def _data_parallel(
        self, shape: Shape, kinds: Mapping[str, LayerCosts], stage: int, chunk: Chunk
    ) -> tuple[Buckets, Buckets]:
        """Gradient reduction and parameter gathering of a chunk: those of the dense layers, then those of experts."""
        layers, ends = self._state(shape, kinds, (chunk,), MemoryCategory.PARAMETERS)
        gradients = sum(self._state(shape, kinds, (chunk,), MemoryCategory.GRADIENTS))
        wide = gradients > 1.5 * (layers + ends)
        size = DTYPE_BYTES[shape.param_dtype]
        experts = layers * shape.expert_share
        parts = []
        for nbytes, expert in ((layers + ends - experts, False), (experts, True)):
            ranks = _data_ranks(shape, stage, expert=expert)
            if len(ranks) > 1 and nbytes:
                parts.append(self._communicated(shape, chunk, nbytes / size, ranks, wide=wide))
        return tuple(_together(side) for side in zip(*parts, strict=True)) if parts else (NOTHING, NOTHING)  # type: ignore[return-value]

    def _communicated(
        self, shape: Shape, chunk: Chunk, numel: float, ranks: tuple[int, ...], *, wide: bool
    ) -> tuple[Buckets, Buckets]:
        """The same of ``numel`` parameters in one group; ``wide``: gradients are float32."""
        buckets = max(1, round(numel / shape.bucket_elements)) if shape.overlap_grad and chunk.bucketed else 1
        dtype = "float32" if wide else shape.param_dtype
        size = int(numel // buckets)
        model = self._costs.interference

        def price(kind: str, dtype: str, whole_in: bool, whole_out: bool) -> Buckets:
            shard = size // len(ranks)
            comm = CommSignature(
                kind=kind,
                group=0,
                dtype=dtype,
                in_numel=size if whole_in else shard,
                out_numel=size if whole_out else shard,
            )
            one = self._costs.price_comm(comm, ranks, ranks[0])
            held = one.channels / model.num_sms if model is not None else 0.0
            return Buckets(one.duration_ns * 1e-6 * buckets, buckets, held)

        if not shape.sharded_optimizer:
            return price("all_reduce", dtype, True, True), NOTHING
        return price("reduce_scatter", dtype, True, False), price(
            "all_gather", shape.param_dtype, False, True
        )

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────

    def _state(
        self, shape: Shape, kinds: Mapping[str, LayerCosts], stage: tuple[Chunk, ...], category: str
    ) -> tuple[float, float]:
        """Bytes of the layers, and of embedding and output layer; not sharded."""
        around = next(iter(kinds.values())).around_state(str(category))
        ends = sum(c.embedding + c.loss for c in stage)
        if shape.tied_embedding:
            ends = min(ends, 1)
        else:
            around /= 2
        layers = sum(n * kinds[kind].layer_state(str(category)) for c in stage for kind, n in c.layers)
        return layers, around * ends

    def _memory(self, shape: Shape, kinds: Mapping[str, LayerCosts]) -> int:
        layout, around = shape.layout, next(iter(kinds.values()))
        peak = 0.0
        for s, stage in enumerate(shape.chunks):
            states = sum(self._state(shape, kinds, stage, MemoryCategory.PARAMETERS))
            states += sum(self._state(shape, kinds, stage, MemoryCategory.GRADIENTS))
            states += _sharded(shape, *self._state(shape, kinds, stage, MemoryCategory.OPTIMIZER_STATE))
            states += around.one.others
            saved = [sum(n * kinds[kind].layer("saved") for kind, n in c.layers) for c in stage]
            received = shape.transfer_elements * DTYPE_BYTES[shape.transfer_dtype] if layout.pp > 1 else 0
            loss = any(c.loss for c in stage)
            ends = around.around("saved") if loss else 0.0
            in_flight = in_flight_of(layout.pp, layout.vpp, s, layout.num_microbatches)
            held = in_flight * (sum(saved) / len(saved) + received) + ends * min(in_flight, 1)
            temporary = max(
                around.one.temporary if loss else 0,
                *(kinds[kind].one.temporary_layer for c in stage for kind, n in c.layers if n),
            )
            steps = states + held + temporary
            layers = sum(n for c in stage for _, n in c.layers)
            at_ends = around.around("temporary_optimizer") * any(c.embedding or c.loss for c in stage)
            optimizer = states + _sharded(shape, layers * around.layer("temporary_optimizer"), at_ends)
            peak = max(peak, steps, optimizer)
        return int(peak + sum(self._outside(shape, around).values()))

    def _outside(self, shape: Shape, costs: LayerCosts) -> dict[str, int]:
        """Context, libraries and communicators: those of the reduced job, with the layout's members."""
        layout = shape.layout
        here = dict.fromkeys(layout.sizes(), 0)
        data = _data_ranks(shape, 0, expert=False)
        model = tuple(
            sorted(
                layout.rank_of(here | {"tp": t, "pp": s}) for t in range(layout.tp) for s in range(layout.pp)
            )
        )
        everybody = tuple(range(layout.world_size))
        uses: list[CommunicatorUse] = []
        for use in costs.uses:
            ranks = use.ranks
            if use.name == WORLD_GROUP:
                ranks = everybody
            elif use.name.startswith("DATA_PARALLEL"):
                ranks = data
            elif use.name.startswith("EXPERT_DATA_PARALLEL"):
                ranks = _data_ranks(shape, 0, expert=True)
            elif use.name.startswith("MODEL_PARALLEL"):
                ranks = model
            uses.append(msgspec.structs.replace(use, ranks=ranks, nvls=use.name in costs.nvls))
        uses += [CommunicatorUse(ranks=everybody, name=name, collective=True) for name in shape.world_groups]
        if layout.pp > 1:
            neighbours = {layout.rank_of(here | {"pp": s}) for s in (1, layout.pp - 1)}
            near = sum(peer // self._overhead.gpus_per_domain == 0 for peer in neighbours)
            ring = tuple(layout.rank_of(here | {"pp": s}) for s in range(layout.pp))
            uses.append(
                CommunicatorUse(
                    ranks=ring,
                    name="pipeline",
                    collective=False,
                    near_peers=0 if shape.async_p2p else near,
                    far_peers=0 if shape.async_p2p else len(neighbours) - near,
                    pairs=len(neighbours) if shape.async_p2p else 0,
                )
            )
        return self._overhead.parts(uses, init_communicators=1)


def _with_full(shape: Shape, kinds: Mapping[str, LayerCosts]) -> Mapping[str, LayerCosts]:
    if not any(kind == FULL for stage in shape.chunks for c in stage for kind, _ in c.layers):
        return kinds
    received = shape.transfer_elements * DTYPE_BYTES[shape.transfer_dtype]
    return {**kinds, FULL: recomputed(next(iter(kinds.values())), received)}


def _data_ranks(shape: Shape, stage: int, *, expert: bool) -> tuple[int, ...]:
    """The data-parallel group of the first rank of a stage."""
    layout = shape.layout
    sizes = layout.sizes(expert=expert)
    here = dict.fromkeys(sizes, 0) | {"pp": stage}
    coords = ((d, c) for d in range(sizes["dp"]) for c in range(sizes["cp"]))
    return tuple(sorted(layout.rank_of(here | {"dp": d, "cp": c}, expert=expert) for d, c in coords))


def _sharded(shape: Shape, layers: float, ends: float) -> float:
    """What a rank has of optimizer states (or of anything that goes with them) of that size."""
    if not shape.sharded_optimizer:
        return layers + ends
    experts, layout = layers * shape.expert_share, shape.layout
    return (layers + ends - experts) / (layout.dp * layout.cp) + experts / layout.edp


def _together(parts: Sequence[Buckets]) -> Buckets:
    """One after the other: their groups share links."""
    return Buckets(sum(p.ms for p in parts), sum(p.number for p in parts), max(p.held for p in parts))


def in_flight_of(pp: int, vpp: int, stage: int, num_microbatches: int) -> int:
    """Forward steps (of one chunk) whose backward has not begun, at most."""
    if vpp == 1:
        return min(num_microbatches, pp - stage)
    return min(num_microbatches * vpp, (pp - stage - 1) * 2 + (vpp - 1) * pp + 1)
