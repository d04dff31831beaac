"""Files that users name are written whole, and what is no file keeps its kind."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from prism_plugins.emit.files import replaced_file
from prism_plugins.errors import PrismError
from prism_plugins.rundir import write_bytes


def _write(path: Path, data: bytes) -> None:
    with replaced_file(path) as file:
        file.write(data)


WRITERS = pytest.mark.parametrize("write", [write_bytes, _write])


@WRITERS
def test_a_file_is_replaced(write, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@WRITERS
def test_a_pipe_gets_the_bytes_and_stays_a_pipe(write, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = threading.Thread(target=write, args=(path, b"bytes"))
        writer.start()
        writer.join(timeout=10)
        assert os.read(reading, 100) == b"bytes"
    finally:
        os.close(reading)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


@WRITERS
def test_a_pipe_that_nobody_reads_is_an_error(write, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(PrismError, match="cannot write"):
        write(path, b"bytes")
    assert list(tmp_path.iterdir()) == [path]


@WRITERS
def test_a_device_stays_a_device(write, tmp_path):
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    write(path, b"bytes")
    assert path.is_symlink()
    assert stat.S_ISCHR(path.stat().st_mode)
