"""Progress over slices on stderr, and the streamed training log: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from prism_plugins.program.slices import SliceReport
from prism_plugins.streams import losing_output


class Progress:
    """What runs now. Used as a context manager; safe to call from the reader threads."""

    def __init__(self, *, quiet: bool = False) -> None:
        """``quiet``: only the slices' own output, for physical ranks that do not lead."""
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._lock = threading.Lock()
        self._running: dict[int, tuple[float, str]] = {}
        self._done = 0
        self._total = 0
        self._stage = ""
        self._output_announced = False
        self._live: Live | None = None
        self._stdout_is_terminal = sys.stdout.isatty()
        if self._console.is_terminal and not quiet:
            # stdout shares the terminal, or it goes to a file and cannot disturb the live line.
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=self._stdout_is_terminal,
                redirect_stderr=True,
            )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str, is_error: bool = False) -> None:
        """A line for the terminal, or for stdout or stderr."""
        if self._live is not None and (is_error or self._stdout_is_terminal):
            self._print_above(text)
            return
        stream = sys.stderr if is_error else sys.stdout
        with self._lock, losing_output(stream):
            stream.write(text + "\n")

    def output(self, text: str, is_error: bool = False) -> None:
        """A line that the script of a slice printed; before the first it is said what follows."""
        if not text.startswith(("prism:", "[prism]")):
            with self._lock:
                announced, self._output_announced = self._output_announced, True
            if not announced:
                self.note("what the script prints in slices follows; times in it are this machine's")
        self.line(text, is_error)

    def note(self, text: str) -> None:
        """A line of prism's own."""
        if not self._quiet:
            self.line(f"prism: {text}", is_error=True)

    def _print_above(self, text: str) -> None:
        # soft_wrap: the terminal breaks long lines, not rich, so that they can be copied whole.
        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def stage(self, text: str) -> None:
        """What the conductor does after the slices."""
        self._stage = text
        if self._live is None:
            self.note(text)

    def planned(self, total: int) -> None:
        """How many slices there will be."""
        self._total = total

    def started(self, rank: int, what: str = "") -> None:
        """A slice started; ``what`` is special about it, if anything."""
        name = f"rank {rank} ({what})" if what else f"rank {rank}"
        self._running[rank] = (time.monotonic(), name)
        if self._live is None:
            self.note(f"slice {name} started")

    def finished(self, rank: int, report: SliceReport) -> None:
        """A slice ended well, or was found in the cache."""
        self._running.pop(rank, None)
        self._done += 1
        count = f"{self._done}/{max(self._total, self._done)}"
        if report.cached:
            self.note(f"slice rank {rank} taken from the cache [{count}]")
        else:
            self.note(
                f"slice rank {rank} done in {report.seconds:.1f} s: {report.num_ops} ops, "
                f"{report.num_comms} collectives per iteration [{count}]"
            )

    def _render(self) -> Table:
        now = time.monotonic()
        if self._running:
            parts = [f"{name} {now - began:.0f} s" for _, (began, name) in sorted(self._running.items())]
            text = f"slices {self._done}/{max(self._total, self._done + len(parts))} · " + " · ".join(parts)
        else:
            text = self._stage or "planning"
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            Spinner("dots", style="cyan"),
            Text(f"prism: {text}", style="cyan", no_wrap=True, overflow="ellipsis"),
        )
        return grid
