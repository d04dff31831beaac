"""Why a simulation stopped: who waits in which call for whom, followed until it closes in a cycle or ends at a rank that
makes no further call."""

from __future__ import annotations

import numpy as np

from prism_plugins.simulate.faults import SimulationFault
from prism_plugins.simulate.link import Layer
from prism_plugins.simulate.process import Machine
from prism_plugins.simulate.unit import Unit


class _Wait:
    """A unit has come to a meeting and another has not."""

    def __init__(self, layer: Layer, slot: int, here: Unit, op: int, absent: Unit, where: int) -> None:
        self.layer, self.slot, self.here, self.op, self.absent = layer, slot, here, op, absent
        self.where = where
        """The event at which the absent one stands."""


def explain_hang(layers: list[Layer], units: list[Unit], machine: Machine) -> SimulationFault:
    """The fault of a job that cannot advance: its earliest open meeting, and the chain of waits from there."""
    waits = _open_waits(layers, units, machine)
    if not waits:
        raise RuntimeError("the simulation stopped without an open rendezvous; this is a defect of prism")
    chain, closed = _follow(min(waits, key=lambda w: w.where), waits, machine)
    first = chain[0]
    last = chain[0] if closed else chain[-1]
    stands_in = np.flatnonzero(last.absent.stretch.ops.event == last.where)
    return SimulationFault(
        kind="hang",
        group=first.layer.group_name(first.here.cell.index, first.op),
        sequence=first.layer.channel_of(first.slot)[1],
        waiting=first.layer.party(first.here.cell.index, first.op),
        other=last.absent.layer.party(
            last.absent.cell.index, int(stands_in[0]) if len(stands_in) else None, event=last.where
        ),
        chain=tuple(w.layer.party(w.here.cell.index, w.op) for w in chain),
        closed=closed,
    )


def _open_waits(layers: list[Layer], units: list[Unit], machine: Machine) -> list[_Wait]:
    unit_of = {(id(unit.layer), unit.cell.index): unit for unit in units}
    waits = []
    for slot in machine.open_slots():
        layer = next(x for x in layers if x.first_slot <= slot < x.first_slot + x.num_slots)
        here: list[tuple[Unit, int]] = []
        absent: list[Unit] = []
        for cell in layer.cells_at(slot):
            unit = unit_of[id(layer), cell]
            op = layer.op_at(cell, slot)
            if op is not None and machine.has_arrived(unit, op):
                here.append((unit, op))
            else:
                absent.append(unit)
        for unit, op in here:
            waits += [_Wait(layer, slot, unit, op, other, machine.position(other)) for other in absent]
    return waits


def _follow(first: _Wait, waits: list[_Wait], machine: Machine) -> tuple[list[_Wait], bool]:
    """Follow from who is waited for to what that one waits for. (chain, whether it closes in a cycle)."""
    by_unit: dict[int, list[_Wait]] = {}
    for wait in waits:
        by_unit.setdefault(id(wait.here), []).append(wait)
    chain, seen = [first], {id(first.here): 0}
    while True:
        last = chain[-1]
        if id(last.absent) in seen:
            return chain[seen[id(last.absent)] :], True
        following = by_unit.get(id(last.absent), [])
        if not following:
            return chain, False
        # What it stands in comes before what it issued earlier and does not wait for yet.
        events = [abs(int(w.here.stretch.ops.event[w.op]) - last.where) for w in following]
        seen[id(last.absent)] = len(chain)
        chain.append(following[int(np.argmin(events))])
