"""A cell's linked stretch: what the machine turns into processes."""

from __future__ import annotations

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
        self.event_slot: dict[int, int] = {}
        """CUDA event → slot."""
        self.mark_slot: dict[tuple[int, int], int] = {}
        """(host sync, stream) → slot."""
        self.sync_slot: list[int] = []
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
        for table in (self.lane_last, self.event_slot, self.mark_slot, self.end_slot):
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

    def phase_mask(self, kind: str) -> np.ndarray:
        """bool over the events of the stretch: inside a phase of this kind."""
        program, lo, hi = self.stretch.program, self.stretch.lo, self.stretch.hi
        wanted = np.array([phase.kind == kind for phase in program.phases] or [False], dtype=bool)
        events = program.events[lo:hi]
        edge = np.zeros(hi - lo + 1, dtype=np.int64)
        for which, step in ((EventKind.PHASE_BEGIN, 1), (EventKind.PHASE_END, -1)):
            at = np.flatnonzero(events["kind"] == which)
            at = at[wanted[events["ref"][at]]]
            edge[at] += step
        depth = np.cumsum(edge[:-1])
        # A stretch that begins inside such a phase sees its end first.
        return depth + (1 if len(depth) and depth.min() < 0 else 0) > 0
