"""Slices as child processes: start, stream their output, notice their end, end them.

Every slice leads a process group of its own, so that whatever it starts ends with it. Its output goes to
slices/<rank>/log.txt and, for the streamed ones, line by line to the console.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from prism_plugins.arming import slice_interpreter_flags
from prism_plugins.errors import FileFormatError
from prism_plugins.group_guard import GroupGuard
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.rundir import SliceDir, read_json, write_json, writing
from prism_plugins.slice_env import slice_environment

LineSink = Callable[[str, bool], None]
"""Takes a line of output (without newline) and whether it came from stderr."""

_GRACE_AFTER_REPORT_S = 10.0
"""How long a slice may take to unwind once its report is written."""
_GRACE_FOR_PEERS_S = 120.0
"""The same for ranks that run for real, which wait for each other."""
_GRACE_AFTER_SIGTERM_S = 1.0
_TAIL_LINES = 15
_REMEMBERED_LINES = 10_000
USER_ERROR = 2
"""Exit status of a process that a mistake of the user ended."""
ERROR_PREFIX = "prism: error: "


class SliceProcess:
    """One running child."""

    def __init__(self, spec: SliceSpec, *, sink: LineSink | None) -> None:
        self.spec = spec
        self.dir = SliceDir(Path(spec.slice_dir))
        self.started = time.monotonic()
        self._sink = sink
        self._report_seen: float | None = None
        self._grace_s = _GRACE_FOR_PEERS_S if spec.real_ranks else _GRACE_AFTER_REPORT_S
        with writing(self.dir.path):
            self.dir.path.mkdir(parents=True, exist_ok=True)
            for stale in (self.dir.report, self.dir.facts, self.dir.program, self.dir.journal):
                stale.unlink(missing_ok=True)
            write_json(self.dir.spec, spec)
            self._log = open(self.dir.log, "wb")  # noqa: SIM115  (closed in finish)
        self._lock = threading.Lock()
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.process = subprocess.Popen(
            [sys.executable, *slice_interpreter_flags(), "-m", "prism_plugins.slice", str(self.dir.spec)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=slice_environment(spec),
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, is_error), daemon=True)
            for pipe, is_error in ((self.process.stdout, False), (self.process.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    def ended(self) -> bool:
        """Whether the slice is over; one that lingers after its report is ended."""
        if self.process.poll() is not None:
            return True
        if self._report_seen is None:
            if self.dir.report.exists():
                self._report_seen = time.monotonic()
        elif time.monotonic() - self._report_seen > self._grace_s:
            self.kill()
            self.process.wait()
            return True
        return False

    def finish(self) -> SliceReport:
        """Collect the report of an ended slice."""
        self.kill()  # Whatever it left running.
        for reader in self._readers:
            reader.join(timeout=2.0)
        with self._lock, contextlib.suppress(OSError):
            self._log.close()
        if self.dir.report.exists():
            try:
                return read_json(self.dir.report, SliceReport)
            except FileFormatError as error:
                return self._died(str(error))
        return self._died("")

    def terminate(self) -> None:
        """Ask the whole group to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _died(self, why: str) -> SliceReport:
        code = self.process.returncode
        if code == USER_ERROR and self._tail and self._tail[-1].startswith(ERROR_PREFIX):
            # It could not even write its report (a full disk).
            return SliceReport(
                rank=self.spec.rank, status="user_error", message=self._tail[-1].removeprefix(ERROR_PREFIX)
            )
        if not why:
            if code is not None and code < 0:
                why = f"the process was ended by {signal.Signals(-code).name}"
                if code == -signal.SIGKILL:
                    why += " (out of memory? try fewer --prism-jobs)"
            else:
                why = f"the process ended with status {code} and no report"
        return SliceReport(
            rank=self.spec.rank,
            status="crashed",
            message=why,
            traceback="\n".join(self._tail),
            phase="unknown",
            seconds=time.monotonic() - self.started,
        )

    def _read(self, pipe: IO[bytes], is_error: bool) -> None:
        for line in pipe:
            with self._lock:
                if not self._log.closed:
                    # A full disk shows in the artefacts that matter; the log's loss must not stop the script.
                    with contextlib.suppress(OSError):
                        self._log.write(line)
                        self._log.flush()
            text = line.decode(errors="replace").rstrip("\n")
            self._tail.append(text)
            if self._sink is not None:
                self._sink(text, is_error)


class SlicePool:
    """The children that run now, at most ``jobs`` of them."""

    def __init__(self, jobs: int, sink: LineSink) -> None:
        self._jobs = jobs
        self._sink = sink
        self._running: list[SliceProcess] = []
        self._first_told: dict[str, int] = {}
        """Which rank printed a line on stderr first."""
        self._guard = GroupGuard()

    def __enter__(self) -> SlicePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def free(self) -> int:
        """How many more may start now."""
        return self._jobs - len(self._running)

    def start(self, spec: SliceSpec, *, stream: bool) -> None:
        """Start a slice. Must be called from the main thread, which the child's life is tied to."""
        child = SliceProcess(spec, sink=self._sink_of(spec.rank) if stream else None)
        self._running.append(child)
        self._guard.watch(child.process.pid)

    def _sink_of(self, rank: int) -> LineSink:
        """The sink without warnings that another slice printed already: each has the same ones. Its log has them all."""

        def sink(text: str, is_error: bool) -> None:
            if is_error and text.strip():
                known = len(self._first_told) < _REMEMBERED_LINES or text in self._first_told
                if known and self._first_told.setdefault(text, rank) != rank:
                    return
            self._sink(text, is_error)

        return sink

    def collect(self) -> list[tuple[SliceSpec, SliceReport]]:
        """Those that ended since the last call."""
        done = [child for child in self._running if child.ended()]
        self._running = [child for child in self._running if child not in done]
        return [(child.spec, self._finish(child)) for child in done]

    def stop(self) -> None:
        """End all children: SIGTERM, a moment, SIGKILL."""
        for child in self._running:
            child.terminate()
        deadline = time.monotonic() + _GRACE_AFTER_SIGTERM_S
        for child in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        for child in self._running:
            child.kill()
            child.process.wait()
            self._finish(child)
        self._running = []
        self._guard.close()

    def _finish(self, child: SliceProcess) -> SliceReport:
        report = child.finish()
        self._guard.forget(child.process.pid)
        return report
