"""What is wrong or doubtful about a DeepSpeed configuration, told before training starts.

What DeepSpeed refuses (a batch size that does not fit the world, a wrong type, broken JSON) becomes one line with what
would fit. What it accepts without a word (a misspelt key, a bucket beside which no model fits, ``overlap_comm`` where
nothing can overlap) becomes a finding.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.prediction import Finding

BUCKET_WARNING_SHARE = 0.25
"""Share of the GPU's memory from which on a reduction bucket is worth a warning."""
NO_AUTOTUNING = (
    "autotuning is not emulated: it measures trial runs on the GPUs at hand; leave it out, `prism tune` searches "
    "configurations by emulation"
)
_READ_ELSEWHERE = {
    "sequence_parallel_size",
    "data_parallel_size",
    "bfloat16",
    "vocabulary_size",
    "allgather_size",
}
"""Top-level keys that are not looked up by ``DeepSpeedConfig._initialize_params``, or not always."""


# --- the configuration file ---


def _config_init(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, Mapping):
            check_file(session, str(config), module.hjson.loads)
        try:
            original(self, config, *args, **kwargs)
        except PrismError:
            raise
        except (AssertionError, ValueError, TypeError, KeyError, module.DeepSpeedConfigError) as error:
            raise refusal(error) from error
        if self.autotuning_config.enabled:
            raise PrismError(NO_AUTOTUNING)
        for finding in unknown_keys(self, type(self)):
            session.context.finding(finding)

    return init


def _load_config(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def load_ds_config(config: Any) -> Any:
        if isinstance(config, str):
            check_file(session, config, module.hjson.loads)
        try:
            return original(config)
        except ValueError as error:
            raise refusal(error) from error

    return load_ds_config


def _hf_config_init(session: Session, original: Any, module: ModuleType) -> Any:
    """Hugging Face reads the file itself, as strict JSON, and fills in what is "auto"."""

    @functools.wraps(original)
    def init(self: Any, config_file_or_dict: Any) -> None:
        if isinstance(config_file_or_dict, str | os.PathLike):
            path = str(config_file_or_dict)
            if not path.lstrip().startswith("{"):
                check_file(session, path, module.json.loads)
        original(self, config_file_or_dict)

    return init


def check_file(session: Session, path: str, load: Any) -> None:
    """Raise :class:`PrismError` for a configuration file that is missing or cannot be read as (H)JSON."""
    if not os.path.exists(path):
        if path.endswith((".json", ".hjson")) or os.sep in path:
            raise PrismError(f"the DeepSpeed configuration {path} does not exist")
        return  # DeepSpeed takes it as base64.
    if not Path(path).is_file():
        raise PrismError(f"the DeepSpeed configuration {path} is not a file")
    session.context.depends_on(Path(path))
    try:
        content = load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PrismError(f"the DeepSpeed configuration {path} cannot be read: {error}") from None
    except ValueError as error:
        line, column = getattr(error, "lineno", 0), getattr(error, "colno", 0)
        reason = getattr(error, "msg", str(error))
        raise PrismError(
            f"the DeepSpeed configuration {path} is not valid JSON: line {line}, column {column}: {reason}"
        ) from None
    if not isinstance(content, dict):
        raise PrismError(
            f"the DeepSpeed configuration {path} holds a {type(content).__name__} instead of a JSON object"
        )


def refusal(error: Exception) -> PrismError:
    """What DeepSpeed says against a configuration, as one line."""
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic's ValidationError
        known = _field_names(error)
        lines = [_validation_line(detail, known) for detail in details()]
        section = _SECTIONS.get(getattr(error, "title", ""), getattr(error, "title", ""))
        return PrismError(f"DeepSpeed refuses the configuration: {section}: " + "; ".join(lines))
    text = " ".join(str(error).split()) or type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, TypeError) and "'str'" in text:
        text += ' ("auto" is filled in by Hugging Face\'s Trainer and Accelerate only)'
    return PrismError(
        f"DeepSpeed refuses the configuration ({Path(frame.filename).name}:{frame.lineno}): {text}"
    )


_SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsConfig": "comms_logger",
    "HybridEngineConfig": "hybrid_engine",
    "CompileConfig": "compile",
    "TPTrainingConfig": "tensor_parallel",
    "DeepSpeedMonitorConfig": "tensorboard, wandb, csv_monitor",
}
"""Classes of DeepSpeed's configuration → the section of the file."""


