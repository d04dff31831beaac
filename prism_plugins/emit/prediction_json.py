"""``prediction.json``: what other programs read. Keys are those of :class:`Prediction`; they do not change."""

from __future__ import annotations

from pathlib import Path

from prism_plugins.program.prediction import Prediction
from prism_plugins.rundir import read_json, write_json


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Write the prediction, atomically. Raises :class:`PrismError` when the place cannot be written."""
    write_json(path, prediction)


def read_prediction(path: Path) -> Prediction:
    """Read it back.

    Raises :class:`FileFormatError` for a file that is missing, truncated, foreign or of a newer schema.
    """
    return read_json(path, Prediction)
