"""What a rank that fails does to the others: who waits for it, who waits for those, and in which calls."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.checks.calls import call_text
from prism_plugins.program.calls import P2P, phase_at
from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import EventKind, Program
from prism_plugins.simulate.vector import Failure, VectorTimes


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that wait for ever in the same call."""

    distance: int
    """1: they wait for the failed rank itself, 2: for one that does, …; 0: the failed rank; -1: not for another rank's call."""
    ranks: tuple[int, ...]
    at_ms: float
    """When the first of them stops."""
    what: str


def stalls(job: JobPrograms, times: VectorTimes, failure: Failure) -> tuple[Stall, ...]:
    """All ranks that never finish, those nearest to the failed one first."""
    stuck = np.flatnonzero(np.isinf(times.finish_ns)).tolist()
    what: dict[int, str] = {}
    members: dict[int, tuple[int, ...]] = {}
    texts: dict[tuple[int, int], str] = {}
    for rank in stuck:
        program, event = program_of(job, rank), int(times.stalled_event[rank])
        key = (job.class_of(rank), event)
        if rank == failure.rank:
            event = times.failed_event
            what[rank] = f"phase {phase_at(program, event)}" if event >= 0 else "no phase"
            continue
        if key not in texts:
            texts[key] = _text(program, event)
        what[rank] = texts[key]
        members[rank] = _members(program, event)
    distance = _distances(members, failure.rank)
    groups: dict[tuple[int, str], list[int]] = {}
    for rank in stuck:
        groups.setdefault((distance.get(rank, -1), what[rank]), []).append(rank)
    found = []
    for (hops, text), ranks in groups.items():
        at = failure.at_ns if hops == 0 else float(np.nanmin(times.stalled_ns[ranks]))
        found.append(Stall(distance=hops, ranks=tuple(ranks), at_ms=at / 1e6, what=text))
    return tuple(sorted(found, key=lambda s: (s.distance < 0, s.distance, s.at_ms)))


def _text(program: Program, event: int) -> str:
    if not 0 <= event < len(program.events):
        return "its host waits"
    phase = f"phase {phase_at(program, event)}"
    calls = _calls(program, event)
    if not calls:
        return phase
    group = program.groups[program.comms[calls[0]].group]
    named = " + ".join(dict.fromkeys(call_text(program.comms[call]) for call in calls))
    return f"{named} in {group.label}, {phase}"


def _calls(program: Program, event: int) -> list[int]:
    """Indices into ``comms`` of the call at an event, with those that were issued together with it."""
    if not 0 <= event < len(program.events) or program.events["kind"][event] != EventKind.COMM:
        return []
    events = program.events
    together = (events["kind"] == EventKind.COMM) & (events["value"] == events["value"][event])
    return events["ref"][together].tolist()


def _members(program: Program, event: int) -> tuple[int, ...]:
    """Ranks that have to come to the call at an event."""
    found: list[int] = []
    for call in _calls(program, event):
        comm = program.comms[call]
        ranks = program.groups[comm.group].ranks
        found += (ranks[comm.peer],) if comm.kind in P2P else ranks
    return tuple(dict.fromkeys(found))


def _distances(members: dict[int, tuple[int, ...]], failed: int) -> dict[int, int]:
    """Breadth first from the failed rank over calls: rank → steps."""
    waiting: dict[tuple[int, ...], list[int]] = {}
    for rank, needed in members.items():
        waiting.setdefault(needed, []).append(rank)
    needs: dict[int, list[tuple[int, ...]]] = {}
    for needed in waiting:
        for rank in needed:
            needs.setdefault(rank, []).append(needed)
    distance, frontier = {failed: 0}, [failed]
    while frontier:
        following: list[int] = []
        for rank in frontier:
            for needed in needs.pop(rank, ()):
                for waits in waiting.pop(needed, ()):
                    if waits not in distance:
                        distance[waits] = distance[rank] + 1
                        following.append(waits)
        frontier = following
    return distance
