"""Programs on disk: one uncompressed ``.npz`` file, never a pickle.

Members: ``events`` (the structured array) and ``tables`` (UTF-8 JSON as bytes: schema, rank, source and the
tables the events refer to). Uncompressed on purpose: a stored member cannot claim more bytes than the file has,
so a hostile file cannot ask the reader for absurd amounts of memory.

A reader gets either a program whose every reference is in range, or :class:`FileFormatError`.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import msgspec
import numpy as np

from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.files import open_regular
from prism_plugins.program.model import (
    EVENT_DTYPE,
    SCHEMA,
    Allocation,
    CommSignature,
    EventKind,
    GroupInfo,
    MemoryCategory,
    OpSignature,
    Phase,
    Program,
)


class _Header(msgspec.Struct):
    format: str
    schema: int


class _Tables(msgspec.Struct, kw_only=True):
    format: str = "prism-program"
    schema: int = SCHEMA
    rank: int
    source: str
    signatures: list[OpSignature]
    comms: list[CommSignature]
    groups: list[GroupInfo]
    phases: list[Phase]
    initial: list[Allocation]


def save_program(program: Program, path: str | Path) -> None:
    """Write a program to a temporary file beside ``path`` and rename it.

    Raises :class:`PrismError` when the file cannot be written (read-only directory, full disk).
    """
    path = Path(path)
    tables = _Tables(
        rank=program.rank,
        source=program.source,
        signatures=program.signatures,
        comms=program.comms,
        groups=program.groups,
        phases=program.phases,
        initial=program.initial,
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(
                file,
                events=np.ascontiguousarray(program.events, dtype=EVENT_DTYPE),
                tables=np.frombuffer(msgspec.json.encode(tables), dtype=np.uint8),
            )
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PrismError(f"cannot write the program file {path}: {error.strerror or error}") from error


def load_program(path: str | Path) -> Program:
    """Read a program back and check it.

    Raises :class:`FileFormatError` for a file that is missing, truncated, foreign, of a newer schema, or whose
    references point outside its tables.
    """
    path = Path(path)
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            events = read_member(archive, "events", EVENT_DTYPE, path)
            encoded = read_member(archive, "tables", np.dtype(np.uint8), path)
    except (OSError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, KeyError) as error:
        raise FileFormatError(
            f"{path} is not a readable program file ({error}); run the job again"
        ) from error
    program = _decode(events, encoded.tobytes(), path)
    _check(program, path)
    return program


def read_member(archive: zipfile.ZipFile, name: str, dtype: np.dtype, path: Path) -> np.ndarray:
    """A one-dimensional array of an archive. Raises :class:`FileFormatError` and what :mod:`zipfile` raises."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise FileFormatError(f"{path}: member {name} is compressed; this is not a file prism wrote")
    data = archive.read(info)  # reads at most the bytes the file has, and checks their CRC
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        shape, _, stored = np.lib.format.read_array_header_1_0(stream)
    except (ValueError, EOFError, SyntaxError) as error:
        raise FileFormatError(f"{path}: member {name} is not an array ({error})") from error
    offset = stream.tell()
    if stored != dtype or len(shape) != 1 or shape[0] * dtype.itemsize != len(data) - offset:
        raise FileFormatError(
            f"{path}: member {name} is {stored} {shape} with {len(data) - offset} bytes, not an array of {dtype}"
        )
    return np.frombuffer(data, dtype=dtype, offset=offset)


def _decode(events: np.ndarray, encoded: bytes, path: Path) -> Program:
    try:
        header = msgspec.json.decode(encoded, type=_Header)
        if header.format != "prism-program":
            raise FileFormatError(f"{path} is not a program file (format {header.format!r})")
        if header.schema > SCHEMA:
            raise FileFormatError(
                f"{path} has schema {header.schema}, this prism reads up to {SCHEMA}; update prism-plugins"
            )
        tables = msgspec.json.decode(encoded, type=_Tables)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path}: tables cannot be read ({error})") from error
    return Program(
        rank=tables.rank,
        events=events,
        signatures=tables.signatures,
        comms=tables.comms,
        groups=tables.groups,
        phases=tables.phases,
        initial=tables.initial,
        source=tables.source,
    )


