"""Laws of any simulation, on random programs: no rank goes before its inputs, the iteration lasts as long as the longest chain of
work at least, and nothing gets faster when one op or one call gets dearer."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np
import pytest
from builders import TableCosts, one_class_per_rank, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from symmetric import random_job

from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import CommSignature, EventFlag, EventKind, OpSignature, Program
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.prices import comm_ranks
from prism_plugins.simulate.timeline import OpTimes
from prism_plugins.world.layout import Layout

P2P = ("send", "recv")
_EPSILON_NS = 1e-6
seeds = st.integers(min_value=0, max_value=2**32 - 1)


def some_programs(seed: int) -> dict[int, Program]:
    rng = np.random.default_rng(seed)
    return random_programs(rng, num_ranks=int(rng.integers(2, 5)), num_actions=int(rng.integers(3, 60)))


class Node(msgspec.Struct):
    """A kernel or a transfer: what has to end before it, and how long it lasts."""

    after: list[int]
    duration: float
    ends: list[tuple[int, int]]
    """(rank, event) whose end is its end."""


def dependencies(programs: dict[int, Program], costs: TableCosts) -> list[Node]:
    """The graph of all device work, in an order in which nothing comes before what it needs; host time left out.

    Read off the programs alone: streams run in order, a call ends when all members came and the data moved, waits wait,
    and the host stops in synchronisations.
    """
    nodes: list[Node] = []
    transfers: dict[tuple, int] = {}
    open_streams = {rank: _Walk(rank, program) for rank, program in programs.items()}
    progress = True
    while progress:
        progress = False
        for walk in open_streams.values():
            progress |= walk.advance(nodes, transfers, costs)
    assert all(walk.done for walk in open_streams.values())
    return nodes


class _Walk:
    """One rank's way through its program, as far as other ranks let it come."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program, self.at = rank, program, 0
        self.stream: dict[int, list[int]] = defaultdict(list)
        self.lane: dict[tuple, list[int]] = defaultdict(list)
        self.works: dict[int, list[int]] = {}
        self.events: dict[int, list[int]] = {}
        self.host: list[int] = []
        self.sequence: dict[tuple, int] = defaultdict(int)
        self.arrived: dict[int, list[tuple]] = {}

    @property
    def done(self) -> bool:
        return self.at == len(self.program.events)

    def advance(self, nodes: list[Node], transfers: dict, costs: TableCosts) -> bool:
        moved = False
        while not self.done and self._step(nodes, transfers, costs):
            moved = True
        return moved

    def _step(self, nodes: list[Node], transfers: dict, costs: TableCosts) -> bool:
        event = self.program.events[self.at]
        kind, s, ref = EventKind(event["kind"]), int(event["stream"]), int(event["ref"])
        if kind == EventKind.KERNEL:
            price = costs.price_op(self.program.signatures[ref])
            if price.provenance != "free":
                nodes.append(Node([*self.stream[s], *self.host], price.duration_ns, [(self.rank, self.at)]))
                self.stream[s] = [len(nodes) - 1]
        elif kind == EventKind.COMM:
            return self._comm(nodes, transfers, costs, event, s)
        elif kind == EventKind.WORK_WAIT:
            self.stream[s] = [*self.stream[s], *self.works.get(ref, [])]
        elif kind == EventKind.EVENT_WAIT:
            self.stream[s] = [*self.stream[s], *self.events.get(ref, [])]
        elif kind == EventKind.EVENT_RECORD:
            self.events[ref] = list(self.stream[s])
        elif kind == EventKind.STREAM_SYNC:
            self.host = [*self.host, *self.stream[s]]
        elif kind == EventKind.EVENT_SYNC:
            self.host = [*self.host, *self.events.get(ref, [])]
        elif kind == EventKind.DEVICE_SYNC:
            self.host = [*self.host, *(n for ns in (*self.stream.values(), *self.lane.values()) for n in ns)]
        self.at += 1
        return True

    def _comm(self, nodes, transfers, costs, event, s: int) -> bool:
        """A call: it arrives, then waits here until every other member did."""
        number = int(event["value"])
        rows = [self.at]
        while (
            rows[-1] + 1 < len(self.program.events)
            and self.program.events["kind"][rows[-1] + 1] == EventKind.COMM
            and int(self.program.events["value"][rows[-1] + 1]) == number
        ):
            rows.append(rows[-1] + 1)
        comms = [self.program.comms[int(self.program.events["ref"][row])] for row in rows]
        group = self.program.groups[comms[0].group]
        single = len(comms) == 1 and comms[0].kind in P2P
        lane = (group.ranks, group.desc, comms[0].peer if single else None)
        if number not in self.arrived:
            keys = []
            for comm in comms:
                ranks = comm_ranks(self.rank, group, comm)
                name = (group.ranks, group.desc, ranks if comm.kind in P2P else None)
                order = (name, comm.kind if comm.kind in P2P else "")
                key = (name, self.sequence[order])
                if comm.kind in P2P or comm is comms[0]:
                    self.sequence[order] += 1
                    keys.append((key, ranks, costs.price_comm(comm, ranks, self.rank).duration_ns))
            for key, ranks, duration in keys:
                found = transfers.setdefault(key, {})
                found[self.rank, len([r for r in found if r[0] == self.rank])] = (
                    [*self.stream[s], *self.lane[lane], *self.host], duration, len(ranks),
                )  # fmt: skip
            self.arrived[number] = keys
        ends = []
        for key, ranks, _ in self.arrived[number]:
            found = transfers[key]
            if isinstance(found, dict):
                if len(found) < len(ranks):
                    return False
                before = [n for after, _, _ in found.values() for n in after]
                nodes.append(Node(before, max(d for _, d, _ in found.values()), []))
                transfers[key] = found = len(nodes) - 1
            ends.append(found)
        for end in ends:
            nodes[end].ends.append((self.rank, rows[-1]))
        self.works[number] = self.lane[lane] = ends
        if not event["flags"] & EventFlag.ASYNC:
            self.stream[s] = [*self.stream[s], *ends]
        self.at = rows[-1] + 1
        return True


