"""What a training script does around its iterations that must neither fail nor leave traces when emulated.

Checkpoints (DeepSpeed's, Hugging Face Trainer's, Accelerate's) are not written and not read, monitors and trackers
write nothing. What is skipped is said through ``SliceContext.assume`` when it happens, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session

NOT_WRITTEN = "checkpoints are not written, and their time is not part of an iteration"
NOT_READ = "checkpoints are not read: training starts at step 0 with synthesized weights"
NO_MONITOR = "nothing is written to TensorBoard, Weights & Biases, CSV files or other monitors"


def _skipped(line: str, result: Any = None) -> Callable[[Session, Any, ModuleType], Any]:
    """A wrapper that replaces a function by one that says ``line`` and returns ``result``."""

    def wrap(session: Session, original: Any, module: ModuleType) -> Any:
        @functools.wraps(original)
        def skipped(*args: Any, **kwargs: Any) -> Any:
            session.context.assume(line)
            return result

        return skipped

    return wrap


# --- DeepSpeed's checkpoints ---


def _save_checkpoint(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def save_checkpoint(self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> bool:
        if not save_dir:
            return original(self, save_dir, *args, **kwargs)
        session.context.assume(NOT_WRITTEN)
        nbytes = optimizer_state_bytes(self.optimizer)
        if nbytes:
            session.context.assume(
                f"each checkpoint would hold {nbytes / 2**20:,.1f} MiB of optimizer state of every data-parallel rank, "
                "beside the weights"
            )
        return True

    return save_checkpoint


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of this rank's fp32 parameters and optimizer states, as ZeRO's checkpoint files hold them; 0 before the
    first step."""
    import torch

    state = getattr(getattr(optimizer, "optimizer", optimizer), "state", None) or {}
    tensors = [t for t in state if isinstance(t, torch.Tensor)]
    for values in state.values():
        tensors += [v for v in values.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


class FreshState(dict):
    """The client state of a checkpoint that was not read: a script that asks for its step number gets 0."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def __missing__(self, key: Any) -> int:
        self._tell(f"the client state of a checkpoint was not read: {key!r} is taken as 0")
        return 0


def _load_checkpoint(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        session.context.assume(NOT_READ)
        tag = tag or _latest_tag(Path(load_dir))
        if tag is None or not (Path(load_dir) / str(tag)).is_dir():
            return None, None
        return str(Path(load_dir) / str(tag)), FreshState(session.context.assume)

    return load_checkpoint


def _latest_tag(folder: Path) -> str | None:
    try:
        return (folder / "latest").read_text().strip() or None
    except OSError:
        return None


# --- monitors ---


def _monitor_master(session: Session, original: Any, module: ModuleType) -> Any:
    """Enabled or not as configured, so that the engine reads back what it would report; but nobody is told."""

    @functools.wraps(original)
    def init(self: Any, monitor_config: Any) -> None:
        module.Monitor.__init__(self, monitor_config)
        self.tb_monitor = self.wandb_monitor = self.csv_monitor = self.comet_monitor = None
        self.enabled = monitor_config.enabled
        if self.enabled:
            session.context.assume(NO_MONITOR)

    return init


# --- Hugging Face Trainer and Accelerate ---


def _trainer_train(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            session.context.assume(NOT_READ)
        return original(self, None, *args, **kwargs)

    return train


def _reporting_callbacks(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def get_reporting_integration_callbacks(report_to: Any) -> list[Any]:
        if report_to and report_to not in ("none", ["none"]):
            session.context.assume(NO_MONITOR)
        return []

    return get_reporting_integration_callbacks


def _init_trackers(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init_trackers(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.log_with:
            session.context.assume(NO_MONITOR)
        self.trackers = []

    return init_trackers


_ENGINE = "deepspeed.runtime.engine"
_TRAINER = "transformers.trainer"
_ACCELERATOR = "accelerate.accelerator"
_SAVE, _LOAD = _skipped(NOT_WRITTEN), _skipped(NOT_READ)

HOOKS = (
    Hook(_ENGINE, "DeepSpeedEngine.save_checkpoint", _save_checkpoint, "checkpoints are emulated"),
    Hook(_ENGINE, "DeepSpeedEngine.load_checkpoint", _load_checkpoint, "checkpoints are emulated"),
    Hook(
        _ENGINE, "DeepSpeedEngine.save_16bit_model", _skipped(NOT_WRITTEN, True), "checkpoints are emulated"
    ),
    Hook("deepspeed.monitor.monitor", "MonitorMaster.__init__", _monitor_master, "monitors write nothing"),
    Hook(_TRAINER, "Trainer.train", _trainer_train, "resuming from a checkpoint", required=False),
    *(
        Hook(_TRAINER, f"Trainer.{name}", wrap, "checkpoints are emulated", required=False)
        for name, wrap in (
            ("_save_checkpoint", _SAVE),
            ("save_model", _SAVE),
            ("save_state", _SAVE),
            ("_load_best_model", _LOAD),
            ("init_hf_repo", _skipped("nothing is pushed to the Hugging Face Hub")),
            ("push_to_hub", _skipped("nothing is pushed to the Hugging Face Hub")),
        )
    ),
    Hook(
        _TRAINER,
        "get_reporting_integration_callbacks",
        _reporting_callbacks,
        "monitors write nothing",
        required=False,
    ),
    Hook(
        "transformers.modeling_utils",
        "PreTrainedModel.save_pretrained",
        _SAVE,
        "checkpoints are emulated",
        required=False,
    ),
    *(
        Hook(_ACCELERATOR, f"Accelerator.{name}", wrap, "checkpoints are emulated", required=False)
        for name, wrap in (
            ("save", _SAVE),
            ("save_state", _SAVE),
            ("save_model", _SAVE),
            ("load_state", _LOAD),
        )
    ),
    Hook(_ACCELERATOR, "Accelerator.init_trackers", _init_trackers, "monitors write nothing", required=False),
)
