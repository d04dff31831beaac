"""``predicted.log``: the framework's own log lines as the target job would print them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prism_plugins.program.prediction import Prediction
from prism_plugins.rundir import write_bytes


def log_text(lines: Sequence[str], prediction: Prediction) -> str:
    """The lines under a header that says what in them is predicted and what is synthesized."""
    marked = ", marked *" if any("*" in line for line in lines) else ""
    header = (
        f"# {prediction.framework} log of {prediction.world_size} ranks on {prediction.cluster}, predicted by prism",
        f"# predicted: times, throughput, memory ({prediction.cost_model})",
        f"# synthesized{marked}: what training would compute (loss, gradient norm, learned scales); no model was trained",
    )
    return "\n".join((*header, *lines)) + "\n"


def write_predicted_log(path: Path, lines: Sequence[str], prediction: Prediction) -> None:
    """Write the log, atomically. Raises :class:`PrismError` when the place cannot be written."""
    write_bytes(path, log_text(lines, prediction).encode())
