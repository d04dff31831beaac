"""``prediction.json``: what other programs read. Keys are those of :class:`Prediction`; they do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.program.prediction import Prediction
from prism_plugins.rundir import read_json, write_json
from prism_plugins.streams import visible


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Write the prediction, atomically. Raises :class:`PrismError` when the place cannot be written."""
    write_json(path, prediction)


def read_prediction(path: Path) -> Prediction:
    """Read it back.

    Control characters in its texts are replaced: they would steer the terminal that shows them.
    Raises :class:`FileFormatError` for a file that is missing, truncated, foreign or of a newer schema.
    """
    return msgspec.convert(_visible(msgspec.to_builtins(read_json(path, Prediction))), Prediction)


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, (list, tuple)) else value
