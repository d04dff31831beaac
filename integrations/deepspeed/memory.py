"""What the device memory of a DeepSpeed engine is for."""

from __future__ import annotations

from typing import Any

from prism_plugins.integration import SliceContext
from prism_plugins.program.model import MemoryCategory


def tag_engine(context: SliceContext, engine: Any) -> None:
    """Tag parameters."""
    for param in engine.module.parameters():
        context.tag(param.data, MemoryCategory.PARAMETERS)
