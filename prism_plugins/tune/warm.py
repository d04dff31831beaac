"""The search's side of a warm slice: starts the script once, has copies of it judge command lines and run probes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from prism_plugins.arming import slice_interpreter_flags
from prism_plugins.device.build import find_torch, library_path, obstacle
from prism_plugins.errors import FileFormatError, PrismError, SliceFailed
from prism_plugins.integration.tuning import Verdict
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.rundir import SliceDir, read_json, write_json
from prism_plugins.slice_env import slice_environment

_START_S = 300.0
_PROBE_S = 300.0
_JUDGED_AT_ONCE = 200


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a copy of the stopped process."""

    number: int
    spec: SliceSpec | None = None
    """Run on as this slice (rank 0 of some world) …"""
    commands: tuple[tuple[str, ...], ...] = ()
    """… or judge these command lines for a world of ``world_size`` ranks and write the verdicts to ``out``."""
    world_size: int = 1
    out: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The copy of a request ended; -1: the script stands where it reads its command line."""

    number: int
    status: int = 0


class WarmScript:
    """The stopped script. Use as a context manager; every method is called from one thread."""

    def __init__(self, spec: SliceSpec, directory: Path) -> None:
        """``spec`` is the slice of rank 0 of the user's own launch; files lie under ``directory``."""
        self._directory = directory
        self._spec = msgspec.structs.replace(spec, slice_dir=str(directory / "warm"))
        self._number = 0
        self._buffer = b""
        self._log = directory / "warm" / "log.txt"

    def __enter__(self) -> WarmScript:
        torch = find_torch()
        if obstacle(torch) is None:
            library_path(torch)  # Compiled before the time that the script has for its start.
        folder = self._directory / "warm"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").unlink(missing_ok=True)
        write_json(folder / "spec.json", self._spec)
        request_end, self._requests = os.pipe()
        self._answers, answer_end = os.pipe()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, *slice_interpreter_flags(), "-m", "prism_plugins.tune.warm_slice",
                    str(folder / "spec.json"), str(request_end), str(answer_end),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=slice_environment(self._spec),
                pass_fds=(request_end, answer_end),
                start_new_session=True,
            )  # fmt: skip
        os.close(request_end)
        os.close(answer_end)
        try:
            self._wait_for(-1, timeout_s=_START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def judge(self, commands: Sequence[tuple[str, ...]], *, world_size: int) -> list[Verdict]:
        """The framework's verdicts on command lines (argv, script first), in order; empty when no framework judges."""
        verdicts: list[Verdict] = []
        for start in range(0, len(commands), _JUDGED_AT_ONCE):
            part = tuple(commands[start : start + _JUDGED_AT_ONCE])
            out = self._directory / "warm" / "verdicts.json"
            out.unlink(missing_ok=True)
            number = self._send(commands=part, world_size=world_size, out=str(out))
            self._wait_for(number, timeout_s=_PROBE_S)
            if not out.exists():
                raise SliceFailed(
                    f"prism: error: the validation of {len(part)} layouts ended early; see {self._log}"
                )
            verdicts += msgspec.json.decode(out.read_bytes(), type=list[Verdict])
        return verdicts

    def run(
        self,
        commands: Iterable[tuple[str, tuple[str, ...]]],
        *,
        world_size: int,
        jobs: int,
        give_up_at: float = float("inf"),
    ) -> Iterator[tuple[str, SliceReport, SliceDir]]:
        """Run command lines as slices of rank 0 of ``world_size`` ranks, ``jobs`` at a time; yields (name, report, files) as they end.

        ``commands`` are (name of the directory, argv). No more are started after the monotonic time ``give_up_at``.
        """
        waiting = iter(commands)
        running: dict[int, tuple[str, SliceDir]] = {}
        exhausted = False
        while True:
            while not exhausted and len(running) < jobs and time.monotonic() < give_up_at:
                following = next(waiting, None)
                if following is None:
                    exhausted = True
                    break
                name, argv = following
                folder = SliceDir(self._directory / "probes" / name)
                folder.report.unlink(missing_ok=True)
                spec = msgspec.structs.replace(
                    self._spec, argv=argv, world_size=world_size, slice_dir=str(folder.path)
                )
                number = self._send(spec=spec)
                running[number] = (name, folder)
            if not running:
                return
            answer = self._next(timeout_s=_PROBE_S)
            if answer.number in running:
                name, folder = running.pop(answer.number)
                yield name, _report(folder, answer.status), folder

    def _send(
        self,
        *,
        spec: SliceSpec | None = None,
        commands: tuple[tuple[str, ...], ...] = (),
        world_size: int = 1,
        out: str = "",
    ) -> int:
        self._number += 1
        line = msgspec.json.encode(
            Request(number=self._number, spec=spec, commands=commands, world_size=world_size, out=out)
        )
        data = memoryview(line + b"\n")
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except OSError:
            raise self._ended() from None
        return self._number

    def _wait_for(self, number: int, *, timeout_s: float) -> None:
        while self._next(timeout_s=timeout_s).number != number:
            pass

    def _next(self, *, timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SliceFailed(
                    f"prism: error: no answer from the script for {timeout_s:.0f} s; see {self._log}"
                )
            if not select.select([self._answers], [], [], left)[0]:
                continue
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise self._ended()
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return msgspec.json.decode(line, type=Answer)

    def _ended(self) -> Exception:
        """Why the script is gone."""
        self._process.wait()
        folder = SliceDir(self._directory / "warm")
        with contextlib.suppress(FileFormatError):
            report = read_json(folder.report, SliceReport)
            if report.status == "user_error":
                return PrismError(report.message)
            if report.status == "never_trained" or report.status == "ok":
                return PrismError(
                    "the script does not read its command line with argparse, so that no layout can be tried; "
                    "prism tune changes arguments"
                )
            return SliceFailed(f"prism: error: the script failed: {report.message}; its output: {self._log}")
        return SliceFailed(
            f"prism: error: the script ended with {self._process.returncode}; its output: {self._log}"
        )


def _report(folder: SliceDir, status: int) -> SliceReport:
    try:
        return read_json(folder.report, SliceReport)
    except FileFormatError:
        code = os.waitstatus_to_exitcode(status)
        return SliceReport(rank=0, status="crashed", message=f"the process ended with {code} and no report")
