"""Derived stages on disk, so that a finished run need not derive them again: how each differs from the program it was
derived from.

``derived.npz``, uncompressed as programs are (:mod:`.store`): ``tables`` (JSON: format, schema, one entry for each derived
program), ``pieces`` (first captured event or -1, number of events; int64) and ``rows`` (the events of pieces that begin with
-1). Nothing in it is believed: an entry counts only for the very program and schedules it was made from, by digest, and what
comes out has to do the same work as the captured program, as when it was derived. Whatever is wrong with a file, stages
are derived anew.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from prism_plugins import __version__
from prism_plugins.errors import CannotDeriveError, FileFormatError, PrismError
from prism_plugins.program.derive import Derived, replace_schedule, with_phases
from prism_plugins.program.model import EVENT_DTYPE, SCHEMA, EventKind, Phase, Program
from prism_plugins.program.store import read_member
from prism_plugins.program.work import Work

_OF_NO_TABLE = (
    EventKind.WORK_WAIT,
    EventKind.EVENT_RECORD,
    EventKind.EVENT_WAIT,
    EventKind.EVENT_SYNC,
    EventKind.ALLOC,
    EventKind.FREE,
)
"""Kinds of events whose reference is a number, not an index."""


class _Entry(msgspec.Struct, frozen=True):
    digest: str
    num_pieces: int
    num_rows: int


class _Tables(msgspec.Struct, kw_only=True):
    format: str = "prism-derived"
    schema: int = SCHEMA
    entries: list[_Entry] = []


class DerivedStages:
    """The derived programs of a run: those of its file, and those that are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, tuple[np.ndarray, np.ndarray]] | None = None
        """Digest → pieces, shape (n, 2), and rows."""
        self._events: dict[str, np.ndarray] = {}
        """Digest → events that were checked."""
        self._has_new = False
        self._sources: dict[int, tuple[Program, bytes, Work | None]] = {}

    def get(self, captured: Program, schedule: Sequence[Phase], target: Sequence[Phase]) -> Program | None:
        """The program of a stage with the schedule ``target``, derived from one with ``schedule``; None if there is none."""
        if self._kept is None:
            self._kept = self._read()
        digest = self._digest(captured, schedule, target)
        if digest not in self._kept:
            return None
        try:
            phases = replace_schedule(_phases_run(captured), schedule, target)
            known = self._events.get(digest)
            if known is not None:  # of a rank whose slice has the same events
                return with_phases(captured, known, phases)
            events = _put_together(captured, *self._kept[digest])
            if events is None:
                return None
            program = with_phases(captured, events, phases)
            self._work(captured).check(Work(program.events))
        except (CannotDeriveError, ValueError):
            return None
        self._events[digest] = events
        return program

    def add(
        self, captured: Program, schedule: Sequence[Phase], target: Sequence[Phase], derived: Derived
    ) -> None:
        """Keep a derived program."""
        if self._kept is None:
            self._kept = self._read()
        digest = self._digest(captured, schedule, target)
        self._kept[digest] = _taken_apart(captured, derived)
        self._events[digest] = derived.program.events
        self._has_new = True

    def save(self) -> None:
        """Write the file anew if something was added. Raises :class:`PrismError` when it cannot be written."""
        if not self._has_new or self._kept is None:
            return
        kept = self._kept
        tables = _Tables(entries=[_Entry(digest, len(p), len(r)) for digest, (p, r) in kept.items()])
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                np.savez(
                    file,
                    tables=np.frombuffer(msgspec.json.encode(tables), dtype=np.uint8),
                    pieces=np.concatenate([p.ravel() for p, _ in kept.values()]),
                    rows=np.concatenate([r.view("V16") for _, r in kept.values()]).view(EVENT_DTYPE),
                )
            os.replace(temporary, self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise PrismError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._has_new = False

    def _read(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                tables = msgspec.json.decode(
                    read_member(archive, "tables", np.dtype(np.uint8), self._path).tobytes(), type=_Tables
                )
                pieces = read_member(archive, "pieces", np.dtype(np.int64), self._path)
                rows = read_member(archive, "rows", EVENT_DTYPE, self._path)
        except (
            OSError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, KeyError, FileFormatError,
            msgspec.MsgspecError, UnicodeDecodeError, RecursionError,
        ):  # fmt: skip
            return {}
        if tables.format != "prism-derived" or tables.schema != SCHEMA:
            return {}
        kept = {}
        piece = row = 0
        for entry in tables.entries:
            if entry.num_pieces < 0 or entry.num_rows < 0:
                return {}
            mine = pieces[2 * piece : 2 * (piece + entry.num_pieces)]
            kept[entry.digest] = mine[: len(mine) // 2 * 2].reshape(-1, 2), rows[row : row + entry.num_rows]
            piece, row = piece + entry.num_pieces, row + entry.num_rows
        return kept

    def _source(self, captured: Program) -> tuple[Program, bytes, Work | None]:
        known = self._sources.get(id(captured))
        if known is None:
            digest = hashlib.blake2b(np.ascontiguousarray(captured.events).data, digest_size=16)
            digest.update(
                msgspec.json.encode(
                    (__version__, SCHEMA, captured.phases, captured.initial, len(captured.comms))
                )
            )
            known = self._sources[id(captured)] = (captured, digest.digest(), None)
        return known

    def _digest(self, captured: Program, schedule: Sequence[Phase], target: Sequence[Phase]) -> str:
        digest = hashlib.blake2b(self._source(captured)[1], digest_size=16)
        digest.update(msgspec.json.encode((schedule, target)))
        return digest.hexdigest()

    def _work(self, captured: Program) -> Work:
        _, digest, work = self._source(captured)
        if work is None:
            work = Work(captured.events)
            self._sources[id(captured)] = (captured, digest, work)
        return work


def _phases_run(program: Program) -> tuple[Phase, ...]:
    """The phases of a program in the order in which they ran."""
    begins = program.events["ref"][program.events["kind"] == EventKind.PHASE_BEGIN]
    return tuple(program.phases[i] for i in begins.tolist())


def _taken_apart(captured: Program, derived: Derived) -> tuple[np.ndarray, np.ndarray]:
    """Pieces and rows of a derived program."""
    events, origin = derived.program.events, derived.origin.copy()
    mine = np.ascontiguousarray(events).view(np.int64).reshape(-1, 2)
    its = np.ascontiguousarray(captured.events).view(np.int64).reshape(-1, 2)
    marks = (events["kind"] == EventKind.PHASE_BEGIN) | (events["kind"] == EventKind.PHASE_END)
    origin[~marks & (mine != its[origin]).any(axis=1)] = -1
    new = origin < 0
    opens = np.ones(len(origin), dtype=bool)
    opens[1:] = np.where(new[1:], ~new[:-1], origin[1:] != origin[:-1] + 1)
    first = np.flatnonzero(opens)
    pieces = np.stack((np.maximum(origin[first], -1), np.diff(np.append(first, len(origin)))), axis=1)
    return pieces.astype(np.int64), events[new].copy()


def _put_together(captured: Program, pieces: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """The events of a derived program, but for its phases; None when there cannot be such ones."""
    first, length = pieces[:, 0], pieces[:, 1]
    n = len(captured.events)
    if not len(pieces) or first.min() < -1 or length.min() < 1 or length.max() > 2 * n or first.max() >= n:
        return None
    total = int(length.sum())
    is_new = first < 0
    if (
        total > 2 * n
        or int(length[is_new].sum()) != len(rows)
        or (first + length)[~is_new].max(initial=0) > n
    ):
        return None
    kinds = rows["kind"]
    calls = rows["ref"][kinds == EventKind.COMM]
    known = np.isin(kinds, (*_OF_NO_TABLE, EventKind.COMM))
    if not known.all() or int(calls.max(initial=0)) >= max(len(captured.comms), 1):
        return None
    begin = np.cumsum(length) - length
    at = np.arange(total) + np.repeat(first - begin, length)
    new = np.repeat(is_new, length)
    at[new] = 0
    events = np.ascontiguousarray(captured.events).view("V16")[at].view(EVENT_DTYPE)
    events[new] = rows
    marks = events["kind"][
        (events["kind"] == EventKind.PHASE_BEGIN) | (events["kind"] == EventKind.PHASE_END)
    ]
    if (
        len(marks) % 2
        or (marks[::2] != EventKind.PHASE_BEGIN).any()
        or (marks[1::2] != EventKind.PHASE_END).any()
    ):
        return None
    return events