def times_of(job: JobPrograms, costs: TableCosts) -> tuple[Simulation, dict[int, OpTimes]]:
    simulation = Simulation(job, costs)
    return simulation, {rank: simulation.op_times(rank) for rank in range(job.layout.world_size)}


@given(seeds)
@settings(max_examples=50, deadline=None)
def test_no_rank_goes_before_its_inputs_and_no_chain_is_longer_than_the_iteration(seed: int) -> None:
    programs = some_programs(seed)
    costs = TableCosts()
    simulation, times = times_of(one_class_per_rank(programs), costs)
    nodes = dependencies(programs, costs)
    longest = np.zeros(len(nodes))
    for index, node in enumerate(nodes):
        begin = max((longest[n] for n in node.after), default=0.0)
        longest[index] = begin + node.duration
        for rank, event in node.ends:
            earliest = max((simulated_end(nodes[n], times) for n in node.after), default=0.0)
            # A batch ends with its last part; one part of it alone may have ended before.
            assert times[rank].end_ns[event] >= earliest + node.duration - 1, (rank, event)
            assert times[rank].start_ns[event] >= times[rank].host_ns[event] - 1, (rank, event)
    assert simulation.timeline.iteration_time_ns >= longest.max(initial=0.0) - 1


def simulated_end(node: Node, times: dict[int, OpTimes]) -> float:
    return min((float(times[rank].end_ns[event]) for rank, event in node.ends), default=0.0)


@given(seeds, st.data(), st.floats(1.0, 5.0))
@settings(max_examples=50, deadline=None)
def test_no_iteration_gets_faster_when_one_op_gets_dearer(
    seed: int, data: st.DataObject, factor: float
) -> None:
    programs = some_programs(seed)
    before = Simulation(one_class_per_rank(programs), TableCosts()).timeline.class_time_ns
    rank = data.draw(st.sampled_from(sorted(programs)))
    program = programs[rank]
    dearer = list(program.signatures)
    which = data.draw(st.integers(0, len(dearer) - 1))
    cost = data.draw(st.sampled_from(["ns", "host"]))
    attrs = dearer[which].attrs
    dearer[which] = OpSignature(op=dearer[which].op, attrs={**attrs, cost: attrs[cost] * factor})
    programs[rank] = msgspec.structs.replace(program, signatures=dearer)
    after = Simulation(one_class_per_rank(programs), TableCosts()).timeline.class_time_ns
    assert all(b >= a - _EPSILON_NS for a, b in zip(before, after, strict=True))


class OneCallDearer(TableCosts):
    """Calls of one size in one group last ``factor`` times as long."""

    def __init__(self, comm: CommSignature, ranks: tuple[int, ...], factor: float) -> None:
        super().__init__()
        self.which, self.factor = (comm.nbytes, tuple(sorted(ranks))), factor

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int):
        price = super().price_comm(comm, ranks, rank)
        if (comm.nbytes, tuple(sorted(ranks))) != self.which:
            return price
        return msgspec.structs.replace(price, duration_ns=price.duration_ns * self.factor)


@given(seeds, st.data(), st.floats(1.0, 5.0), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_iteration_gets_faster_when_one_call_gets_dearer(
    seed: int, data: st.DataObject, factor: float, symmetric: bool
) -> None:
    if symmetric:
        layout = Layout(world_size=8, tp=2, pp=2, dp=2)
        job = random_job(np.random.default_rng(seed), layout=layout, num_actions=20)
    else:
        job = one_class_per_rank(some_programs(seed))
    calls = [
        (comm, comm_ranks(rank, program.groups[comm.group], comm))
        for rank in range(job.layout.world_size)
        if (program := program_of(job, rank))
        for comm in program.comms
    ]
    if not calls:
        return
    comm, ranks = data.draw(st.sampled_from(calls))
    before = Simulation(job, TableCosts()).timeline
    after = Simulation(job, OneCallDearer(comm, ranks, factor)).timeline
    assert after.iteration_time_ns >= before.iteration_time_ns - _EPSILON_NS
    assert all(b >= a - _EPSILON_NS for a, b in zip(before.class_time_ns, after.class_time_ns, strict=True))


def test_the_graph_of_a_chain_is_the_chain() -> None:
    """The longest chain is found where it is known: two kernels around a call of two ranks."""
    from builders import Builder, collective

    builders = {r: Builder(r) for r in range(2)}
    for rank, b in builders.items():
        b.kernel(1000.0 * (1 + rank))
        b.comm(collective(b.group((0, 1), "G"), 100))
        b.kernel(500.0)
    programs = {r: b.program() for r, b in builders.items()}
    costs = TableCosts()
    nodes = dependencies(programs, costs)
    longest = np.zeros(len(nodes))
    for index, node in enumerate(nodes):
        longest[index] = max((longest[n] for n in node.after), default=0.0) + node.duration
    assert longest.max() == pytest.approx(2000 + (700 + 200 + 400) + 500)
