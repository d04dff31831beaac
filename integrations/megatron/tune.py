"""The layout search's view of a Megatron job: knobs, Megatron's own validation, argv edits, and lower bounds."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prism_plugins.errors import PrismError
from prism_plugins.integration.knobs import divisors, narrowed, pairs, powers_of_2, verdicts, without
from prism_plugins.integration.tuning import (
    Arguments,
    Chunk,
    Knob,
    Limits,
    Point,
    Probe,
    Scouted,
    Shape,
    Value,
    Verdict,
)
from prism_plugins.integrations.megatron.model_sizes import ModelSizes
from prism_plugins.world.layout import Layout

LAYOUT_VALUES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--virtual-pipeline-model-parallel-size",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--micro-batch-size",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
)
"""Arguments with a value that points of the space set."""
LAYOUT_SWITCHES = (
    "--sequence-parallel",
    "--use-tp-pp-dp-mapping",
    "--recompute-activations",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
"""Those without."""
_NEEDED = ("--num-layers", "--global-batch-size", "--tensor-model-parallel-size")
_OPTIMIZERS = ("distributed+overlap", "distributed", "plain+overlap", "plain")
_ORDERS = {"dp-pp": "tp-cp-ep-dp-pp", "pp-dp": "tp-cp-ep-pp-dp"}
"""Rank order by its last two dimensions: Megatron's own, and that of ``--use-tp-pp-dp-mapping``."""
_OPTIMIZER_GROUP = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
"""Of all ranks; the distributed optimizer reduces the gradient norm in it."""
_SMALLEST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
"""Elements: ``DistributedDataParallelConfig.bucket_size`` is by default max(40 million, 1 million x dp)."""
_MAX_MICRO_BATCH = 16


class MegatronTuner:
    """See :class:`prism_plugins.integration.tuning.Tuner`."""

    def judge(self, parser: Any, commands: Sequence[Sequence[str]]) -> Iterator[Verdict]:
        """The script's parser, then ``megatron.training``'s ``validate_args`` where the script uses it."""
        if "megatron.core" not in sys.modules:
            return
        yield from verdicts(
            parser,
            commands,
            _validate,
            refusals=(AssertionError, ValueError, RuntimeError, TypeError, KeyError),
            where=" in Megatron's validation",
        )

    def space(
        self,
        argv: Sequence[str],
        arguments: Arguments,
        *,
        world_size: int,
        gpus_per_node: int,
        chosen: Mapping[str, tuple[str, ...]],
        directory: Path,
    ) -> MegatronSpace:
        """See the protocol."""
        return MegatronSpace(
            argv, arguments, world_size=world_size, gpus_per_node=gpus_per_node, chosen=chosen
        )


def _validate(arguments: Any, command: Sequence[str]) -> None:
    """Megatron-LM's own validation of parsed arguments, which it completes. Raises what the framework raises."""
    training = sys.modules.get("megatron.training.arguments")
    if training is not None and hasattr(arguments, "yaml_cfg"):
        arguments.rank = int(os.environ["RANK"])
        arguments.world_size = int(os.environ["WORLD_SIZE"])
        training.validate_args(arguments, {})


class _Work(NamedTuple):
    """Compared by FLOPs first."""

    flops: float = 0.0
    link: float = 0.0
    hbm: float = 0.0
    nic: float = 0.0

    def plus(self, other: _Work) -> _Work:
        return _Work(*(a + b for a, b in zip(self, other, strict=True)))