def _field_names(error: Any) -> list[str]:
    """Names that the model of a ValidationError has, aliases included; empty where it is not known."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = [DeepSpeedConfigModel]
    while models:
        model = models.pop()
        models += model.__subclasses__()
        if model.__name__ == getattr(error, "title", None):
            return [
                name
                for key, field in model.model_fields.items()
                for name in (key, field.alias)
                if name is not None
            ]
    return []


def _validation_line(detail: Mapping[str, Any], known: list[str]) -> str:
    where = ".".join(str(part) for part in detail.get("loc", ()))
    if detail.get("type") == "extra_forbidden":
        return f"unknown key {where!r}{_did_you_mean(where.rpartition('.')[2], known)}"
    return f"{where or 'value'} = {detail.get('input')!r}: {detail.get('msg', '')}"


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f", did you mean {near[0]!r}?" if near else ""


# --- keys that DeepSpeed ignores without a word ---


class LookedUp(dict):
    """A configuration that remembers which of its keys were asked for, whether it has them or not."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: LookedUp(v) if isinstance(v, dict) else v for k, v in values.items()})
        self.asked: set[str] = set()
        self.read_whole = False

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.read_whole = True
        return super().__iter__()

    def items(self) -> Any:
        """As of a dict; whoever takes all items needs no key by name."""
        self.read_whole = True
        return super().items()

    def __copy__(self) -> LookedUp:
        return self

    def keys(self) -> Any:
        """As of a dict; ``x in d.keys()`` asks for a key like ``x in d``."""
        return self


def unknown_keys(config: Any, config_class: Any) -> list[Finding]:
    """Keys of the configuration that DeepSpeed never looks at.

    DeepSpeed itself tells which keys it knows: its reading of the configuration is repeated with a dictionary that
    remembers what it is asked for.
    """
    given = config._param_dict
    probe = object.__new__(config_class)
    probe.global_rank, probe.world_size = config.global_rank, config.world_size
    watched = LookedUp(given)
    logger = sys.modules[config_class.__module__].logger
    was_disabled, logger.disabled = logger.disabled, True  # What it warns of was said already.
    try:
        probe._initialize_params(watched)
    except Exception:  # A reader that wants a plain dict: nothing can be said.
        return []
    finally:
        logger.disabled = was_disabled
    known = watched.asked | _READ_ELSEWHERE
    findings = []
    for key, value in given.items():
        if not isinstance(key, str):
            continue
        if key not in known:
            findings.append(_ignored(key, value, sorted(known), _zero_fields(config)))
        elif isinstance(value, dict):
            section = dict.__getitem__(watched, key)
            if section.asked and not section.read_whole:
                findings += [
                    _ignored(f"{key}.{name}", None, [f"{key}.{k}" for k in sorted(section.asked)], ())
                    for name in value
                    if name not in section.asked
                ]
    return [finding for finding in findings if finding is not None]


def _zero_fields(config: Any) -> tuple[str, ...]:
    fields = type(config.zero_config).model_fields
    return tuple(name for key, field in fields.items() for name in (key, field.alias) if name)


def _ignored(key: str, value: Any, known: list[str], zero_fields: tuple[str, ...]) -> Finding | None:
    if key.rpartition(".")[2].startswith(("_", "#", "//")) or "comment" in key.lower():
        return None
    text = f"DeepSpeed does not know the key {key!r} of the configuration and ignores it"
    if key in zero_fields:
        return Finding(
            kind="config", severity="warning", message=f"{text}: it belongs into 'zero_optimization'"
        )
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if near:
        return Finding(kind="config", severity="warning", message=f"{text}; did you mean {near[0]!r}?")
    return Finding(kind="config", severity="info", message=text)


# --- batch sizes ---


