"""DeepSpeed's pipeline engine: iterations."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session


def _train_batch(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.training_begins(self)
        result = original(self, *args, **kwargs)
        session.optimizer_stepped()
        return result

    return train_batch


HOOKS = (Hook("deepspeed.runtime.pipe.engine", "PipelineEngine.train_batch", _train_batch, "iterations"),)
