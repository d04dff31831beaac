"""The layout search's view of a Megatron job: Megatron's own validation, the points of the space, their probes and shapes."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prism_plugins.integration.knobs import narrowed_all, pairs, verdicts, without
from prism_plugins.integration.tuning import (
    FULL,
    Chunk,
    Launch,
    Limits,
    Point,
    Probe,
    Scouted,
    Shape,
    Verdict,
)
from prism_plugins.integrations.megatron.tune_bounds import expert_share, limits
from prism_plugins.integrations.megatron.tune_knobs import (
    LAYOUT_SWITCHES,
    LAYOUT_VALUES,
    ORDERS,
    MegatronLaunch,
    full_layers,
    is_partial,
)
from prism_plugins.world.layout import Layout

_OPTIMIZER_GROUP = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
"""Of all ranks; the distributed optimizer reduces the gradient norm in it."""
_SMALLEST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
"""Elements: ``DistributedDataParallelConfig.bucket_size`` is by default max(40 million, 1 million x dp)."""
_DISTRIBUTED_ONLY = ("fp8_param_gather", "fp4_param", "use_precision_aware_optimizer")
"""Arguments that Megatron takes with the distributed optimizer only: probes have it, too."""
_SEQUENCE_FLAGS = ("--seq-length", "--max-position-embeddings")


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

    def space(self, launch: Launch) -> MegatronSpace:
        """See the protocol."""
        return MegatronSpace(launch)


def _validate(arguments: Any, command: Sequence[str]) -> None:
    """Megatron-LM's own validation of parsed arguments, which it completes. Raises what the framework raises."""
    training = sys.modules.get("megatron.training.arguments")
    if training is not None and hasattr(arguments, "yaml_cfg"):
        arguments.rank = int(os.environ["RANK"])
        arguments.world_size = int(os.environ["WORLD_SIZE"])
        training.validate_args(arguments, {})


