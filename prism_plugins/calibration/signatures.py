"""Which ops to measure: the signatures of a run's programs with how often each occurs, as one JSON file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from prism_plugins.costs.calibration import signature_key
from prism_plugins.costs.families import family_of
from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.files import put_in_place, read_regular
from prism_plugins.program.model import EventKind, OpSignature, Program
from prism_plugins.program.store import load_program
from prism_plugins.rundir import RunDir

FORMAT = "prism-signatures"
SCHEMA = 1
_MAX_BYTES = 64 << 20


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The ops of one program in the order they first occur."""

    name: str
    ops: tuple[int, ...]
    """Indices into ``SignatureList.signatures``."""
    counts: tuple[int, ...]
    """Occurrences of each in one iteration."""


class SignatureList(msgspec.Struct, frozen=True, kw_only=True):
    """What ``prism calibrate --export-signatures`` writes and ``--from`` reads."""

    format: str = FORMAT
    schema: int = SCHEMA
    signatures: tuple[OpSignature, ...]
    mixes: tuple[Mix, ...]


class _Header(msgspec.Struct):
    format: str = ""
    schema: int = 0


def signatures_of_programs(programs: dict[str, Program]) -> SignatureList:
    """The launched ops of programs; ops that launch nothing are left out, equal mixes are kept once."""
    ids: dict[tuple, int] = {}
    signatures: list[OpSignature] = []
    mixes: dict[tuple, Mix] = {}
    for name, program in programs.items():
        refs = program.events["ref"][program.events["kind"] == EventKind.KERNEL]
        used, first, counts = np.unique(refs, return_index=True, return_counts=True)
        merged: dict[int, int] = {}
        for i in np.argsort(first).tolist():
            signature = program.signatures[int(used[i])]
            if family_of(signature.op) == "free":
                continue
            key = signature_key(signature)
            if key not in ids:
                ids[key] = len(signatures)
                signatures.append(signature)
            merged[ids[key]] = merged.get(ids[key], 0) + int(counts[i])
        mix = Mix(name=name, ops=tuple(merged), counts=tuple(merged.values()))
        mixes.setdefault((mix.ops, mix.counts), mix)
    return SignatureList(signatures=tuple(signatures), mixes=tuple(mixes.values()))


def signatures_of_run(path: str | Path) -> SignatureList:
    """The signatures of all sliced ranks of a run directory. Raises PrismError where it is not a finished one."""
    rundir = RunDir(path)
    info = rundir.read_info()
    if not info.slices:
        raise PrismError(f"the run in {path} has no finished slices; run the job again")
    name = Path(path).resolve().name
    return signatures_of_programs(
        {f"{name}/{rank}": load_program(rundir.slice(rank).program) for rank in info.slices}
    )


def join(lists: list[SignatureList]) -> SignatureList:
    """One list of several."""
    ids: dict[tuple, int] = {}
    signatures: list[OpSignature] = []
    mixes = []
    for part in lists:
        new = []
        for signature in part.signatures:
            key = signature_key(signature)
            if key not in ids:
                ids[key] = len(signatures)
                signatures.append(signature)
            new.append(ids[key])
        mixes += [msgspec.structs.replace(mix, ops=tuple(new[i] for i in mix.ops)) for mix in part.mixes]
    return SignatureList(signatures=tuple(signatures), mixes=tuple(mixes))


def write_signatures(signatures: SignatureList, path: str | Path) -> None:
    """Write to a temporary file and rename it. Raises PrismError when the place cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(signatures))
        put_in_place(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PrismError(f"cannot write {path}: {error.strerror or error}") from error


def read_signatures(path: str | Path) -> SignatureList:
    """Read a signature list. Raises FileFormatError for a file that is not one."""
    path = Path(path)
    try:
        data = read_regular(path, max_bytes=_MAX_BYTES)
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise FileFormatError(f"{path} is not a signature list (format {header.format[:40]!r})")
        if header.schema > SCHEMA:
            raise FileFormatError(
                f"{path} has schema {header.schema}, this prism reads up to {SCHEMA}; update prism-plugins"
            )
        result = msgspec.json.decode(data, type=SignatureList)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path} is truncated or not a signature list: {error}") from None
    for signature in result.signatures:
        if problem := signature.problem():
            raise FileFormatError(f"{path}: {problem}")
    for mix in result.mixes:
        good = len(mix.ops) == len(mix.counts) and all(0 <= i < len(result.signatures) for i in mix.ops)
        if not good or any(count < 1 for count in mix.counts):
            raise FileFormatError(f"{path}: mix {mix.name[:60]!r} refers to signatures that are not there")
    return result
