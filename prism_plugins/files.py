"""Reading and writing what users name: a path may be a folder, a pipe that nobody writes to, a device without end."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from prism_plugins.errors import FileFormatError


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading; the caller closes it.

    Raises :class:`FileFormatError`, one line that names the path, where it is missing, unreadable or not a regular file.
    """
    try:
        # Without O_NONBLOCK a pipe would keep the program waiting for its other side.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileFormatError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "directory" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device"
        raise FileFormatError(f"{path} cannot be read: Is a {what}")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path | str, *, max_bytes: int) -> bytes:
    """All of a file. Raises as :func:`open_regular`, also for a file of more than ``max_bytes``."""
    with open_regular(path) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise FileFormatError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise FileFormatError(f"{path} is larger than {max_bytes >> 20} MiB; that is not one")
    return data


def read_text(path: Path | str, *, max_bytes: int) -> str:
    """All of a file as UTF-8 text. Raises as :func:`read_regular`, also for bytes that are not UTF-8."""
    try:
        return read_regular(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise FileFormatError(f"{path} cannot be read: it is not UTF-8 text") from None


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished file to ``path``. A device or pipe there is written to, not replaced: to root a rename would
    take ``/dev/null`` from the whole machine.

    Raises:
        OSError: as ``os.replace`` and ``open`` do.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        os.replace(temporary, path)
        return
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
    )  # An error for a pipe without a reader.
    os.set_blocking(descriptor, True)
    with open(temporary, "rb") as source, os.fdopen(descriptor, "wb") as target:
        shutil.copyfileobj(source, target)
    temporary.unlink()
