"""Simulates one steady iteration of the whole job.

Lanes are the host thread, each CUDA stream, and each communicator. The host issues events in order and pays for
each; a device op starts when it is issued and its stream is ready; a collective occupies its communicator, after
what the issuing stream held, and its transfer starts when the last member's kernel has started; without ``ASYNC`` the
issuing stream waits for its end. The kernel of a coalesced batch starts once and ends when all its parts have.

Everything is max and plus, so the result does not depend on the order of evaluation: each stream of each cell is a
process that advances until it needs a time nobody has computed yet. When no process can advance, the job hangs,
and the fault says who waits for whom.

Ranks with equal times are one cell (:mod:`.quotient`). Data-parallel ranks whose optimizer shards differ run the same
events up to their optimizer: up to there they are one cell, from there on one per shard (:mod:`.fork`).

Collectives, the compute beside them, and kernels of different streams slow each other down (:mod:`.interference`), in a
second pass.

Where the costs tell how many kernels a GPU's launch queue holds (those of slices on a real GPU do), the host waits for room in
it, in steps of some launches; elsewhere it runs ahead as far as it can.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import EventKind
from prism_plugins.program.prediction import Breakdown
from prism_plugins.simulate import interference
from prism_plugins.simulate.compile import compile_stretch, slowed
from prism_plugins.simulate.deadlock import explain_hang
from prism_plugins.simulate.disturbance import Disturbance
from prism_plugins.simulate.expand import CallStarts, break_down, call_starts, expand_unit, join
from prism_plugins.simulate.fork import fork_points
from prism_plugins.simulate.link import Layer
from prism_plugins.simulate.prices import Pricer
from prism_plugins.simulate.process import Machine
from prism_plugins.simulate.quotient import Cell, Quotient, refine, survey
from prism_plugins.simulate.sources import ClassSource
from prism_plugins.simulate.timeline import OpTimes, Timeline
from prism_plugins.simulate.unit import Unit
from prism_plugins.simulate.vector import VectorMachine


def simulate(job: JobPrograms, costs: CostModel, disturbance: Disturbance | None = None) -> Timeline:
    """Simulate one iteration of every rank.

    Raises:
        SimulationFault: ranks wait for ever, or calls that meet disagree.
    """
    return Simulation(job, costs, disturbance).timeline


def op_times(
    job: JobPrograms, costs: CostModel, simulation: Simulation | Timeline | None, rank: int
) -> OpTimes:
    """Times of every event of a rank, in the order of its program.

    Give the :class:`Simulation`. With a :class:`Timeline` the last simulation of this job is used, or the job is
    simulated again.
    """
    return simulation_of(job, costs, simulation).op_times(rank)


def call_starts_of(
    job: JobPrograms, costs: CostModel, simulation: Simulation | Timeline | None, rank: int
) -> CallStarts:
    """When a rank comes to each of its calls. Arguments as of :func:`op_times`."""
    return simulation_of(job, costs, simulation).call_starts(rank)


def cell_of_rank(job: JobPrograms, costs: CostModel, simulation: Simulation | Timeline | None) -> np.ndarray:
    """A number for each rank; ranks with the same number have equal times. Arguments as of :func:`op_times`."""
    return simulation_of(job, costs, simulation).cell_of_rank


def simulation_of(job: JobPrograms, costs: CostModel, given: Simulation | Timeline | None) -> Simulation:
    """The simulation that is given, or that the timeline is of. Arguments as of :func:`op_times`."""
    if isinstance(given, Simulation):
        return given
    return Simulation.last if Simulation.is_last(job, costs) else Simulation(job, costs)


class Simulation:
    """A simulated job: the timeline, and the times of any rank's events on demand."""

    last: Simulation | None = None
    """The one that ran last, so that callers who only kept the timeline need not simulate again."""

    def __init__(
        self,
        job: JobPrograms,
        costs: CostModel,
        disturbance: Disturbance | None = None,
        *,
        fork: bool = True,
    ) -> None:
        """Without ``fork`` ranks with variants are linked whole, not behind a common stretch: same times, more work."""
        began = time.perf_counter()
        self.job = job
        self.costs = costs
        before = Simulation.last
        if before is not None and Simulation.is_last(job, costs):
            self._pricer, self._sources = before._pricer, before._sources
            self._world = msgspec.structs.replace(before._world, disturbed=None)
        else:
            costs.settle(job)
            self._pricer = Pricer(costs)
            self._sources = [ClassSource(job, index) for index in range(len(job.classes))]
            self._world = survey(job, self._sources, self._pricer)
        model = getattr(costs, "interference", None)
        self._launch_queue = model.launch_queue if model is not None else 0
        self._disturbance = disturbance or Disturbance()
        if self._disturbance.slow_ranks:
            self._world.disturbed = self._disturbance.labels(job.layout.world_size)
        self._layers: list[Layer] = []
        self._units: list[Unit] = []
        self._call_starts: dict[int, CallStarts] = {}
        """By unit: many ranks share the common stretch."""
        has_variants = any(cls.variant_of for cls in job.classes)
        if has_variants and fork:
            coarse = refine(self._sources, self._world, with_variants=False)
            self._quotient, self._leaves = self._forked(coarse)
        else:
            self._quotient = (
                self._fine() if has_variants else refine(self._sources, self._world, with_variants=False)
            )
            self._leaves = self._link(self._quotient)
        self._machine = Machine(self._layers, self._units)
        self._run()
        self._interfere()
        self.timeline = self._summarise(began)
        Simulation.last = self

    @classmethod
    def is_last(cls, job: JobPrograms, costs: CostModel) -> bool:
        """Whether the last simulation was of exactly these objects."""
        return cls.last is not None and cls.last.job is job and cls.last.costs is costs

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Ranks with equal times."""
        return self._quotient.cells

    def op_times(self, rank: int) -> OpTimes:
        """Times of a rank's events; ranks of one cell share them."""
        leaf = self._leaves[int(self._quotient.cell_of_rank[rank])]
        return join([expand_unit(unit, self._machine) for unit in leaf.chain()])

    def call_starts(self, rank: int) -> CallStarts:
        """When a rank comes to each of its calls: far cheaper than :meth:`op_times`."""
        leaf = self._leaves[int(self._quotient.cell_of_rank[rank])]
        for unit in leaf.chain():
            if id(unit) not in self._call_starts:
                self._call_starts[id(unit)] = call_starts(unit, self._machine)
        return join([self._call_starts[id(unit)] for unit in leaf.chain()])

    @property
    def cell_of_rank(self) -> np.ndarray:
        """Ranks with the same number have equal times, shape (world_size,)."""
        return self._quotient.cell_of_rank

    def vector_machine(self, factors: tuple[float, float]) -> VectorMachine:
        """The same job for ranks that have speeds of their own, between these factors on their kernels.

        A job with variants is simulated once more, each rank whole; leave the optimizer shards of large jobs out.

        Raises :class:`PrismError` for jobs whose ranks exchange messages within a class.
        """
        if len(self._layers) > 1:
            return Simulation(self.job, self.costs, self._disturbance, fork=False).vector_machine(factors)
        return VectorMachine(self._layers[0], self._units, self._world, factors=factors)

    # ── assembly ─────────────────────────────────────────────────────────────────────────────────────────────

    def _link(
        self, quotient: Quotient, *, ends: list[int] | None = None, parents: list[Unit] | None = None
    ) -> list[Unit]:
        """Compile each cell's program (up to ``ends``, behind ``parents``) and link their calls."""
        stretches = []
        for cell in quotient.cells:
            stretch = compile_stretch(
                cell.program,
                self._pricer.price(cell.program),
                lo=0,
                hi=len(cell.program.events) if ends is None else ends[cell.index],
                host0=0.0 if parents is None else parents[cell.index].stretch.host_at_end,
                launch_queue=self._launch_queue,
            )
            factor = self._disturbance.factor(int(cell.ranks[0]))
            stretches.append(stretch if factor == 1.0 else slowed(stretch, factor))
        first_slot = sum(layer.num_slots for layer in self._layers)
        layer = Layer(quotient, stretches, self._pricer, first_slot=first_slot)
        self._layers.append(layer)
        units = [
            Unit(layer, index, parent=None if parents is None else parents[index])
            for index in range(len(quotient.cells))
        ]
        self._units += units
        return units

    def _forked(self, coarse: Quotient) -> tuple[Quotient, list[Unit]]:
        """Link the common stretch of each coarse cell and, behind it, the rest of each fine cell."""
        forks = fork_points(self._sources, coarse)
        trunk = self._link(coarse, ends=forks)
        ends = np.array([unit.stretch.hi for unit in trunk])
        fine = self._fine(ends[coarse.cell_of_rank])
        parents = [trunk[int(coarse.cell_of_rank[cell.ranks[0]])] for cell in fine.cells]
        return fine, self._link(fine, parents=parents)

    def _fine(self, fork_of_rank: np.ndarray | None = None) -> Quotient:
        """Cells of ranks with equal variants, with their programs from the fork (or from the start) on."""
        fine = refine(self._sources, self._world, with_variants=True)
        forks = np.zeros(len(fine.cell_of_rank), dtype=np.int64) if fork_of_rank is None else fork_of_rank
        cells = tuple(
            msgspec.structs.replace(
                cell,
                program=self._sources[cell.class_index].branch(int(cell.ranks[0]), int(forks[cell.ranks[0]])),
            )
            for cell in fine.cells
        )
        return msgspec.structs.replace(fine, cells=cells)

    # ── run and report ───────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if not self._machine.run():
            raise explain_hang(self._layers, self._units, self._machine)

    def _interfere(self) -> None:
        """Simulate once more with what overlapping compute and collectives cost each other."""
        self._slowdown = interference.Slowdown()
        model = getattr(self.costs, "interference", None)
        if model is None:
            return
        total = max(self._machine.finish_ns(leaf) for leaf in self._leaves)
        self._slowdown = interference.apply(self._units, self._machine, model, total)
        if self._slowdown:
            for unit in self._units:
                unit.forget()
            self._machine = Machine(self._layers, self._units)
            self._run()

    def _summarise(self, began: float) -> Timeline:
        finish = [self._machine.finish_ns(leaf) for leaf in self._leaves]
        total = max(finish)
        class_time = [0.0] * len(self.job.classes)
        slowest: list[Unit | None] = [None] * len(self.job.classes)
        for leaf, end in zip(self._leaves, finish, strict=True):
            index = leaf.cell.class_index
            if slowest[index] is None or end > class_time[index]:
                class_time[index], slowest[index] = end, leaf
        breakdown: tuple[Breakdown, ...] = tuple(
            break_down(leaf, self._machine, total) for leaf in slowest if leaf is not None
        )
        worst = int(np.argmax(class_time))
        leaf = slowest[worst]
        return Timeline(
            iteration_time_ns=total,
            class_time_ns=tuple(class_time),
            slowest_class=worst,
            slowest_rank=int(leaf.cell.ranks[0]) if leaf is not None else 0,
            breakdown=breakdown,
            unpriced=self._unpriced(),
            slowdown_ns=self._slowdown.kernels_ns,
            crowding_ns=self._slowdown.transfers_ns,
            seconds=time.perf_counter() - began,
        )

    def _unpriced(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for cls in self.job.classes:
            program = cls.exemplar
            prices = self._pricer.price(program)
            kind, ref = program.events["kind"], program.events["ref"]
            for flags, which, names in (
                (prices.op_unpriced, EventKind.KERNEL, [s.op for s in program.signatures]),
                (prices.comm_unpriced, EventKind.COMM, [c.kind for c in program.comms]),
            ):
                if not flags.any():
                    continue
                occurrences = np.bincount(ref[kind == which], minlength=len(flags))
                for i in np.flatnonzero(flags).tolist():
                    if occurrences[i]:
                        counts[names[i]] = counts.get(names[i], 0) + int(occurrences[i])
        return dict(sorted(counts.items(), key=lambda item: -item[1]))