def _check(program: Program, path: Path) -> None:
    """Raise :class:`FileFormatError` unless everything the program refers to exists."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise FileFormatError(f"{path}: {what}; the file is damaged or was not written by prism")

    kinds = program.events["kind"]
    refs = program.events["ref"]
    require(program.rank >= 0, f"rank {program.rank}")
    require(not len(kinds) or int(kinds.max()) <= max(EventKind), "unknown event kind")
    for kind, table, what in (
        (EventKind.KERNEL, program.signatures, "signature"),
        (EventKind.COMM, program.comms, "communication"),
    ):
        used = refs[kinds == kind]
        require(
            not len(used) or int(used.max()) < len(table), f"an event refers to a {what} that is not there"
        )
    host_work = refs[kinds == EventKind.HOST]
    require(
        not len(host_work) or int(host_work.max()) <= len(program.signatures),
        "host work refers to a signature that is not there",
    )
    _check_phases(kinds, refs, len(program.phases), require)
    _check_allocations(program, require)
    for signature in program.signatures:
        problem = signature.problem()
        require(not problem, problem)
    for group in program.groups:
        require(
            len(group.ranks) > 0 and min(group.ranks) >= 0, f"group {group.name} has ranks {group.ranks[:8]}"
        )
        require(len(set(group.ranks)) == len(group.ranks), f"group {group.name} names a rank twice")
    for comm in program.comms:
        require(0 <= comm.group < len(program.groups), f"{comm.kind} refers to a group that is not there")
        require(-1 <= comm.peer < len(program.groups[comm.group].ranks), f"{comm.kind} has peer {comm.peer}")
        require(min(comm.in_numel, comm.out_numel) >= 0, f"{comm.kind} has a negative size")


def _check_phases(kinds: np.ndarray, refs: np.ndarray, num_phases: int, require) -> None:
    marks = (kinds == EventKind.PHASE_BEGIN) | (kinds == EventKind.PHASE_END)
    mark_kinds, mark_refs = kinds[marks], refs[marks]
    require(
        not len(mark_refs) or int(mark_refs.max()) < num_phases,
        "an event refers to a phase that is not there",
    )
    nested = len(mark_kinds) % 2 != 0 or not (
        np.all(mark_kinds[0::2] == EventKind.PHASE_BEGIN)
        and np.all(mark_kinds[1::2] == EventKind.PHASE_END)
        and np.array_equal(mark_refs[0::2], mark_refs[1::2])
    )
    require(not nested, "phases nest or stay open")


def _check_allocations(program: Program, require) -> None:
    kinds, refs = program.events["kind"], program.events["ref"]
    allocs = kinds == EventKind.ALLOC
    require(all(max(abs(a.id), a.nbytes) < 2**63 for a in program.initial), "an allocation is out of range")
    initial = np.array([a.id for a in program.initial], dtype=np.int64)
    made = np.concatenate([initial, refs[allocs].astype(np.int64)])
    freed = refs[kinds == EventKind.FREE].astype(np.int64)
    require(min((a.nbytes for a in program.initial), default=0) >= 0, "an allocation has a negative size")
    require(
        {a.category for a in program.initial} <= set(MemoryCategory), "an allocation has an unknown category"
    )
    require(
        not allocs.any() or int(program.events["value"][allocs].min()) >= 0,
        "an allocation has a negative size",
    )
    made, freed = np.sort(made), np.sort(freed)
    require(not (made[1:] == made[:-1]).any(), "an allocation id is used twice")
    require(not (freed[1:] == freed[:-1]).any(), "an allocation is freed twice")
    known = made[np.minimum(np.searchsorted(made, freed), len(made) - 1)] if len(made) else freed - 1
    require(bool((known == freed).all()), "an allocation is freed that was never made")
