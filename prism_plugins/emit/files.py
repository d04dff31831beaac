"""Writing a file so that readers see all of it or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from prism_plugins.files import put_in_place
from prism_plugins.rundir import writing


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file under a temporary name beside ``path``, renamed when the block ends well.

    Raises :class:`PrismError` when the directory cannot be written or the disk is full; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                yield file
            put_in_place(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
