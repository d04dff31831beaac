"""What a layout search may change of a Megatron launch: its knobs, and the arguments that say them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration.knobs import divisors, powers_of_2
from prism_plugins.integration.tuning import Knob, Launch, Value
from prism_plugins.integrations.megatron.model_sizes import ModelSizes

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
ORDERS = {"dp-pp": "tp-cp-ep-dp-pp", "pp-dp": "tp-cp-ep-pp-dp"}
"""Rank order by its last two dimensions: Megatron's own, and that of ``--use-tp-pp-dp-mapping``."""
_NEEDED = ("--num-layers", "--global-batch-size", "--tensor-model-parallel-size")
_REFUSED = (
    ("rampup_batch_size", "--rampup-batch-size"),
    ("pipeline_model_parallel_layout", "--pipeline-model-parallel-layout"),
    ("account_for_embedding_in_pipeline_split", "--account-for-embedding-in-pipeline-split"),
    ("account_for_loss_in_pipeline_split", "--account-for-loss-in-pipeline-split"),
    ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path"),
    ("hybrid_override_pattern", "--hybrid-override-pattern"),
    ("mtp_num_layers", "--mtp-num-layers"),
)
_OPTIMIZERS = ("distributed+overlap", "distributed", "plain+overlap", "plain")
_MAX_MICRO_BATCH = 16


