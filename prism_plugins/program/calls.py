"""What the members of a call have to agree on, and how a call is told to people."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from prism_plugins.program.model import CommSignature, EventKind, Phase, Program

P2P = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def agreement(comm: CommSignature) -> tuple:
    """What all members of a call must agree on. Shares of an all_to_all are a matter of pairs of members, and even on one
    member where they are uneven on another: :mod:`prism_plugins.checks.matching` compares them."""
    if comm.kind in P2P:
        return ("message", comm.nbytes)
    if comm.kind == "barrier":
        return ("barrier",)
    if comm.kind == "all_to_all":
        return ("all_to_all", comm.dtype)
    if comm.kind == "gather":
        size, root = comm.in_numel, comm.peer
    elif comm.kind == "scatter":
        size, root = comm.out_numel, comm.peer
    else:
        size, root = max(comm.in_numel, comm.out_numel), comm.peer if comm.kind in ROOTED else -1
    return (comm.kind, size, comm.dtype, root)


def describe(what: Iterable[tuple]) -> str:
    """For people: ``all_reduce of 4096 bfloat16``."""
    texts = []
    for part in what:
        if part[0] == "message":
            texts.append(f"a message of {part[1]} bytes")
        elif len(part) == 4:
            root = f" from member {part[3]}" if part[3] >= 0 else ""
            texts.append(f"{part[0]} of {part[1]} {part[2]}{root}")
        elif len(part) == 2:
            texts.append(f"{part[0]} of {part[1]}")
        else:
            texts.append(str(part[0]))
    return " + ".join(texts[:3]) + (f" + {len(texts) - 3} more" if len(texts) > 3 else "")


def phase_at(program: Program, event: int) -> str:
    """Name of the phase that is open at an event."""
    kind = program.events["kind"][: event + 1]
    edges = np.flatnonzero((kind == EventKind.PHASE_BEGIN) | (kind == EventKind.PHASE_END))
    if not len(edges):  # a branch may begin inside a phase, whose end comes first then
        later = np.flatnonzero(program.events["kind"] == EventKind.PHASE_END)
        earlier = np.flatnonzero(program.events["kind"] == EventKind.PHASE_BEGIN)
        if not len(later) or (len(earlier) and earlier[0] < later[0]):
            return "none"
        edge = later[0]
    elif kind[edges[-1]] == EventKind.PHASE_END:
        return "none"
    else:
        edge = edges[-1]
    return phase_text(program.phases[int(program.events["ref"][edge])])


def phase_text(phase: Phase) -> str:
    """``forward micro-batch 3``."""
    labels = (("micro-batch", phase.microbatch), ("chunk", phase.chunk))
    return phase.kind + "".join(f" {label} {value}" for label, value in labels if value >= 0)


def communication_digest(program: Program) -> str:
    """Equal for two ranks of a role that call the same in the same order, whoever their peers are."""
    events = program.events
    refs = events["ref"][events["kind"] == EventKind.COMM]
    keys: dict[tuple, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    numbers = np.zeros(len(program.comms), dtype=np.int64)
    for i, comm in enumerate(program.comms):
        group = program.groups[comm.group]
        side = comm.kind if comm.kind in P2P else ""
        key = (agreement(comm), side, comm.reduce_op, group.desc, len(group.ranks))
        numbers[i] = keys.setdefault(key, int.from_bytes(_hash(key), "little", signed=True))
    digest.update(numbers[refs].tobytes())
    return digest.hexdigest()


def _hash(key: tuple) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
