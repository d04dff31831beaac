"""``prediction.json``: what other programs read. Keys are those of :class:`Prediction`; they do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.errors import FileFormatError
from prism_plugins.program.prediction import Prediction
from prism_plugins.rundir import read_json, write_json
from prism_plugins.streams import visible

_INT_BITS = 64


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Write the prediction, atomically. Raises :class:`PrismError` when the place cannot be written."""
    write_json(path, prediction)


def read_prediction(path: Path) -> Prediction:
    """Read it back.

    Control characters in its texts are replaced: they would steer the terminal that shows them.
    Raises :class:`FileFormatError` for a file that is missing, truncated, foreign, of a newer schema, or with integers
    that no prediction holds (they do not fit 64 bits).
    """
    read = read_json(path, Prediction)
    try:
        return msgspec.convert(_visible(msgspec.to_builtins(read)), Prediction)
    except OverflowError as error:
        raise FileFormatError(f"{path} is not what it should be (Prediction): {error}") from None


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        raise OverflowError(f"an integer of {value.bit_length()} bits")
    if isinstance(value, dict):
        return {visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, (list, tuple)) else value
