"""Protocol buffers' wire format, as much as traces need (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations


def varint(value: int, width: int = 0) -> bytes:
    """A base-128 varint; ``width`` pads it to so many bytes, which readers take as the same number."""
    out = bytearray()
    while value > 0x7F or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int, width: int = 0) -> bytes:
    """A field of an integer, bool or enum type; ``value`` is not negative."""
    return varint(field << 3) + varint(value, width)


def fixed64(field: int, value: int) -> bytes:
    """A ``fixed64`` field."""
    return varint(field << 3 | 1) + value.to_bytes(8, "little")


def block(field: int, data: bytes | str) -> bytes:
    """A string, bytes or embedded message field."""
    if isinstance(data, str):
        data = data.encode("utf-8", "replace")
    return varint(field << 3 | 2) + varint(len(data)) + data
