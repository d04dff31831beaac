"""Programs of a class's ranks, without keeping every optimizer variant's events in memory.

A large job has hundreds of variants with megabytes of events each, all but the last few per cent equal to the
exemplar's. Each is looked at once: what it calls, and its events from the first that differs.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.instantiate import Instantiator
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EventKind, Program
from prism_plugins.simulate.prices import used_comms


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls a program makes."""

    groups: tuple[int, ...]
    """Groups that some call uses."""
    collective: dict[int, int]
    """Group → its largest collective, whose price stands for where the members sit."""
    p2p: tuple[int, ...]


class _Source(msgspec.Struct, kw_only=True):
    program: Program
    """The exemplar, or a variant with only the events that it shares with the exemplar."""
    calls: Calls
    difference: int
    """First event that differs from the exemplar's."""
    tail: np.ndarray
    """A variant's events from there on."""
    instantiator: Instantiator | None = None


class ClassSource:
    """The programs of one class."""

    def __init__(self, job: JobPrograms, index: int) -> None:
        self.cls: RankClass = job.classes[index]
        self._layout = job.layout
        exemplar = self.cls.exemplar
        end = len(exemplar.events)
        self._exemplar = _Source(
            program=exemplar, calls=calls_of(exemplar), difference=end, tail=exemplar.events[end:]
        )
        self._variants = {key: self._look_at(self.cls.variants[key]) for key in self.cls.variants}

    def program_of(self, rank: int) -> Program:
        """A rank's tables with its own groups and peers; a variant's events end where it differs from the exemplar."""
        return self._moved(self._source(rank), rank)

    def _moved(self, source: _Source, rank: int) -> Program:
        if source.program.rank == rank:
            return source.program
        if source.instantiator is None:
            source.instantiator = Instantiator(source.program, self._layout)
        return source.instantiator.program_of(rank)

    def stage_of(self, rank: int) -> int:
        """A rank's pipeline stage."""
        return self._layout.coords(rank)["pp"]

    def calls(self, rank: int) -> Calls:
        """Which calls the rank's program makes."""
        return self._source(rank).calls

    def first_difference(self) -> int:
        """The first event in which some variant differs from the exemplar."""
        sources = (self._exemplar, *self._variants.values())
        return min(source.difference for source in sources)

    def branch(self, rank: int, fork: int) -> Program:
        """A rank's program from event ``fork`` on, which no variant differs before."""
        source = self._source(rank)
        common = self.cls.exemplar.events[fork : source.difference]
        program = self.program_of(rank)
        return Program(
            rank=rank,
            events=np.concatenate((common, source.tail)),
            signatures=program.signatures,
            comms=program.comms,
            groups=program.groups,
            phases=program.phases,
            initial=[],
            source=program.source,
        )

    def _source(self, rank: int) -> _Source:
        variant = self.cls.variant_of.get(rank)
        return self._exemplar if variant is None else self._variants[variant]

    def _look_at(self, variant: Program) -> _Source:
        # Peers differ from rank to rank.
        difference = first_difference(self._moved(self._exemplar, variant.rank), variant)
        light = Program(
            rank=variant.rank,
            events=self.cls.exemplar.events[:difference],
            signatures=variant.signatures,
            comms=variant.comms,
            groups=variant.groups,
            phases=variant.phases,
            initial=[],
            source=variant.source,
        )
        return _Source(
            program=light,
            calls=calls_of(variant),
            difference=difference,
            tail=variant.events[difference:].copy(),
        )


def calls_of(program: Program) -> Calls:
    """What a program calls; entries of its table that no event refers to are left out."""
    collective: dict[int, int] = {}
    p2p = []
    used = used_comms(program).tolist()
    for i in used:
        comm = program.comms[i]
        if comm.kind in ("send", "recv"):
            p2p.append(i)
        elif comm.group not in collective or comm.nbytes > program.comms[collective[comm.group]].nbytes:
            collective[comm.group] = i
    groups = tuple(sorted({program.comms[i].group for i in used}))
    return Calls(groups=groups, collective=collective, p2p=tuple(p2p))


def first_difference(a: Program, b: Program) -> int:
    """First event in which two programs differ, tables resolved."""
    n = min(len(a.events), len(b.events))
    words = [np.ascontiguousarray(x.events[:n]).view("<i8") for x in (a, b)]  # 16 bytes an event
    unequal_words = np.flatnonzero(words[0] != words[1])
    first = int(unequal_words[0]) // 2 if len(unequal_words) else n
    kind, ref = a.events["kind"][:first], a.events["ref"][:first]
    for which, left, right in (
        (EventKind.KERNEL, a.signatures, b.signatures),
        (EventKind.HOST, [None, *a.signatures], [None, *b.signatures]),
        (EventKind.COMM, a.comms, b.comms),
        (EventKind.PHASE_BEGIN, a.phases, b.phases),
    ):
        shared = min(len(left), len(right))
        unequal = [i for i in range(shared) if left[i] is not right[i] and left[i] != right[i]]
        mine = np.flatnonzero(kind == which)
        wrong = (ref[mine] >= shared) if len(left) != len(right) else np.zeros(len(mine), dtype=bool)
        if unequal:
            wrong = wrong | np.isin(ref[mine], unequal)
        if wrong.any():
            first = min(first, int(mine[np.argmax(wrong)]))
    return first
