"""A cell's linked stretch: what the machine turns into processes."""

from __future__ import annotations

import itertools

import numpy as np

from prism_plugins.program.model import EventKind
from prism_plugins.simulate.compile import Stretch
from prism_plugins.simulate.link import Layer, Linked
from prism_plugins.simulate.quotient import Cell


class Unit:
    """One stretch of one cell. A forked job has a trunk unit per coarse cell and branch units behind it."""

    def __init__(self, layer: Layer, index: int, *, parent: Unit | None) -> None:
        self.layer = layer
        self.cell: Cell = layer.quotient.cells[index]
        self.stretch: Stretch = layer.stretches[index]
        self.linked: Linked = layer.linked[index]
        self.parent = parent
        """The unit this one continues."""
        self.op_slot: np.ndarray = self.linked.first_slot
        """Per op: the slot of its end. Set by the machine, as are the following."""
        self.op_previous: np.ndarray = np.empty(0, dtype=np.int64)
        """Per op: slot of the op before it on its communicator, -1 where it need not be looked at."""
        self.lane_last: dict[int, int] = {}
        """Communicator → slot of its last op."""
        self.recorded: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, np.int64))
        """CUDA events that the stretch records, ascending, and their slots."""
        self.mark_slot: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Stream → host syncs that wait for it, and their slots."""
        self.sync_slot: np.ndarray = np.empty(0, dtype=np.int64)
        """Per host sync: the slot that holds the host's base after it."""
        self.end_slot: dict[int, int] = {}
        """Stream → slot of its time at the end of the stretch."""
        self.base_slot: int = -1
        """The host's base at the end of the stretch."""

    def restretch(self, stretch: Stretch) -> None:
        """Take another version of the same stretch, with other durations."""
        self.stretch = self.layer.stretches[self.cell.index] = stretch

    def forget(self) -> None:
        """Drop what a machine set."""
        self.op_slot = self.linked.first_slot
        for table in (self.lane_last, self.mark_slot, self.end_slot):
            table.clear()

    def chain(self) -> list[Unit]:
        """This unit behind those it continues, oldest first."""
        return [*(self.parent.chain() if self.parent else ()), self]

    def slots_of_works(self, works: np.ndarray) -> np.ndarray:
        """Slots of the ops with these work ids, -1 for works that began before the iteration."""
        slots = self.parent.slots_of_works(works) if self.parent else np.full(len(works), -1, dtype=np.int64)
        own = self.stretch.ops.work
        if len(own) and len(works):
            order = np.argsort(own)
            at = np.minimum(np.searchsorted(own[order], works), len(own) - 1)
            found = own[order][at] == works
            slots = np.where(found, self.op_slot[order[at]], slots)
        return slots

    def slots_of_events(self, events: np.ndarray) -> np.ndarray:
        """Slots of these CUDA events, -1 for those recorded before the iteration."""
        slots = self.parent.slots_of_events(events) if self.parent else np.full(len(events), -1, np.int64)
        recorded, own = self.recorded
        if len(recorded) and len(events):
            at = np.minimum(np.searchsorted(recorded, events), len(recorded) - 1)
            slots = np.where(recorded[at] == events, own[at], slots)
        return slots

    def phases(self, kind: str) -> list[tuple[int, int]]:
        """[first, end) of the events of each phase of this kind, as far as they lie in the stretch."""
        program, lo, hi = self.stretch.program, self.stretch.lo, self.stretch.hi
        wanted = np.array([phase.kind == kind for phase in program.phases] or [False], dtype=bool)
        marks = self.stretch.phase_marks
        marks = marks[wanted[program.events["ref"][marks]]]
        is_begin = program.events["kind"][marks] == EventKind.PHASE_BEGIN
        begins, ends = marks[is_begin].tolist(), marks[~is_begin].tolist()
        # A stretch that begins inside such a phase sees its end first, one that ends inside sees none.
        if ends and (not begins or ends[0] < begins[0]):
            begins = [lo, *begins]
        return list(itertools.zip_longest(begins, ends, fillvalue=hi))
