"""Writing a file so that readers see all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from prism_plugins.errors import PrismError


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file under a temporary name in the same directory, renamed to ``path`` when the block ends well.

    Raises :class:`PrismError` when the directory cannot be written or the disk is full; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise PrismError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise PrismError(f"cannot write {path}: {error.strerror}") from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
