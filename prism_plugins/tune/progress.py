"""Progress of a search on stderr: a bar with the best so far on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from prism_plugins.tune.result import Candidate, Counts, describe

_LINE_EVERY_S = 5.0


class TuneProgress:
    """Use as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        console = Console(stderr=True, highlight=False)
        self._bar = (
            Progress(
                SpinnerColumn(),
                TextColumn("prism tune: {task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[best]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal and not quiet
            else None
        )
        self._task: TaskID | None = None
        self._probes = 0
        self._told = 0.0

    def __enter__(self) -> TuneProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None, best="")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """What is done now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)
        else:
            self._line(text)

    def probed(self) -> None:
        """A reduced slice ended."""
        self._probes += 1

    def composed(self, best: Candidate | None, *, done: int, total: int, kinds: int, counts: Counts) -> None:
        """Another batch of points was composed."""
        text = f"{counts.legal} legal layouts, {counts.composed} composed from {kinds} kinds of layer"
        told = _told(best)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=done, total=total, best=told)
        elif time.monotonic() - self._told > _LINE_EVERY_S or done == total:
            self._told = time.monotonic()
            self._line(f"{text} ({done} of {total} looked at); {told}")

    def emulated(self, candidate: Candidate, *, best: Candidate | None) -> None:
        """A layout was emulated in full; ``best`` of those so far fits and is the fastest."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, best=_told(best))
        elif candidate.best is not None:
            self._line(
                f"emulated {candidate.best.iteration_ms:,.0f} ms: {describe(candidate.knobs)}; {_told(best)}"
            )

    def _line(self, text: str) -> None:
        if not self._quiet:
            print(f"prism tune: {text}", file=sys.stderr, flush=True)


def _told(candidate: Candidate | None) -> str:
    if candidate is None or candidate.best is None:
        return "nothing fits so far"
    return (
        f"best {candidate.best.iteration_ms:,.0f} ms ({candidate.best.source}): {describe(candidate.knobs)}"
    )
