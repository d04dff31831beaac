"""A program in the tables and numbers of another one that begins alike.

Indices into tables and ids of allocations, works and CUDA events are handed out by each slice's process. What two ranks
of a role do alike has equal bytes once they are told in the same numbers: the simulation then runs it once for both.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.compare import comm_keys, op_key
from prism_plugins.program.model import EventKind, Program

_MEMORY = (EventKind.ALLOC, EventKind.FREE)
_CUDA_EVENTS = (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC)


def rebased(program: Program, onto: Program) -> Program:
    """``program`` with the tables of ``onto`` (grown by what that lacks) and with its ids as far as both do the same from
    the beginning; other ids are new. ``onto`` has to be moved to the program's rank; where it communicates otherwise the
    program is returned as it is."""
    comms = {key: i for i, key in enumerate(comm_keys(onto))}
    comm_of = [comms.get(key, -1) for key in comm_keys(program)]
    initial = [[(a.nbytes, a.category) for a in p.initial] for p in (program, onto)]
    if -1 in comm_of or initial[0] != initial[1]:
        return program
    signatures, signature_of = _grown(onto.signatures, program.signatures, op_key)
    phases, phase_of = _grown(onto.phases, program.phases, lambda phase: phase)
    events = program.events.copy()
    kinds, refs = events["kind"], events["ref"]
    marks = (EventKind.PHASE_BEGIN, EventKind.PHASE_END)
    for of_kind, numbers in (
        ((EventKind.KERNEL,), signature_of),
        ((EventKind.COMM,), comm_of),
        (marks, phase_of),
    ):
        at = np.isin(kinds, of_kind)
        refs[at] = np.array(numbers, dtype=np.int64)[refs[at]]
    host = (kinds == EventKind.HOST) & (refs > 0)
    refs[host] = np.array(signature_of, dtype=np.int64)[refs[host] - 1] + 1
    alike = _alike(events, onto.events)
    pairs = [(a.id, b.id) for a, b in zip(program.initial, onto.initial, strict=True)]
    _renumber([(events, "ref", _MEMORY)], [(onto.events, "ref", _MEMORY)], alike, dict(pairs))
    works = [("value", (EventKind.COMM,)), ("ref", (EventKind.WORK_WAIT,))]
    _renumber([(events, *w) for w in works], [(onto.events, *w) for w in works], alike, {})
    _renumber([(events, "ref", _CUDA_EVENTS)], [(onto.events, "ref", _CUDA_EVENTS)], alike, {})
    return msgspec.structs.replace(
        program,
        events=events,
        signatures=signatures,
        comms=onto.comms,
        groups=onto.groups,
        phases=phases,
        initial=onto.initial,
    )


def _grown(table: list, other: list, key) -> tuple[list, list[int]]:
    """The table with what it lacks of another one, and where the other's entries are in it."""
    grown = list(table)
    index = {key(entry): i for i, entry in enumerate(table)}
    numbers = []
    for entry in other:
        number = index.setdefault(key(entry), len(grown))
        if number == len(grown):
            grown.append(entry)
        numbers.append(number)
    return grown, numbers


def _alike(events: np.ndarray, others: np.ndarray) -> int:
    """How many events both begin with that are equal but for ids."""
    n = min(len(events), len(others))
    a, b = events[:n], others[:n]
    named = np.isin(a["kind"], (EventKind.KERNEL, EventKind.COMM, EventKind.PHASE_BEGIN, EventKind.PHASE_END))
    unequal = (a["kind"] != b["kind"]) | (a["flags"] != b["flags"]) | (a["stream"] != b["stream"])
    unequal |= named & (a["ref"] != b["ref"])
    unequal |= (a["kind"] != EventKind.COMM) & (a["value"] != b["value"])
    return int(np.argmax(unequal)) if unequal.any() else n


_Column = tuple[np.ndarray, str, tuple[EventKind, ...]]


def _renumber(own: list[_Column], others: list[_Column], alike: int, number: dict[int, int]) -> None:
    """Give the ids of these events the numbers of the others in the first ``alike`` events, then new ones."""
    taken: list[int] = [0, *number.values()]
    for (events, column, of_kind), (other, _, _) in zip(own, others, strict=True):
        at = np.flatnonzero(np.isin(events["kind"][:alike], of_kind))
        for mine, its in zip(events[column][at].tolist(), other[column][at].tolist(), strict=True):
            number.setdefault(mine, its)
        taken.append(int(other[column][np.isin(other["kind"], of_kind)].max(initial=0)))
    fresh = max(taken) + 1
    for events, column, of_kind in own:
        at = np.flatnonzero(np.isin(events["kind"], of_kind))
        ids = events[column][at].tolist()
        for id in ids:
            if id not in number:
                number[id] = fresh
                fresh += 1
        events[column][at] = [number[id] for id in ids]
