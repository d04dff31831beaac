"""The layout search's view of a DeepSpeed job: knobs of its configuration file, DeepSpeed's own validation, lower bounds.

Every rank of such a job runs nearly the same program, so a point is probed as a whole: one slice of it with two micro-batches
and one with three, at the size of the target world. Jobs with a pipeline are probed by ordinary emulations with few
micro-batches instead.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration.knobs import (
    divisors,
    narrowed_all,
    pairs,
    powers_of_2,
    scalars,
    verdicts,
    without,
)
from prism_plugins.integration.tuning import (
    Knob,
    Launch,
    Limits,
    Point,
    Probe,
    Scouted,
    Value,
    Verdict,
    Whole,
)
from prism_plugins.integrations.deepspeed.ds_config import (
    AUTO,
    Config,
    changed,
    differences,
    find_config,
    read_config,
    value_of,
    write_config,
)

_STAGE_FLAGS = (
    "--stages", "--num-stages", "--num_stages", "--pipeline-parallel-size", "--pipeline_parallel_size",
    "--pipe-parallel-size", "--pipe_parallel_size",
)  # fmt: skip
"""Arguments by which scripts choose the stages of their ``PipelineModule``: DeepSpeed itself has none."""
_SEQUENCE_FLAGS = ("--seq", "--seq-length", "--seq_length", "--sequence-length", "--max_seq_length")
_HF_BATCH = ("--per_device_train_batch_size", "--gradient_accumulation_steps")
"""Arguments of Hugging Face's Trainer, which fill in what the configuration leaves ``auto``."""
_BATCH = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_BUCKET = "zero_optimization.reduce_bucket_size"
_OVERLAP = "zero_optimization.overlap_comm"
_DEFAULT_BUCKET = 500_000_000
_BUCKETS = (50_000_000, 200_000_000, 500_000_000)
_OFFLOADS = {"none": (), "optimizer": ("optimizer",), "optimizer+parameters": ("optimizer", "param")}
_MAX_MICRO_BATCH = 16
_STATE_BYTES = {"adam": 12, "adamw": 12}
"""By optimizer: master copy and two moments in fp32. Of others none are counted."""
_PARAM_BYTES = 2


class DeepSpeedTuner:
    """See :class:`prism_plugins.integration.tuning.Tuner`."""

    def judge(self, parser: Any, commands: Sequence[Sequence[str]]) -> Iterator[Verdict]:
        """The script's parser, then ``DeepSpeedConfig`` of the file that the command line names."""
        if "deepspeed" not in sys.modules:
            return

        def validate(arguments: Any, command: Sequence[str]) -> None:
            _validate(read_config(find_config(command)[1]), scalars(arguments))

        yield from verdicts(
            parser, commands, validate, refusals=(AssertionError, ValueError, TypeError, KeyError)
        )

    def space(self, launch: Launch) -> DeepSpeedSpace:
        """See the protocol."""
        return DeepSpeedSpace(launch)


def _validate(config: Config, arguments: Mapping[str, Any]) -> None:
    """Have DeepSpeed read the configuration as it would in a world of ``WORLD_SIZE`` ranks. What is ``auto`` is not known yet."""
    module = sys.modules.get("deepspeed.runtime.config")
    if module is None or AUTO in _leaves(config):
        return
    stages = int(next((arguments[_name(f)] for f in _STAGE_FLAGS if arguments.get(_name(f))), 1))
    ranks = _data_parallel(int(os.environ["WORLD_SIZE"]), config, stages)
    module.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *group: ranks)
    module.DeepSpeedConfig({k: v for k, v in config.items() if k != "sequence_parallel_size"})


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _data_parallel(world: int, config: Config, stages: int) -> int:
    """Data-parallel ranks of a launch with that configuration."""
    size = stages * max(1, int(value_of(config, "tensor_parallel.autotp_size", 1) or 1))
    return world // (size * int(value_of(config, "sequence_parallel_size", 1) or 1))