class MegatronLaunch:
    """A launch as the search of its layouts sees it."""

    def __init__(self, launch: Launch) -> None:
        """Raises :class:`PrismError` for a script or a job whose layout cannot be changed by arguments."""
        self.argv = launch.argv
        self.args = launch.arguments
        self.world = launch.world_size
        self.gpus_per_node = launch.gpus_per_node
        self.flags = set(self.args.get("prism_flags", ()))
        """Those that the script takes."""
        self.overlaps_transfers = "--no-overlap-p2p-communication" not in self.argv
        """Between virtual stages. Megatron's argument says False for every launch that has none, so it does not tell."""
        self._check()
        self.model = ModelSizes(self.args)
        self.global_batch = int(self.args["global_batch_size"])
        self.tied = not self.args.get("untie_embeddings_and_output_weights", True)
        ends = (self.args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
        self._ends = tuple(int(layers) if layers is not None else None for layers in ends)
        self.own = self._own()

    def _check(self) -> None:
        missing = [flag for flag in _NEEDED if flag not in self.flags]
        if missing:
            raise PrismError(
                f"the script has no {', '.join(missing)}; prism tune changes layouts by Megatron's arguments"
            )
        for name, flag in _REFUSED:
            if self.args.get(name):
                raise PrismError(f"prism tune cannot vary the layout of a job with {flag} yet; take it out")
        if not self.args.get("global_batch_size"):
            raise PrismError("give --global-batch-size: the search keeps it, whatever the layout")

    # ── the launch's own choices ─────────────────────────────────────────────────────────────────────────────

    def _own(self) -> dict[str, Value]:
        args = self.args
        pp = int(args.get("pipeline_model_parallel_size") or 1)
        tp = int(args.get("tensor_model_parallel_size") or 1)
        overlap = "+overlap" if args.get("overlap_grad_reduce") else ""
        return {
            "tp": tp,
            "cp": int(args.get("context_parallel_size") or 1),
            "ep": int(args.get("expert_model_parallel_size") or 1),
            "etp": int(args.get("expert_tensor_parallel_size") or tp) if self.model.experts else 1,
            "pp": pp,
            "vpp": int(args.get("virtual_pipeline_model_parallel_size") or 1),
            "stages": self._own_stages(pp),
            "micro_batch": int(args["micro_batch_size"]),
            "sp": bool(args.get("sequence_parallel")),
            "recompute": self._own_recompute(),
            "optimizer": ("distributed" if args.get("use_distributed_optimizer") else "plain") + overlap,
            "order": "pp-dp" if args.get("use_tp_pp_dp_mapping") else "dp-pp",
        }

    def _own_stages(self, pp: int) -> str:
        """``even``, ``uneven``, or as the launch's own arguments have it (``first 3``)."""
        if self._ends == (None, None):
            return "even" if self.model.layers % pp == 0 else "uneven"
        uneven = {"pp": pp, "stages": "uneven"}
        own = {"pp": pp, "stages": "own"}
        if self.layers_of_stages(own) == self.layers_of_stages(uneven):
            return "uneven"
        told = zip(("first", "last"), self._ends, strict=True)
        return ", ".join(f"{end} {layers}" for end, layers in told if layers is not None)

    def _own_recompute(self) -> str:
        kind = self.args.get("recompute_granularity") or "none"
        if kind == "full" and self.args.get("recompute_method") == "block":
            return f"{int(self.args.get('recompute_num_layers') or 0)} layers"
        return kind

    # ── knobs ────────────────────────────────────────────────────────────────────────────────────────────────

    def knobs(self) -> Iterator[Knob]:
        """Every knob with all values that the script's arguments can say."""
        own = self.own
        for name, values, text in (
            ("tp", self._tensor(), "tensor-parallel size"),
            ("cp", self._context(), "context-parallel size"),
            ("ep", divisors(self.model.experts) if self.model.experts else [1], "expert-parallel size"),
            ("etp", self._tensor() if self.model.experts else [1], "tensor-parallel size of experts"),
            ("pp", self._stages(), "pipeline stages"),
            ("vpp", self._chunks(), "model chunks a stage"),
            ("stages", self._uneven(), "layers over stages: even, or fewer on the first and last one"),
            ("micro_batch", self._micro_batches(), "micro-batch size"),
            ("sp", [True, False] if "--sequence-parallel" in self.flags else [], "sequence parallelism"),
            ("recompute", self._recomputation(), "none, selective, full, or full of a part of the layers"),
            (
                "optimizer",
                self._optimizers(),
                "distributed or plain, with or without overlapped communication",
            ),
            (
                "order",
                self._orders(),
                "neighbours past tp, cp and ep: data-parallel ranks or pipeline stages",
            ),
        ):
            yield Knob(name=name, values=tuple(dict.fromkeys([*values, own[name]])), own=own[name], help=text)

    def _tensor(self) -> list[int]:
        return [n for n in powers_of_2(min(self.gpus_per_node, self.model.heads)) if self.world % n == 0]

    def _context(self) -> list[int]:
        if self.args.get("transformer_impl") == "local" or "--context-parallel-size" not in self.flags:
            return [1]
        return powers_of_2(min(16, self.world))

    def _stages(self) -> list[int]:
        return [n for n in divisors(self.world) if n <= self.model.layers]

    def _chunks(self) -> list[int]:
        if "--num-layers-per-virtual-pipeline-stage" in self.flags or (
            "--virtual-pipeline-model-parallel-size" in self.flags
        ):
            return [n for n in divisors(self.model.layers) if n <= self.model.layers // 2]
        return [1]

    def _uneven(self) -> list[Value]:
        return ["even", "uneven"] if "--decoder-first-pipeline-num-layers" in self.flags else ["even"]

    def _micro_batches(self) -> list[int]:
        least = self.world // (max(self._tensor()) * max(self._stages()) * max(self._context()))
        return powers_of_2(min(_MAX_MICRO_BATCH, max(1, self.global_batch // max(1, least))))

    def _recomputation(self) -> list[Value]:
        if "--recompute-granularity" not in self.flags:
            return ["none"]
        return ["none", "selective", "full/4", "full/2", "full"]

    def _optimizers(self) -> list[Value]:
        if "--overlap-grad-reduce" in self.flags:
            return list(_OPTIMIZERS)
        return ["distributed", "plain"] if "--use-distributed-optimizer" in self.flags else []

    def _orders(self) -> list[Value]:
        return list(ORDERS) if "--use-tp-pp-dp-mapping" in self.flags else []

    # ── what they mean ───────────────────────────────────────────────────────────────────────────────────────

    def layers_of_stages(self, p: Mapping[str, Any]) -> list[int] | None:
        """Layers of each pipeline stage of a point; None where they cannot be laid so."""
        layers, pp = self.model.layers, p["pp"]
        if p["stages"] == "even":
            return None if layers % pp else [layers // pp] * pp
        if p["stages"] != "uneven":
            return self._as_the_launch(pp)
        if pp < 3 or layers % pp == 0:
            return None
        middle = math.ceil(layers / pp)
        ends = layers - middle * (pp - 2)
        if ends < 2 or (ends + 1) // 2 > middle:
            return None
        return [ends - ends // 2, *[middle] * (pp - 2), ends // 2]

    def _as_the_launch(self, pp: int) -> list[int] | None:
        """The launch's own first and last stage, the rest of the layers spread evenly between them."""
        first, last = self._ends
        left = self.model.layers - (first or 0) - (last or 0)
        between = pp - (first is not None) - (last is not None)
        if between < 0 or left < 0 or (left % between if between else left):
            return None
        middle = [left // between] * between if between else []
        return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]

    def flags_of(self, p: Mapping[str, Any]) -> list[str]:
        """The arguments of a point, all of :data:`LAYOUT_VALUES` and :data:`LAYOUT_SWITCHES` that it has."""
        stages = self.layers_of_stages(p)
        flags: dict[str, Value] = {
            "--tensor-model-parallel-size": p["tp"],
            "--pipeline-model-parallel-size": p["pp"],
            "--micro-batch-size": p["micro_batch"],
        }
        if p["cp"] > 1:
            flags["--context-parallel-size"] = p["cp"]
        if p["ep"] > 1:
            flags["--expert-model-parallel-size"] = p["ep"]
        if self.model.experts and "--expert-tensor-parallel-size" in self.flags:
            flags["--expert-tensor-parallel-size"] = p["etp"]
        if p["vpp"] > 1 and stages is not None:
            if "--num-layers-per-virtual-pipeline-stage" in self.flags:
                flags["--num-layers-per-virtual-pipeline-stage"] = stages[0] // p["vpp"]
            else:
                flags["--virtual-pipeline-model-parallel-size"] = p["vpp"]
        if p["stages"] == "uneven" and stages is not None:
            flags["--decoder-first-pipeline-num-layers"] = stages[0]
            flags["--decoder-last-pipeline-num-layers"] = stages[-1]
        elif p["stages"] != "even":
            for end, layers in zip(("first", "last"), self._ends, strict=True):
                if layers is not None:
                    flags[f"--decoder-{end}-pipeline-num-layers"] = layers
        flags |= _recompute_flags(p["recompute"], stages[0] // p["vpp"] if stages else 0)
        words = [word for flag, value in flags.items() for word in (flag, str(value))]
        kind, _, overlap = str(p["optimizer"]).partition("+")
        switches = {
            "--sequence-parallel": p["sp"] and "--sequence-parallel" in self.flags,
            "--use-tp-pp-dp-mapping": p["order"] == "pp-dp",
            "--use-distributed-optimizer": kind == "distributed",
            "--overlap-grad-reduce": overlap,
            "--overlap-param-gather": overlap and kind == "distributed",
        }
        return [*words, *(flag for flag, on in switches.items() if on)]


def _recompute_flags(recompute: Value, layers: int) -> dict[str, Value]:
    """``layers``: of a model chunk."""
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"--recompute-granularity": "selective"}
    method, number = ("uniform", 1) if recompute == "full" else ("block", full_layers(recompute, layers))
    return {
        "--recompute-granularity": "full",
        "--recompute-method": method,
        "--recompute-num-layers": number,
    }


def full_layers(recompute: Value, layers: int) -> int:
    """How many of the layers of a model chunk are recomputed as a whole: all for ``full``, a quarter for ``full/4``, three
    for ``3 layers``, none otherwise."""
    kind, _, part = str(recompute).partition("/")
    if kind == "full":
        return round(layers / int(part)) if part else layers
    number, _, word = kind.partition(" ")
    return min(layers, int(number)) if word == "layers" else 0


def is_partial(recompute: Value) -> bool:
    """Some layers of a chunk are recomputed as a whole, others are not at all."""
    return recompute not in ("none", "selective", "full")
