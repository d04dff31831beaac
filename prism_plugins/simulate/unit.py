"""A cell's linked stretch: what the engine turns into processes."""

from __future__ import annotations

import numpy as np

from prism_plugins.simulate.compile import Code, Stretch
from prism_plugins.simulate.link import Layer, agreement, describe
from prism_plugins.simulate.quotient import Cell


class Unit:
    """One stretch of one cell. A forked job has a trunk unit per coarse cell and branch units behind it."""

    def __init__(
        self, cell: Cell, stretch: Stretch, parts: list[tuple[int, ...]], *, parent: Unit | None, layer: Layer
    ) -> None:
        self.cell = cell
        self.stretch = stretch
        self.parts = parts
        """Per op: slots of its meetings."""
        self.parent = parent
        self.layer = layer
        self.op_slot: list[int] = []
        """Per op: the slot of its end. Filled by the machine, as are the following."""
        self.op_previous: list[int] = []
        """Per op: slot of the op before it on its communicator, -1 where it need not be looked at."""
        self.work_slot: dict[int, int] = {}
        self.event_slot: dict[int, int] = {}
        self.lane_last: dict[tuple[int, int], int] = {}
        self.sync_slot: list[int] = []
        """Per host sync: the slot that holds the host's base after it."""
        self.mark_slot: dict[tuple[int, int], int] = {}
        """(host sync, stream) → slot."""
        self.end_slot: dict[int, int] = {}
        """Stream → slot of its time at the end of the stretch."""
        self.base_slot: int = -1
        """The host's base at the end of the stretch."""

    @property
    def layer_name(self) -> str:
        """Which layer it was linked in."""
        return self.layer.name

    def chain(self) -> list[Unit]:
        """This unit behind those it continues, oldest first."""
        return [*(self.parent.chain() if self.parent else ()), self]

    def rank_tuple(self) -> tuple[int, ...]:
        """The ranks it stands for."""
        return tuple(self.cell.ranks.tolist())

    def quotient_members(self, communicator: int) -> tuple[tuple[int, int], ...]:
        """(cell, group index) of the members of a quotient communicator."""
        return self.layer.quotient.members[communicator]

    def op_at(self, event: int) -> int:
        """Index of the op issued by an event, -1 if none."""
        for i, op in enumerate(self.stretch.ops):
            if op.event == event:
                return i
        return -1

    def group_name(self, event: int) -> str:
        """Description of the group whose call an event issues."""
        i = self.op_at(event)
        if i < 0:
            return "?"
        program = self.stretch.program
        group = program.groups[program.comms[self.stretch.ops[i].parts[0]].group]
        return group.desc or group.name

    def call_at(self, event: int) -> str:
        """What the rank does at an event, for people."""
        if event >= self.stretch.hi:
            return "no further call"
        i = self.op_at(event)
        program = self.stretch.program
        if i < 0:
            return f"{Code.WAIT_WORK.name.lower()} at event {event}"
        comms = [program.comms[p] for p in self.stretch.ops[i].parts]
        group = program.groups[comms[0].group]
        what = tuple(("message", c.nbytes) if c.kind in ("send", "recv") else agreement(c) for c in comms)
        return f"{describe(what)} in group {group.desc or group.name}"

    def kernel_mask(self, phase_kind: str) -> np.ndarray:
        """bool over the events of the stretch: inside a phase of this kind."""

        program, lo, hi = self.stretch.program, self.stretch.lo, self.stretch.hi
        mask = np.zeros(hi - lo, dtype=bool)
        for phase, begin, end in program.iter_phases():
            if phase.kind == phase_kind and end > lo and begin < hi:
                mask[max(begin, lo) - lo : min(end, hi) - lo] = True
        return mask