def _batch_assertion(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def assertion(self: Any) -> None:
        try:
            original(self)
        except AssertionError:
            raise PrismError(
                batch_problem(
                    self._param_dict.get("train_batch_size"),
                    self._param_dict.get("train_micro_batch_size_per_gpu"),
                    self._param_dict.get("gradient_accumulation_steps"),
                    data_parallel=int(self.world_size),
                )
            ) from None

    return assertion


def batch_problem(
    train: int | None, micro: int | None, accumulation: int | None, *, data_parallel: int
) -> str:
    """Why these batch sizes do not fit a data-parallel world, and what would: one line.

    DeepSpeed wants ``train = micro x accumulation x data_parallel``; what is not given follows from the others.
    """
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    for name, value in sizes.items():
        if value is not None and value <= 0:
            return f"{name} is {value}, it must be positive"
    given = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
    unit = (micro or 1) * (accumulation or 1) * data_parallel
    factors = [
        f"micro-batch {micro}" if micro else "",
        f"accumulation {accumulation}" if accumulation else "",
        f"{data_parallel} data-parallel ranks",
    ]
    text = (
        f"the batch sizes do not fit ({given}): a step takes {' x '.join(f for f in factors if f)} = {unit}"
        f"{'' if micro and accumulation else ' samples or a multiple'}"
    )
    below = (train or 0) // unit * unit
    fitting = [below, below + unit] if below else [unit]
    advice = f"; train_batch_size {' or '.join(map(str, fitting))} would fit"
    if micro and accumulation:
        advice = f"; set train_batch_size to {unit}"
        if train and train % (micro * data_parallel) == 0:
            advice += f", or gradient_accumulation_steps to {train // (micro * data_parallel)}"
        elif train and train % (accumulation * data_parallel) == 0:
            advice += f", or train_micro_batch_size_per_gpu to {train // (accumulation * data_parallel)}"
    return text + advice


# --- the engine ---


def _engine_init(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session.engine_made(trains=has_optimizer(self))
        for finding in engine_findings(self, session.context.spec.gpu.memory_bytes):
            session.context.finding(finding)

    return init


def engine_findings(engine: Any, gpu_bytes: int) -> list[Finding]:
    """What is doubtful about an engine that was made. ``gpu_bytes``: memory of the target's GPU."""
    found = [bucket_finding(engine, gpu_bytes), overlap_finding(engine)]
    return [finding for finding in found if finding is not None]


def bucket_finding(engine: Any, gpu_bytes: int) -> Finding | None:
    """The buffers into which ZeRO collects gradients are allocated in full, whatever the size of the model."""
    optimizer = engine.optimizer
    buckets = getattr(optimizer, "ipg_buckets", None)
    if not buckets or not getattr(optimizer, "contiguous_gradients", False):
        return None
    stage = int(engine.zero_optimization_stage())
    dtypes = list(buckets)
    if stage < 3:
        dtypes = [optimizer._gradient_reduction_buffer_dtype()] * len(buckets)
    copies = 2 if stage < 3 and optimizer.overlap_comm else 1
    elements = int(optimizer.reduce_bucket_size)
    nbytes = elements * copies * sum(dtype.itemsize for dtype in dtypes)
    if nbytes <= BUCKET_WARNING_SHARE * gpu_bytes:
        return None
    fits = nbytes <= gpu_bytes
    buffers = f"{copies * len(dtypes)} buffers" if copies * len(dtypes) > 1 else "a buffer"
    return Finding(
        kind="bucket",
        severity="warning" if fits else "error",
        message=f"reduce_bucket_size {elements:,} makes {buffers} of {nbytes / 2**30:.1f} GiB in all, "
        + (
            f"{100 * nbytes / gpu_bytes:.0f} % of the GPU's memory"
            if fits
            else f"more than the GPU's {gpu_bytes / 2**30:.1f} GiB"
        )
        + "; 5e8 elements are usual",
    )


def overlap_finding(engine: Any) -> Finding | None:
    """``overlap_comm`` that the user asked for and that cannot overlap anything.

    ZeRO reduces a bucket on a second stream once it is full (``reduce_independent_p_g_buckets_and_remove_grads``);
    what is left at the end of the backward pass is reduced then.
    """
    asked = (engine._config._param_dict.get("zero_optimization") or {}).get("overlap_comm")
    if asked is not True:
        return None
    reason = _why_nothing_overlaps(engine)
    if reason is None:
        return None
    return Finding(kind="overlap", severity="warning", message=f"overlap_comm has no effect: {reason}")


def _why_nothing_overlaps(engine: Any) -> str | None:
    from deepspeed.runtime.pipe.module import PipelineModule

    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        return "it is an option of ZeRO, and zero_optimization.stage is 0"
    if int(engine.seq_dp_world_size) == 1:
        return "there is one data-parallel rank, nothing is reduced"
    if stage < 3 and isinstance(engine.module, PipelineModule):
        return "DeepSpeed switches it off under pipeline parallelism"
    if not hasattr(engine.optimizer, "overlap_comm") and stage < 3:
        return f"{type(engine.optimizer).__name__} reduces all gradients after the backward pass"
    bucket = int(engine.zero_reduce_bucket_size())
    elements = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    if stage < 3 and elements <= bucket:
        return (
            f"all {elements:,} gradient elements fit into one bucket (reduce_bucket_size {bucket:,}), which is "
            "reduced after the backward pass"
        )
    return None


# --- refusals in the engine ---


def has_optimizer(engine: Any) -> bool:
    """Whether an engine can train; ``deepspeed.initialize`` also makes engines for inference."""
    return type(engine.optimizer).__name__ not in ("NoneType", "DummyOptim", "DeepSpeedZeRoOffload")


def _backward(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_optimizer(self):
            raise PrismError(
                "engine.backward() needs an optimizer, and deepspeed.initialize got none: name one in the configuration "
                "(and give model_parameters), or pass it"
            )
        return original(self, *args, **kwargs)

    return backward


def _refusing(session: Session, original: Any, module: ModuleType) -> Any:
    """Assertions about the job, and parameters that an optimizer or a scheduler does not have, as one line."""

    @functools.wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (AssertionError, ValueError, TypeError) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            if isinstance(error, TypeError) and frame.filename != module.__file__:
                raise  # Not of a call that DeepSpeed makes here.
            text = " ".join(str(error).split()) or f"it asserts `{frame.line}`"
            raise PrismError(
                f"DeepSpeed refuses this job ({Path(frame.filename).name}:{frame.lineno}): {text}"
            ) from error

    return refusing


# --- what ranks call under ZeRO-3 ---


def _same_on_all_ranks(session: Session, original: Any, module: ModuleType) -> Any:
    """DeepSpeed compares the modules that ranks called with those of rank 0 and raises. Here the script goes on, so that the calls of
    both ranks can be compared and named."""

    @functools.wraps(original)
    def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
        try:
            original(ints)
        except RuntimeError as error:
            session.context.finding(other_modules(session.context.spec.rank, str(error)))

    return assert_ints_same_as_other_ranks


def other_modules(rank: int, said: str) -> Finding:
    """The finding about a rank that calls other modules, or in another order, than rank 0."""
    return Finding(
        kind="mismatch",
        severity="error",
        ranks=f"0,{rank}",
        phase="forward",
        message=(
            f"rank {rank} calls other modules than rank 0, or in another order: ZeRO-3 gathers the parameters of a module when it is "
            f"called, so that ranks wait for each other in different gathers. DeepSpeed would stop: {' '.join(said.split())}"
        ),
    )


_CONFIG = "deepspeed.runtime.config"
_ENGINE = "deepspeed.runtime.engine"
HOOKS = (
    Hook(
        "deepspeed.runtime.tensor_parallel.init_utils",
        "load_ds_config",
        _load_config,
        "mistakes in the configuration",
    ),
    Hook(
        "accelerate.utils.deepspeed",
        "HfDeepSpeedConfig.__init__",
        _hf_config_init,
        "mistakes in the configuration",
        required=False,
    ),
    Hook(_CONFIG, "DeepSpeedConfig.__init__", _config_init, "mistakes in the configuration"),
    Hook(_CONFIG, "DeepSpeedConfig._batch_assertion", _batch_assertion, "batch sizes that do not fit"),
    Hook(_ENGINE, "DeepSpeedEngine.__init__", _engine_init, "findings about the engine"),
    Hook(_ENGINE, "DeepSpeedEngine.backward", _backward, "engines that cannot train"),
    Hook(
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        "assert_ints_same_as_other_ranks",
        _same_on_all_ranks,
        "ranks that call other modules",
    ),
    Hook(_ENGINE, "DeepSpeedEngine._do_args_sanity_check", _refusing, "refusals as one line"),
    Hook(_ENGINE, "DeepSpeedEngine._do_sanity_check", _refusing, "refusals as one line"),
    Hook(_ENGINE, "DeepSpeedEngine._configure_basic_optimizer", _refusing, "optimizers as one line"),
    Hook(_ENGINE, "DeepSpeedEngine._scheduler_from_config", _refusing, "schedulers as one line"),
    Hook(
        _ENGINE,
        "DeepSpeedEngine._validate_zero3_moe_compatibility",
        _refusing,
        "refusals as one line",
        required=False,
    ),
)