class MegatronSpace:
    """The layouts of one Megatron launch. See :class:`prism_plugins.integration.tuning.Space`."""

    scout = None
    """Its bounds follow from the arguments."""

    def __init__(self, launch: Launch) -> None:
        self._launch = MegatronLaunch(launch)
        self._model = self._launch.model
        self._world = self._launch.world
        self.knobs = narrowed_all(self._launch.knobs(), launch.chosen)
        self.own = Point(tuple(knob.own for knob in self.knobs))
        most = {
            knob.name: math.lcm(*(int(v) for v in (*knob.values, knob.own)))
            for knob in self.knobs
            if knob.name in ("tp", "cp", "ep", "etp")
        }
        self.probe_world = math.lcm(most["tp"] * most["cp"] * most["ep"], most["ep"] * most["etp"])
        self.tokens_per_iteration = self._launch.global_batch * self._model.seq
        self.assumptions = tuple(self._assumed())

    def _assumed(self) -> Iterator[str]:
        yield (
            "composed layouts: a rank of each stage is put together from reduced slices (1 and 2 layers, no pipeline); full "
            "recomputation is the forward once more"
        )
        args = self._launch.args
        if self._model.experts and args.get("moe_layer_freq", 1) not in (None, 1):
            yield "composed layouts: all layers are taken as alike, though only some of them have experts"
        if any(k.name == "cp" and k.values == (1,) for k in self.knobs) and not args.get(
            "multi_latent_attention"
        ):
            yield "context parallelism was not searched: --transformer-impl local has none"

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
        model, size, batch = self._model, p["tp"] * p["pp"] * p["cp"], self._launch.global_batch
        if self._world % size:
            return f"tp x cp x pp = {size} does not divide the {self._world} GPUs"
        dp = self._world // size
        if p["tp"] > 1 and (model.heads % p["tp"] or model.groups % p["tp"]):
            return f"{model.heads} heads in {model.groups} groups cannot be split over tp {p['tp']}"
        if batch % (p["micro_batch"] * dp):
            return f"global batch {batch} is not a multiple of micro-batch {p['micro_batch']} x dp {dp}"
        if p["sp"] and p["tp"] == 1:
            return "sequence parallelism needs tensor parallelism"
        if model.seq % (p["tp"] * p["cp"] * 2 if p["cp"] > 1 else p["tp"]) and p["sp"]:
            return f"sequence {model.seq} cannot be split over tp {p['tp']} x cp {p['cp']}"
        if p["order"] != self._launch.own["order"] and (
            p["pp"] == 1 or dp == 1 or p["tp"] * p["cp"] >= self._launch.gpus_per_node
        ):
            return "the same as the other rank order: it changes nothing that nodes share"
        # Megatron makes groups of experts in any case.
        of_experts = p["ep"] * p["etp"] if model.experts else p["tp"]
        if p["order"] == "pp-dp" and p["pp"] > 1 and of_experts != p["tp"] * p["cp"]:
            return "--use-tp-pp-dp-mapping: Megatron wants dp of attention and of experts to be equal (tp x cp = ep x etp)"
        return (self._why_no_experts(p, dp) if model.experts else "") or self._why_no_stages(p, dp)

    def _why_no_experts(self, p: dict[str, Any], dp: int) -> str:
        model = self._model
        if p["tp"] > 1 and not p["sp"]:
            return "experts with tensor parallelism need sequence parallelism in training"
        if model.experts % p["ep"] or (dp * p["cp"] * p["tp"]) % (p["ep"] * p["etp"]):
            return f"{model.experts} experts cannot be spread over ep {p['ep']} x etp {p['etp']}"
        if p["etp"] != p["tp"] and "--expert-tensor-parallel-size" not in self._launch.flags:
            return "the script has no --expert-tensor-parallel-size: that of experts follows tp"
        if model.ffn % p["etp"]:
            return f"the {model.ffn} channels of an expert cannot be split over etp {p['etp']}"
        return ""

    def _why_no_stages(self, p: dict[str, Any], dp: int) -> str:
        if p["pp"] == 1 and p["vpp"] > 1:
            return "virtual stages need a pipeline"
        stages = self._launch.layers_of_stages(p)
        if stages is None:
            return f"{self._model.layers} layers cannot be laid over pp {p['pp']} ({p['stages']} stages)"
        if p["vpp"] > 1:
            if p["stages"] != "even" or stages[0] % p["vpp"]:
                return f"{stages[0]} layers of a stage cannot be cut into {p['vpp']} chunks"
            m = self._launch.global_batch // (p["micro_batch"] * dp)
            if m % p["pp"]:
                return f"{m} micro-batches are no multiple of pp {p['pp']}, as virtual stages need"
        if is_partial(p["recompute"]):
            layers = stages[0] // p["vpp"]
            if p["recompute"] != self._launch.own["recompute"] and (
                full_layers(p["recompute"], layers) in (0, layers)
            ):
                return "the same as another number of recomputed layers"
            if p["stages"] != "even":
                return "a part of the layers is recomputed only where stages are even"
        return ""

    # ── command lines ────────────────────────────────────────────────────────────────────────────────────────

    def command(self, point: Point) -> tuple[str, ...]:
        """The launch's argv with the point's flags in place of its own."""
        argv = self._launch.argv
        if point == self.own:
            return argv
        words = without(argv, LAYOUT_VALUES, LAYOUT_SWITCHES)
        return (*words, *self._launch.flags_of(self._named(point)))

    def with_sequence(self, length: int) -> tuple[str, ...]:
        """argv with ``--seq-length``, and ``--max-position-embeddings`` where the launch gives it."""
        flags = [f for f in _SEQUENCE_FLAGS if f in self._launch.flags]
        given = pairs(self._launch.argv, flags, ())
        words = [word for flag in flags if flag in given for word in (flag, str(length))]
        return (*without(self._launch.argv, flags, ()), *words)

    def changes(self, point: Point) -> tuple[str, ...]:
        """Flags that the point adds or changes, then ``(drop --flag)`` for those to take out."""
        if point == self.own:
            return ()
        before = pairs(self._launch.argv, LAYOUT_VALUES, LAYOUT_SWITCHES)
        after = pairs(self.command(point), LAYOUT_VALUES, LAYOUT_SWITCHES)
        added = [f"{flag} {value}".strip() for flag, value in after.items() if before.get(flag) != value]
        return (*added, *(f"(drop {flag})" for flag in before if flag not in after))

    # ── composition ──────────────────────────────────────────────────────────────────────────────────────────

    def probes(self, point: Point) -> tuple[Probe, ...]:
        """One and two plain layers; two with selective recomputation where the point has it."""
        p = self._named(point)
        words = without(
            self._launch.argv, (*LAYOUT_VALUES, "--num-layers", "--global-batch-size"), LAYOUT_SWITCHES
        )
        batch = str(2 * p["micro_batch"] * self.probe_world // (p["tp"] * p["cp"]))
        sharded = any(self._launch.args.get(name) for name in _DISTRIBUTED_ONLY)
        optimizer = "distributed" if sharded else "plain"
        plain = {"pp": 1, "vpp": 1, "stages": "even", "optimizer": optimizer, "order": "dp-pp"}
        wanted = [("none", 1), ("none", 2)]
        if p["recompute"] == "selective":
            wanted.append(("selective", 2))
        probes = []
        for kind, layers in wanted:
            flags = self._launch.flags_of({**p, **plain, "recompute": kind})
            command = (*words, *flags, "--global-batch-size", batch)
            probes.append(
                Probe(
                    kind=kind,
                    command=(*command, "--num-layers", str(layers)),
                    size=layers,
                    key=(kind, *command),
                    sharded=sharded,
                )
            )
        return tuple(probes)

    def shape(self, point: Point) -> Shape:
        """The point for the composition."""
        p, model, launch = self._named(point), self._model, self._launch
        dp = self._world // (p["tp"] * p["pp"] * p["cp"])
        kind, _, overlap = str(p["optimizer"]).partition("+")
        told = "--overlap-grad-reduce" in launch.flags
        bucket = launch.args.get("ddp_bucket_size") or max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * dp * p["cp"])
        activation = model.seq * p["micro_batch"] * model.hidden
        return Shape(
            layout=Layout(
                world_size=self._world,
                tp=p["tp"],
                cp=p["cp"],
                pp=p["pp"],
                dp=dp,
                ep=p["ep"],
                etp=p["etp"] if model.experts else p["tp"],
                order=ORDERS[p["order"]],
                vpp=p["vpp"],
                num_microbatches=launch.global_batch // (p["micro_batch"] * dp),
            ),
            chunks=self._chunks(p),
            transfer_elements=activation // p["cp"] // (p["tp"] if p["sp"] else 1),
            transfer_dtype=model.dtype,
            sharded_optimizer=kind == "distributed",
            world_groups=(_OPTIMIZER_GROUP,) if kind == "distributed" else (),
            overlap_grad=bool(overlap) if told else None,
            overlap_param=bool(overlap) and kind == "distributed" if told else None,
            expert_share=expert_share(launch, p),
            bucket_elements=int(bucket),
            param_dtype=model.dtype,
            tied_embedding=launch.tied,
            async_p2p=p["vpp"] > 1 and launch.overlaps_transfers,
        )

    def _chunks(self, p: Mapping[str, Any]) -> tuple[tuple[Chunk, ...], ...]:
        stages = self._launch.layers_of_stages(p)
        assert stages is not None

        def layers_of(layers: int) -> tuple[tuple[str, int], ...]:
            if not is_partial(p["recompute"]):
                return ((p["recompute"], layers),)
            full = full_layers(p["recompute"], layers)
            return ((FULL, full), ("none", layers - full))

        return tuple(
            tuple(
                Chunk(
                    layers=layers_of(layers // p["vpp"]),
                    embedding=stage == 0 and chunk == 0,
                    loss=stage == p["pp"] - 1 and chunk == p["vpp"] - 1,
                    # DistributedDataParallel: not on later stages; get_model: not for later chunks.
                    bucketed=stage == chunk == 0,
                )
                for chunk in range(p["vpp"])
            )
            for stage, layers in enumerate(stages)
        )

    def limits(self, point: Point) -> Limits:
        """See docs/tuning.md for the formulas."""
        return limits(self._launch, self._named(point), self.shape(point))
