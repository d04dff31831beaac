"""What a shared library needs, read from its file: no compiler's tools, nothing is loaded."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_DYNAMIC, _LOAD = 2, 1  # program header types
_NULL, _NEEDED, _STRTAB = 0, 1, 5  # dynamic tags


def needed_libraries(path: Path) -> list[str]:
    """Names (``DT_NEEDED``) of the libraries that a 64-bit ELF file is linked to.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no 64-bit little-endian ELF file, or is damaged.
    """
    with open(path, "rb") as file:
        if file.seek(0, 2) < 64:
            raise ValueError(f"{path} is too short for an ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _needed(data)
            except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is damaged: {error}") from None


def _needed(data: mmap.mmap) -> list[str]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    offset, size, count = (
        *struct.unpack_from("<Q", data, 32),
        *struct.unpack_from("<HH", data, 54),
    )
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    loads = [(address, begin, length) for kind, _, begin, address, _, length in headers if kind == _LOAD]
    dynamic = next((h for h in headers if h[0] == _DYNAMIC), None)
    if dynamic is None:
        return []
    entries = []
    for at in range(dynamic[2], dynamic[2] + dynamic[5], 16):
        tag, value = struct.unpack_from("<qQ", data, at)
        if tag == _NULL:
            break
        entries.append((tag, value))
    strings = next((value for tag, value in entries if tag == _STRTAB), None)
    if strings is None:
        return []
    start = next((strings - a + begin for a, begin, length in loads if a <= strings < a + length), None)
    if start is None:
        raise IndexError("its names are in no segment")
    names = []
    for tag, value in entries:
        if tag == _NEEDED:
            end = data.find(b"\0", start + value)
            if end < 0:
                raise IndexError("a name without an end")
            names.append(data[start + value : end].decode())
    return names