class MegatronSpace:
    """The layouts of one Megatron launch. See :class:`prism_plugins.integration.tuning.Space`."""

    scout = None
    """Its bounds follow from the arguments."""

    def __init__(
        self,
        argv: Sequence[str],
        arguments: Arguments,
        *,
        world_size: int,
        gpus_per_node: int,
        chosen: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._argv = tuple(argv)
        self._args = arguments
        self._world = world_size
        self._gpus_per_node = gpus_per_node
        self._flags = set(arguments.get("prism_flags", ()))
        self._check_script()
        self._model = ModelSizes(arguments)
        self._gbs = int(arguments["global_batch_size"])
        self._tied = not arguments.get("untie_embeddings_and_output_weights", True)
        own = self._own()
        self.knobs = tuple(narrowed(knob, chosen) for knob in self._all_knobs(own, gpus_per_node))
        if unknown := set(chosen) - {knob.name for knob in self.knobs}:
            raise PrismError(
                f"there is no knob {', '.join(sorted(unknown))}; knobs: {', '.join(k.name for k in self.knobs)}"
            )
        self.own = Point(tuple(own[knob.name] for knob in self.knobs))
        most = {
            knob.name: math.lcm(*(int(v) for v in (*knob.values, knob.own)))
            for knob in self.knobs
            if knob.name in ("tp", "cp", "ep", "etp")
        }
        self.probe_world = math.lcm(most["tp"] * most["cp"] * most["ep"], most["ep"] * most["etp"])
        self.tokens_per_iteration = self._gbs * self._model.seq
        lines = [
            "composed layouts: a rank of each stage is put together from reduced slices (1 and 2 layers, no pipeline); "
            "full recomputation is the forward once more"
        ]
        if self._model.experts and arguments.get("moe_layer_freq", 1) not in (None, 1):
            lines.append(
                "composed layouts: all layers are taken as alike, though only some of them have experts"
            )
        if any(k.name == "cp" and k.values == (1,) for k in self.knobs) and not arguments.get(
            "multi_latent_attention"
        ):
            lines.append("context parallelism was not searched: --transformer-impl local has none")
        self.assumptions = tuple(lines)

    # ── the space ────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, scouted: Scouted) -> None:
        """There is no scout."""

    def points(self) -> Iterator[tuple[Point, str]]:
        """Every combination; the reason is structural. Megatron's own validation comes after it."""
        for values in itertools.product(*(knob.values for knob in self.knobs)):
            point = Point(values)
            yield point, self._why_not(self._named(point))

    def _named(self, point: Point) -> dict[str, Any]:
        return dict(zip((knob.name for knob in self.knobs), point.values, strict=True))

    def _why_not(self, p: dict[str, Any]) -> str:
        model, size = self._model, p["tp"] * p["pp"] * p["cp"]
        if self._world % size:
            return f"tp x cp x pp = {size} does not divide the {self._world} GPUs"
        dp = self._world // size
        if p["tp"] > 1 and (model.heads % p["tp"] or model.groups % p["tp"]):
            return f"{model.heads} heads in {model.groups} groups cannot be split over tp {p['tp']}"
        if self._gbs % (p["micro_batch"] * dp):
            return f"global batch {self._gbs} is not a multiple of micro-batch {p['micro_batch']} x dp {dp}"
        if model.experts and p["tp"] > 1 and not p["sp"]:
            return "experts with tensor parallelism need sequence parallelism in training"
        if p["sp"] and p["tp"] == 1:
            return "sequence parallelism needs tensor parallelism"
        if model.seq % (p["tp"] * p["cp"] * 2 if p["cp"] > 1 else p["tp"]) and p["sp"]:
            return f"sequence {model.seq} cannot be split over tp {p['tp']} x cp {p['cp']}"
        if model.experts and (model.experts % p["ep"] or (dp * p["cp"] * p["tp"]) % (p["ep"] * p["etp"])):
            return f"{model.experts} experts cannot be spread over ep {p['ep']} x etp {p['etp']}"
        if model.experts and p["etp"] != p["tp"] and "--expert-tensor-parallel-size" not in self._flags:
            return "the script has no --expert-tensor-parallel-size: that of experts follows tp"
        if p["etp"] > 1 and model.ffn % p["etp"]:
            return f"the {model.ffn} channels of an expert cannot be split over etp {p['etp']}"
        if p["order"] != self._own_order() and (
            p["pp"] == 1 or dp == 1 or size // p["pp"] >= self._gpus_per_node
        ):
            return "the same as the other rank order: it changes nothing that nodes share"
        if p["pp"] == 1 and p["vpp"] > 1:
            return "virtual stages need a pipeline"
        stages = self._layers_of_stages(p)
        if stages is None:
            return f"{model.layers} layers cannot be laid over pp {p['pp']} ({p['stages']} stages)"
        if p["vpp"] > 1:
            if p["stages"] != "even" or stages[0] % p["vpp"]:
                return f"{stages[0]} layers of a stage cannot be cut into {p['vpp']} chunks"
            m = self._gbs // (p["micro_batch"] * dp)
            if m % p["pp"]:
                return f"{m} micro-batches are no multiple of pp {p['pp']}, as virtual stages need"
        part = _part(p["recompute"])
        if part and round(part * (stages[0] // p["vpp"])) in (0, stages[0] // p["vpp"]):
            return "the same as another number of recomputed layers"
        if part and p["stages"] != "even":
            return "a part of the layers is recomputed only where stages are even"
        return ""

    def _own_order(self) -> str:
        return "pp-dp" if self._args.get("use_tp_pp_dp_mapping") else "dp-pp"

    def _layers_of_stages(self, p: Mapping[str, Any]) -> list[int] | None:
        layers, pp = self._model.layers, p["pp"]
        if p["stages"] == "even":
            return None if layers % pp else [layers // pp] * pp
        if pp < 3 or layers % pp == 0:
            return None
        middle = math.ceil(layers / pp)
        ends = layers - middle * (pp - 2)
        if ends < 2 or (ends + 1) // 2 > middle:
            return None
        return [ends - ends // 2, *[middle] * (pp - 2), ends // 2]

    def _own(self) -> dict[str, Value]:
        """The launch's own choices."""
        args = self._args
        recompute = args.get("recompute_granularity") or "none"
        if recompute == "full" and args.get("recompute_method") == "block":
            recompute = (
                "none"  # Its number of layers is no point of the space; the own launch is emulated as it is.
            )
        overlap = "+overlap" if args.get("overlap_grad_reduce") else ""
        pp = int(args.get("pipeline_model_parallel_size") or 1)
        return {
            "tp": int(args.get("tensor_model_parallel_size") or 1),
            "sp": bool(args.get("sequence_parallel")),
            "cp": int(args.get("context_parallel_size") or 1),
            "ep": int(args.get("expert_model_parallel_size") or 1),
            "etp": self._own_etp(),
            "pp": pp,
            "vpp": int(args.get("virtual_pipeline_model_parallel_size") or 1),
            "stages": "even" if self._model.layers % pp == 0 else "uneven",
            "micro_batch": int(args["micro_batch_size"]),
            "recompute": recompute,
            "optimizer": ("distributed" if args.get("use_distributed_optimizer") else "plain") + overlap,
            "order": self._own_order(),
        }

    def _own_etp(self) -> int:
        if not self._model.experts:
            return 1
        return int(
            self._args.get("expert_tensor_parallel_size") or self._args.get("tensor_model_parallel_size") or 1
        )

    def _all_knobs(self, own: dict[str, Value], gpus_per_node: int) -> Iterator[Knob]:
        model = self._model
        tp = [n for n in powers_of_2(min(gpus_per_node, model.heads)) if self._world % n == 0]
        pp = [n for n in divisors(self._world) if n <= model.layers]
        local = self._args.get("transformer_impl") == "local"
        cp = (
            [1]
            if local or "--context-parallel-size" not in self._flags
            else powers_of_2(min(16, self._world))
        )
        ep = [n for n in divisors(model.experts)] if model.experts else [1]
        etp = tp if model.experts else [1]
        orders: list[Value] = [own["order"]]
        if "--use-tp-pp-dp-mapping" in self._flags:
            orders = list(_ORDERS)
        most = max(1, self._gbs // max(1, self._world // (max(tp) * max(pp) * max(cp))))
        batches = powers_of_2(min(_MAX_MICRO_BATCH, most))
        vpp = [1]
        if self._flags & {
            "--num-layers-per-virtual-pipeline-stage",
            "--virtual-pipeline-model-parallel-size",
        }:
            vpp = [n for n in divisors(model.layers) if n <= model.layers // 2]
        recompute: list[Value] = ["none"]
        if "--recompute-granularity" in self._flags:
            recompute = ["none", "selective", "full/4", "full/2", "full"]
        optimizers: list[Value] = [own["optimizer"]]
        if "--overlap-grad-reduce" in self._flags:
            optimizers = list(_OPTIMIZERS)
        elif "--use-distributed-optimizer" in self._flags:
            optimizers = ["distributed", "plain"]
        uneven = ["even", "uneven"] if "--decoder-first-pipeline-num-layers" in self._flags else ["even"]
        sp: list[Value] = [True, False] if "--sequence-parallel" in self._flags else [own["sp"]]
        for name, values, text in (
            ("tp", tp, "tensor-parallel size"),
            ("cp", cp, "context-parallel size"),
            ("ep", ep, "expert-parallel size"),
            ("etp", etp, "tensor-parallel size of experts"),
            ("pp", pp, "pipeline stages"),
            ("vpp", vpp, "model chunks a stage"),
            ("stages", uneven, "layers over stages: even, or fewer on the first and last one"),
            ("micro_batch", batches, "micro-batch size"),
            ("sp", sp, "sequence parallelism"),
            ("recompute", recompute, "none, selective, full, or full of a part of the layers"),
            ("optimizer", optimizers, "distributed or plain, with or without overlapped communication"),
            (
                "order",
                orders,
                "which ranks are neighbours, past tp, cp and ep: data-parallel ones or pipeline stages",
            ),
        ):
            yield Knob(name=name, values=tuple(dict.fromkeys([*values, own[name]])), own=own[name], help=text)

    # ── command lines ────────────────────────────────────────────────────────────────────────────────────────

    def command(self, point: Point) -> tuple[str, ...]:
        """The launch's argv with the point's flags in place of its own."""
        if point == self.own:
            return self._argv
        return (*without(self._argv, LAYOUT_VALUES, LAYOUT_SWITCHES), *self._flags_of(self._named(point)))

    def with_sequence(self, length: int) -> tuple[str, ...]:
        """argv with ``--seq-length``, and ``--max-position-embeddings`` where the launch gives it."""
        flags = [f for f in ("--seq-length", "--max-position-embeddings") if f in self._flags]
        given = pairs(self._argv, flags, ())
        words = [word for flag in flags if flag in given for word in (flag, str(length))]
        return (*without(self._argv, flags, ()), *words)

    def changes(self, point: Point) -> tuple[str, ...]:
        """Flags that the point adds or changes, then ``(drop --flag)`` for those to take out."""
        if point == self.own:
            return ()
        before = pairs(self._argv, LAYOUT_VALUES, LAYOUT_SWITCHES)
        after = pairs(self.command(point), LAYOUT_VALUES, LAYOUT_SWITCHES)
        added = [f"{flag} {value}".strip() for flag, value in after.items() if before.get(flag) != value]
        return (*added, *(f"(drop {flag})" for flag in before if flag not in after))

    def _flags_of(self, p: Mapping[str, Any]) -> list[str]:
        stages = self._layers_of_stages(p)
        flags = {
            "--tensor-model-parallel-size": p["tp"],
            "--pipeline-model-parallel-size": p["pp"],
            "--micro-batch-size": p["micro_batch"],
        }
        if p["cp"] > 1:
            flags["--context-parallel-size"] = p["cp"]
        if p["ep"] > 1:
            flags["--expert-model-parallel-size"] = p["ep"]
        if self._model.experts and "--expert-tensor-parallel-size" in self._flags:
            flags["--expert-tensor-parallel-size"] = p["etp"]
        if p["vpp"] > 1 and stages is not None:
            if "--num-layers-per-virtual-pipeline-stage" in self._flags:
                flags["--num-layers-per-virtual-pipeline-stage"] = stages[0] // p["vpp"]
            else:
                flags["--virtual-pipeline-model-parallel-size"] = p["vpp"]
        if p["stages"] == "uneven" and stages is not None:
            flags["--decoder-first-pipeline-num-layers"] = stages[0]
            flags["--decoder-last-pipeline-num-layers"] = stages[-1]
        part = _part(p["recompute"])
        if p["recompute"] == "selective":
            flags["--recompute-granularity"] = "selective"
        elif p["recompute"] == "full":
            flags |= {
                "--recompute-granularity": "full",
                "--recompute-method": "uniform",
                "--recompute-num-layers": 1,
            }
        elif part and stages is not None:
            layers = round(part * (stages[0] // p["vpp"]))
            flags |= {
                "--recompute-granularity": "full",
                "--recompute-method": "block",
                "--recompute-num-layers": layers,
            }
        words = [word for flag, value in flags.items() for word in (flag, str(value))]
        if p["sp"] and "--sequence-parallel" in self._flags:
            words.append("--sequence-parallel")
        if p["order"] == "pp-dp":
            words.append("--use-tp-pp-dp-mapping")
        kind, _, overlap = str(p["optimizer"]).partition("+")
        if kind == "distributed":
            words.append("--use-distributed-optimizer")
        if overlap:
            words.append("--overlap-grad-reduce")
            if kind == "distributed":
                words.append("--overlap-param-gather")
        return words

    # ── composition ──────────────────────────────────────────────────────────────────────────────────────────

    def probes(self, point: Point) -> tuple[Probe, ...]:
        """One and two plain layers; two with selective recomputation where the point has it."""
        p = self._named(point)
        words = without(self._argv, (*LAYOUT_VALUES, "--num-layers", "--global-batch-size"), LAYOUT_SWITCHES)
        dp = self.probe_world // (p["tp"] * p["cp"])
        wanted = [("none", 1), ("none", 2)]
        if p["recompute"] == "selective":
            wanted.append(("selective", 2))
        probes = []
        for kind, layers in wanted:
            reduced = {
                **p,
                "pp": 1,
                "vpp": 1,
                "stages": "even",
                "recompute": kind,
                "optimizer": "plain",
                "order": "dp-pp",
            }
            command = (
                *words, *self._flags_of(reduced), "--global-batch-size", str(2 * dp * p["micro_batch"]),
            )  # fmt: skip
            probes.append(
                Probe(
                    kind=kind,
                    command=(*command, "--num-layers", str(layers)),
                    size=layers,
                    key=(kind, *command),
                )
            )
        return tuple(probes)

    def shape(self, point: Point) -> Shape:
        """The point for the composition."""
        p = self._named(point)
        stages = self._layers_of_stages(p)
        assert stages is not None
        dp = self._world // (p["tp"] * p["pp"] * p["cp"])
        part = _part(p["recompute"])

        def kinds(layers: int) -> tuple[tuple[str, int], ...]:
            if not part:
                return ((p["recompute"], layers),)
            full = round(part * layers)
            return (("full", full), ("none", layers - full))

        chunks = tuple(
            tuple(
                Chunk(
                    layers=kinds(layers // p["vpp"]),
                    embedding=stage == 0 and chunk == 0,
                    loss=stage == p["pp"] - 1 and chunk == p["vpp"] - 1,
                    # DistributedDataParallel: not on later stages; get_model: not for later chunks.
                    bucketed=stage == chunk == 0,
                )
                for chunk in range(p["vpp"])
            )
            for stage, layers in enumerate(stages)
        )
        model = self._model
        kind, _, overlap = str(p["optimizer"]).partition("+")
        told = "--overlap-grad-reduce" in self._flags
        bucket = self._args.get("ddp_bucket_size") or max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * dp * p["cp"])
        return Shape(
            layout=Layout(
                world_size=self._world,
                tp=p["tp"],
                cp=p["cp"],
                pp=p["pp"],
                dp=dp,
                ep=p["ep"],
                etp=p["etp"] if model.experts else p["tp"],
                order=_ORDERS[p["order"]],
                vpp=p["vpp"],
                num_microbatches=self._gbs // (p["micro_batch"] * dp),
            ),
            chunks=chunks,
            transfer_elements=model.seq
            * p["micro_batch"]
            * model.hidden
            // p["cp"]
            // (p["tp"] if p["sp"] else 1),
            transfer_dtype=model.dtype,
            sharded_optimizer=kind == "distributed",
            world_groups=(_OPTIMIZER_GROUP,) if kind == "distributed" else (),
            overlap_grad=bool(overlap) if told else None,
            overlap_param=bool(overlap) and kind == "distributed" if told else None,
            expert_share=self._expert_share(p),
            bucket_elements=int(bucket),
            param_dtype=model.dtype,
            tied_embedding=self._tied,
            async_p2p=p["vpp"] > 1 and self._args.get("overlap_p2p_comm") is not False,
        )

    # ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────

    def limits(self, point: Point) -> Limits:
        """See docs/tuning.md for the formulas."""
        p, model = self._named(point), self._model
        shape = self.shape(point)
        layout, m = shape.layout, shape.layout.num_microbatches
        per_layer = {
            kind: model.layer_flops(p["micro_batch"], recomputed=kind == "full") / (p["tp"] * p["cp"])
            for kind in ("none", "selective", "full")
        }
        loss = model.loss_flops(p["micro_batch"]) / (p["tp"] * p["cp"])

        split = (p["tp"] - 1) / p["tp"] if not self._args.get("tp_comm_overlap") else 0.0
        moved = {
            kind: split
            * model.layer_traffic(p["micro_batch"], sp=bool(p["sp"]), recomputed=kind == "full")
            / p["cp"]
            for kind in per_layer
        }
        softmax = {
            kind: model.softmax_bytes(p["micro_batch"], p["tp"], p["cp"], kind=kind) for kind in per_layer
        }

        def work_of(chunk: Chunk) -> _Work:
            return _Work(
                flops=sum(per_layer[kind] * n for kind, n in chunk.layers) + (loss if chunk.loss else 0.0),
                link=sum(moved[kind] * n for kind, n in chunk.layers),
                hbm=sum(softmax[kind] * n for kind, n in chunk.layers),
            )

        before, critical = _Work(), _Work()
        for stage in shape.chunks:
            work = [work_of(chunk) for chunk in stage]
            here = [sum(parts) for parts in zip(*work, strict=True)]
            total = _Work(*(b + m * w for b, w in zip(before, here, strict=True)))
            critical = max(critical, total.plus(self._after(p, shape, stage)))
            before = before.plus(work[0])
        memory = 0.0
        for s, stage in enumerate(shape.chunks):
            states = 0.0
            data = (layout.dp * layout.cp, layout.edp)
            for params, ranks in zip(self._params_of(p, stage), data, strict=True):
                shards = ranks if shape.sharded_optimizer else 1
                states += params * (model.param_bytes + model.grad_bytes + model.optimizer_bytes / shards)
            in_flight = min(
                m * p["vpp"], (p["pp"] - s) + (p["vpp"] - 1) * p["pp"] if p["vpp"] > 1 else p["pp"] - s
            )
            kept = sum(
                n * model.kept_bytes(p["micro_batch"], p["tp"], p["cp"], bool(p["sp"]), kind=kind)
                for kind, n in stage[0].layers
            )
            memory = max(memory, states + in_flight * kept)
        return Limits(
            memory_bytes=memory,
            flops=critical.flops,
            link_bytes=critical.link,
            nic_bytes=critical.nic,
            hbm_bytes=critical.hbm,
            dtype=model.dtype,
        )

    def _expert_share(self, p: Mapping[str, Any]) -> float:
        total = self._model.layer_params(p["tp"], p["ep"], p["etp"])
        return self._model.expert_params(p["ep"], p["etp"]) / total if self._model.experts else 0.0

    def _params_of(self, p: Mapping[str, Any], stage: tuple[Chunk, ...]) -> tuple[float, float]:
        """Parameters of a rank of a stage: of dense layers, and of experts."""
        model, layers = self._model, sum(n for c in stage for _, n in c.layers)
        ends = sum(c.embedding + c.loss for c in stage)
        experts = layers * model.expert_params(p["ep"], p["etp"])
        params = layers * model.layer_params(p["tp"], p["ep"], p["etp"]) - experts
        return params + model.embedding_params(p["tp"]) * (min(ends, 1) if self._tied else ends), experts

    def _after(self, p: Mapping[str, Any], shape: Shape, stage: tuple[Chunk, ...]) -> _Work:
        """What a stage has to do when its last micro-batch is done: data-parallel communication that nothing overlaps, and the
        optimizer. Experts have data-parallel groups of their own; nothing is counted for them."""
        model, layout = self._model, shape.layout
        if model.experts:
            return _Work()
        params, members = self._params_of(p, stage)[0], layout.dp * layout.cp
        kind, _, overlap = str(p["optimizer"]).partition("+")
        nbytes = 0.0
        if not overlap and "--overlap-grad-reduce" in self._flags:
            nbytes = params * (model.grad_bytes + (model.param_bytes if kind == "distributed" else 0))
        near = max(1, min(members, self._gpus_per_node // p["tp"]))
        nodes = math.ceil(members / near)
        optimizer = model.optimizer_traffic(params, members if shape.sharded_optimizer else 1)
        if nodes == 1:
            return _Work(link=nbytes * (members - 1) / members, hbm=optimizer)
        return _Work(nic=nbytes * (nodes - 1) / nodes / near, hbm=optimizer)

    def _check_script(self) -> None:
        missing = [flag for flag in _NEEDED if flag not in self._flags]
        if missing:
            raise PrismError(
                f"the script has no {', '.join(missing)}; prism tune changes layouts by Megatron's arguments"
            )
        args = self._args
        for name, flag in (
            ("rampup_batch_size", "--rampup-batch-size"),
            ("pipeline_model_parallel_layout", "--pipeline-model-parallel-layout"),
            ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path"),
            ("hybrid_override_pattern", "--hybrid-override-pattern"),
            ("mtp_num_layers", "--mtp-num-layers"),
        ):
            if args.get(name):
                raise PrismError(f"prism tune cannot vary the layout of a job with {flag} yet; take it out")
        if not args.get("global_batch_size"):
            raise PrismError("give --global-batch-size: the search keeps it, whatever the layout")


def _part(recompute: Value) -> float:
    """``full/4``: 0.25; 0 for none, selective and full."""
    kind, _, part = str(recompute).partition("/")
    return 1 / int(part) if kind == "full" and part else 0.0
