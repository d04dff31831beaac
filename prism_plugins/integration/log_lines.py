"""A framework's own log lines: caught as they are printed, and what rewriting them at target scale needs.

A rewritten line shows predicted times and memory; what training would compute (losses, norms) is marked as
synthesized; counters and learning rates stay.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, TextIO

from prism_plugins.integration import SliceContext

SYNTHESIZED_MARK = "*"
NOT_PREDICTED = "not predicted"
TIMESTAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)\]")


def tap_stdout(context: SliceContext, is_log_line: Callable[[str], bool]) -> None:
    """Report the lines on stdout that are the framework's log; the output itself is unchanged."""
    context.patch(
        sys, "stdout", LogTap(sys.stdout, context.log_line, is_log_line), why="the framework's log lines"
    )


class LogTap:
    """A text stream that hands complete log lines on."""

    def __init__(
        self, stream: TextIO, report: Callable[[str], None], is_log_line: Callable[[str], bool]
    ) -> None:
        self._stream = stream
        self._report = report
        self._is_log_line = is_log_line
        self._pending = ""

    def write(self, text: str) -> int:
        """Write on; report the lines that ``text`` completes."""
        *complete, self._pending = (self._pending + text).split("\n")
        for line in complete:
            if self._is_log_line(line):
                self._report(line.rstrip())
        return self._stream.write(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PredictedClock:
    """Timestamps that advance by the predicted time from the first line on."""

    def __init__(self, iteration_time_ms: float) -> None:
        self._step = timedelta(milliseconds=iteration_time_ms)
        self._first: tuple[datetime, int] | None = None

    def stamp(self, line: str, iteration: int) -> str:
        """The line of an iteration, its timestamp (if it has one) moved."""
        found = TIMESTAMP.search(line)
        if not found:
            return line
        text = found.group(1)
        mark = next((m for m in ".," if m in text), "")
        form = "%Y-%m-%d %H:%M:%S" + (f"{mark}%f" if mark else "")
        if self._first is None:
            self._first = datetime.strptime(text, form), iteration
        start, first = self._first
        time = (start + self._step * (iteration - first)).strftime(form)
        if mark == ",":  # Python's logging: milliseconds
            time = time[:-3]
        return f"{line[: found.start(1)]}{time}{line[found.end(1) :]}"


def holds_rank(ranks: str, rank: int) -> bool:
    """Whether a compact list such as ``0-7,64`` holds a rank."""
    for part in ranks.split(","):
        first, _, last = part.strip().partition("-")
        if first and int(first) <= rank <= int(last or first):
            return True
    return False
