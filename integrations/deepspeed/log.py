"""DeepSpeed's log lines."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.integration import SliceContext
from prism_plugins.integration.log_lines import tap_stdout
from prism_plugins.program.prediction import Prediction


def is_log_line(line: str) -> bool:
    """Whether DeepSpeed prints this line once per step."""
    return "time (ms)" in line or "SamplesPerSec" in line


def tap_log(context: SliceContext) -> None:
    """Report the log lines that the script prints."""
    tap_stdout(context, is_log_line)


def rewrite_lines(lines: Sequence[str], prediction: Prediction) -> list[str]:
    """The lines as the target job would print them."""
    return list(lines)