class DeepSpeedSpace:
    """The configurations of one DeepSpeed launch. See :class:`prism_plugins.integration.tuning.Space`."""

    def __init__(self, launch: Launch) -> None:
        self._argv = launch.argv
        self._args = launch.arguments
        self._world = launch.world_size
        self._directory = launch.directory
        self._flags = set(self._args.get("prism_flags", ()))
        self._where, path = find_config(self._argv)
        self._config = read_config(path)
        self._hf = value_of(self._config, _BATCH) == AUTO or self._hf_flags_alone()
        self._stage_flag = next((f for f in _STAGE_FLAGS if f in self._flags), "")
        self._sequence_parallel = int(value_of(self._config, "sequence_parallel_size", 1) or 1)
        own = self._own()
        self._gbs = self._global_batch(own)
        self.knobs = narrowed_all(self._all_knobs(own, launch.gpus_per_node, launch.chosen), launch.chosen)
        self.own = Point(tuple(own[knob.name] for knob in self.knobs))
        self.probe_world = self._world
        self.tokens_per_iteration = 0
        self._parameters = self._flops = 0.0
        self.scout = self.probes(self.own)[0]
        self.assumptions = (
            "composed configurations: rank 0 is sliced with two and three micro-batches, every rank does what it does, and an "
            "iteration is linear in its micro-batches; with a pipeline these are ordinary emulations",
        )

    def _hf_flags_alone(self) -> bool:
        return _BATCH not in self._config and self._flags >= set(_HF_BATCH)

    # ── the space ────────────────────────────────────────────────────────────────────────────────────────────

    def _own(self) -> dict[str, Value]:
        zero = value_of(self._config, "zero_optimization", {}) or {}
        stage = int(zero.get("stage", 0))
        devices = [value_of(zero, f"offload_{part}.device", "none") for part in ("optimizer", "param")]
        if not {*devices} <= {"none", "cpu", None}:
            raise PrismError(
                "prism tune searches offload to the CPU only; take nvme out of the configuration"
            )
        offload = {(False, False): "none", (True, False): "optimizer", (True, True): "optimizer+parameters"}
        overlap = zero.get("overlap_comm")
        own: dict[str, Value] = {
            "zero": stage,
            "micro_batch": self._own_batch(),
            "offload": offload.get(tuple(d == "cpu" for d in devices), "parameters"),  # type: ignore[arg-type]
            "bucket": zero.get("reduce_bucket_size", _DEFAULT_BUCKET),
            "overlap": bool(overlap) if isinstance(overlap, bool) else stage == 3,
            "tp": max(1, int(value_of(self._config, "tensor_parallel.autotp_size", 1) or 1)),
            "pp": int(self._args.get(_name(self._stage_flag)) or 1) if self._stage_flag else 1,
        }
        if isinstance(own["bucket"], float):
            own["bucket"] = int(own["bucket"])
        return own

    def _own_batch(self) -> int:
        if self._hf:
            return int(self._args.get(_name(_HF_BATCH[0])) or 1)
        given = value_of(self._config, _BATCH)
        if given is None:
            accumulation = int(value_of(self._config, _ACCUMULATION, 1))
            pp = int(self._args.get(_name(self._stage_flag)) or 1) if self._stage_flag else 1
            ranks = _data_parallel(self._world, self._config, pp)
            given = int(value_of(self._config, "train_batch_size", 0)) // (ranks * accumulation)
        return int(given)

    def _global_batch(self, own: Mapping[str, Any]) -> int:
        total = value_of(self._config, "train_batch_size")
        if isinstance(total, int) and not self._hf:
            return total
        if self._hf:
            accumulation = int(self._args.get(_name(_HF_BATCH[1])) or 1)
        else:
            accumulation = int(value_of(self._config, _ACCUMULATION, 1))
        return own["micro_batch"] * accumulation * self._dp(own)

    def _dp(self, p: Mapping[str, Any]) -> int:
        return self._world // (p["tp"] * p["pp"] * self._sequence_parallel)

    def _all_knobs(
        self, own: dict[str, Value], gpus_per_node: int, chosen: Mapping[str, tuple[str, ...]]
    ) -> Iterator[Knob]:
        tp: list[Value] = [own["tp"]]
        if "tensor_parallel" in self._config or "tp" in chosen:
            tp = [n for n in powers_of_2(gpus_per_node) if self._world % n == 0]
        pp: list[Value] = [own["pp"]]
        if self._stage_flag:
            pp = [n for n in divisors(self._world) if n <= 64]
        bucket: list[Value] = [own["bucket"]] if own["bucket"] == AUTO else list(_BUCKETS)
        for name, values, text in (
            ("zero", [0, 1, 2, 3], "ZeRO stage"),
            ("tp", tp, "AutoTP's tensor-parallel size"),
            ("pp", pp, "pipeline stages"),
            ("micro_batch", powers_of_2(_MAX_MICRO_BATCH), "micro-batch size; accumulation follows from it"),
            ("offload", list(_OFFLOADS), "to the CPU: none, optimizer, optimizer+parameters"),
            ("bucket", bucket, "elements of a reduction bucket (reduce_bucket_size)"),
            ("overlap", [True, False], "gradients are reduced beside backward (overlap_comm)"),
        ):
            yield Knob(name=name, values=tuple(dict.fromkeys([*values, own[name]])), own=own[name], help=text)

    def points(self) -> Iterator[tuple[Point, str]]:
        """Every combination; the reason is structural. DeepSpeed's own validation comes after it."""
        for values in itertools.product(*(knob.values for knob in self.knobs)):
            point = Point(values)
            yield point, "" if point == self.own else self._why_not(self._named(point))

    def _named(self, point: Point) -> dict[str, Any]:
        return dict(zip((knob.name for knob in self.knobs), point.values, strict=True))

    def _why_not(self, p: dict[str, Any]) -> str:
        size = p["tp"] * p["pp"] * self._sequence_parallel
        if self._world % size:
            return f"tp x pp = {size} does not divide the {self._world} GPUs"
        if self._gbs % (p["micro_batch"] * self._dp(p)):
            return f"global batch {self._gbs} is not a multiple of micro-batch {p['micro_batch']} x dp {self._dp(p)}"
        if p["pp"] > 1 and p["zero"] > 1:
            return "a pipeline allows ZeRO 0 and 1 only"
        if p["tp"] > 1 and p["zero"] == 3:
            return "AutoTP allows ZeRO 0 to 2 only"
        if p["offload"] != "none" and not p["zero"]:
            return "offload needs ZeRO"
        if "parameters" in p["offload"] and p["zero"] != 3:
            return "parameters can be offloaded in ZeRO-3 only"
        own = self._named(self.own)
        idle = p["zero"] == 0 or p["pp"] > 1
        first = {knob.name: knob.values[0] for knob in self.knobs}
        for name in ("bucket", "overlap"):
            wanted = own[name] if own[name] in self._values(name) else first[name]
            if idle and p[name] != wanted:
                return f"{name} does nothing without ZeRO, or with a pipeline"
        return ""

    def _values(self, name: str) -> tuple[Value, ...]:
        return next(knob.values for knob in self.knobs if knob.name == name)

    # ── command lines ────────────────────────────────────────────────────────────────────────────────────────

    def command(self, point: Point) -> tuple[str, ...]:
        """The launch's argv with a configuration file of the point's."""
        if point == self.own:
            return self._argv
        p = self._named(point)
        return self._written(p, self._num_microbatches(p))

    def _num_microbatches(self, p: Mapping[str, Any]) -> int:
        return self._gbs // (p["micro_batch"] * self._dp(p))

    def _config_of(self, p: Mapping[str, Any], microbatches: int) -> Config:
        own = self._named(self.own)
        values: dict[str, Any] = {}
        if p["zero"] != own["zero"]:
            values["zero_optimization.stage"] = p["zero"]
        if p["bucket"] != own["bucket"]:
            values[_BUCKET] = p["bucket"]
        if p["overlap"] != own["overlap"] or (p["zero"] == 3) != (own["zero"] == 3):
            values[_OVERLAP] = p["overlap"]
        if p["tp"] != own["tp"]:
            values["tensor_parallel.autotp_size"] = p["tp"]
        if p["offload"] != own["offload"]:
            for part in ("optimizer", "param"):
                wanted = part in _OFFLOADS[p["offload"]]
                known = value_of(self._config, f"zero_optimization.offload_{part}")
                cpu = {"pin_memory": True, **(known or {}), "device": "cpu"}
                values[f"zero_optimization.offload_{part}"] = cpu if wanted else None
        if not self._hf:
            if "train_batch_size" in self._config:
                values["train_batch_size"] = p["micro_batch"] * microbatches * self._dp(p)
            values[_BATCH], values[_ACCUMULATION] = p["micro_batch"], microbatches
        return changed(self._config, values)

    def _written(self, p: Mapping[str, Any], microbatches: int) -> tuple[str, ...]:
        path = str(write_config(self._directory, self._config_of(p, microbatches)))
        words = list(self._argv)
        flag, equals, _ = words[self._where].partition("=")
        words[self._where] = f"{flag}={path}" if equals and flag.startswith("-") else path
        new: list[str] = []
        replaced: list[str] = []
        if self._hf:
            replaced += _HF_BATCH
            for name, value in zip(_HF_BATCH, (p["micro_batch"], microbatches), strict=True):
                new += [name, str(value)]
        if self._stage_flag:
            replaced.append(self._stage_flag)
            new += [self._stage_flag, str(p["pp"])]
        return (*without(words, replaced, ()), *new) if replaced else tuple(words)

    def changes(self, point: Point) -> tuple[str, ...]:
        """The configuration file of the point and what differs in it, then the script's own flags."""
        if point == self.own:
            return ()
        words, p = self.command(point), self._named(point)
        config = self._config_of(p, self._num_microbatches(p))
        flags = [*_HF_BATCH, self._stage_flag]
        before, after = (pairs(argv, flags, ()) for argv in (self._argv, words))
        path = find_config(words)[1]
        return (
            f"{path}",
            *(
                f"({line})" if not line.startswith("(") else line
                for line in differences(self._config, config)
            ),
            *(f"{flag} {value}" for flag, value in after.items() if before.get(flag) != value),
        )

    def with_sequence(self, length: int) -> tuple[str, ...]:
        """argv with another sequence length, where the script has one of the usual arguments for it."""
        flags = [f for f in _SEQUENCE_FLAGS if f in self._flags]
        if not flags:
            raise PrismError(
                f"the script has no argument for the sequence length that prism tune knows ({', '.join(_SEQUENCE_FLAGS)})"
            )
        return (*without(self._argv, flags, ()), flags[0], str(length))

    # ── probes and bounds ────────────────────────────────────────────────────────────────────────────────────

    def shape(self, point: Point) -> Whole:
        """The point for the composition."""
        return Whole(num_microbatches=self._num_microbatches(self._named(point)))

    def probes(self, point: Point) -> tuple[Probe, ...]:
        """The point itself with few micro-batches."""
        p = self._named(point)
        key = (*(str(v) for v in point.values), str(self._world))
        wanted = self._num_microbatches(p)
        short, long = (p["pp"], 2 * p["pp"]) if p["pp"] > 1 else (2, 3)
        sizes = (wanted,) if wanted <= long else (short, long)
        return tuple(
            Probe(
                kind="whole",
                command=self._written(p, size),
                size=size,
                key=(*key, *sorted(pairs(self._argv, _SEQUENCE_FLAGS, ()).values())),
                whole=True,
                emulated=p["pp"] > 1,
                tokens=self.tokens_per_iteration * size // wanted,
            )
            for size in sizes
        )

    def learn(self, scouted: Scouted) -> None:
        """See the protocol."""
        facts, own = scouted.facts, self._named(self.own)
        layout = facts.layout
        found = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
        told = {"dp": self._dp(own), "tp": own["tp"], "pp": own["pp"]}
        if found != told:
            raise PrismError(
                f"the launch's layout is {found}, its configuration and arguments say {told}: prism tune would change what it "
                "does not understand"
            )
        if facts.samples_per_iteration:
            self.tokens_per_iteration = facts.tokens_per_iteration * self._gbs // facts.samples_per_iteration
        if layout.pp == 1:
            self._flops = scouted.flops / own["micro_batch"]
            if facts.tokens_per_iteration:
                per_token = facts.model_flops_per_iteration / facts.tokens_per_iteration
                self._parameters = per_token / 6

    def limits(self, point: Point) -> Limits:
        """Matrix products of the launch's own slice; states of the parameters that a token meets. See docs/tuning.md."""
        p, own = self._named(point), self._named(self.own)
        flops = self._flops * p["micro_batch"] * self._num_microbatches(p)
        flops *= min(1.0, own["tp"] / p["tp"]) / p["pp"]
        parameters = self._parameters / (p["tp"] * p["pp"])
        dp = self._dp(p) * self._sequence_parallel
        memory = parameters * _PARAM_BYTES / (dp if p["zero"] == 3 else 1)
        if "parameters" in p["offload"]:
            memory = 0.0
        kind = str(value_of(self._config, "optimizer.type", "")).lower()
        if p["offload"] == "none":
            memory += parameters * _STATE_BYTES.get(kind, 0) / dp
        return Limits(memory_bytes=memory, flops=flops, link_bytes=0.0, dtype="bfloat16")
