"""Standard streams that the caller closed (``>&-``), that go away while we write (``| head``, a full disk), or whose
encoding lacks what we print."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

from rich.console import Console

_CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def visible(text: str) -> str:
    """Text from a file that anyone may have written, without what steers a terminal (escape sequences)."""
    return text.translate(_CONTROL)


def prepare_streams() -> None:
    """Put the null device where a stream was closed; have characters that an encoding lacks shown as ``?``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def losing_output(stream: TextIO) -> Iterator[None]:
    """Print in the block; where the stream cannot take it, give the stream up: a run ends well without its console."""
    try:
        yield
        stream.flush()
    except OSError as error:
        give_up(stream)
        if error.errno != errno.EPIPE and stream is not sys.stderr:
            with losing_output(sys.stderr):
                print(f"prism: the output is lost from here on: {error.strerror}", file=sys.stderr)


def give_up(stream: TextIO) -> None:
    """Let whatever is still written to the stream vanish, also what is written at the interpreter's exit."""
    # A stream without a descriptor (in tests) has nothing to replace.
    with contextlib.suppress(OSError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


class PipeConsole(Console):
    """A console that leaves a broken pipe to the caller (rich ends the process with status 1)."""

    def on_broken_pipe(self) -> NoReturn:
        """Called by rich while it handles the BrokenPipeError."""
        raise
