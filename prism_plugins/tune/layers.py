"""What one layer costs, from two slices of a reduced job: one of one layer, one of two.

A second kind of layer (other recomputation) takes one more slice, of two such layers; layers that are recomputed as a
whole take none: their backward is the forward again and the backward.

Everything about a stage is taken as linear in its layers: the difference of the two slices is a layer, what remains of the
first one is the embedding and the loss. Times come from the ordinary simulation of the reduced job, memory from the
ordinary ledger, so whatever the emulator knows about ops and collectives is in them. Device and host are told apart: in so small a job
the device waits for the host where it would not after a few layers more, and differences would be neither's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from prism_plugins.costs.altered import without_host
from prism_plugins.costs.base import CostModel
from prism_plugins.errors import PrismError
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.memory import allocated_curve
from prism_plugins.program.memory_device import CommunicatorUse, communicators
from prism_plugins.program.model import EventFlag, EventKind, MemoryCategory, Program
from prism_plugins.program.slices import JobFacts
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.prices import Pricer, comm_ranks, host_ns_of_events

_NS = 1e-6
"""ns to ms."""
_STATES = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER_STATE)
_SMALL_NUMEL = 100_000
"""Reductions over the data-parallel group below that are flags and norms, no gradients."""


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """One reduced job, measured: times in ms, sizes in bytes. All of one micro-batch unless said otherwise."""

    forward: float
    """Of the device, like all that follow up to ``exposed_forward``, with a host that is never late."""
    backward: float
    head_forward: float
    """Part of ``forward`` before its first layer."""
    head_backward: float
    """Part of ``backward`` before its first layer."""
    exposed_communication: float
    """Of both: collectives for which compute waits."""
    exposed_forward: float
    """Of these, those in ``forward``."""
    host_forward: float
    """What the host takes to issue ``forward``."""
    host_backward: float
    head_host_forward: float
    head_host_backward: float
    lag_forward: float
    """How much later than the device alone a step ends whose host begins when the device does, if the device is slower from the
    second layer on: the longest lead of the device over the host up to then."""
    lag_backward: float
    optimizer: float
    """Device time in the optimizer's phase, an iteration."""
    rest: float
    """Of an iteration, what lies outside forward, backward and optimizer, gradient reductions left out."""
    states: dict[str, int]
    """Parameters, gradients, optimizer states."""
    others: int
    """What else is live between iterations."""
    saved: int
    """Kept from forward for backward."""
    temporary_layer: int
    """Above what is saved, at most, while the layers run."""
    temporary: int
    """The same over both phases as a whole."""
    temporary_optimizer: int
    """Above what is live between iterations, during the optimizer."""


class LayerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of layer and what stands around the layers, by linear extrapolation from two reduced jobs."""

    one: Reduced
    two: Reduced
    uses: tuple[CommunicatorUse, ...]
    """Communicators of the reduced job."""
    nvls: frozenset[str]
    prices: CostModel
    """At the clocks of a job of such layers."""
    shards: int = 1
    """Over so many ranks the reduced job spread its optimizer states; what is told here is all of them."""
    overlaps: bool = False
    """Gradients were reduced during backward, whatever the arguments say."""

    def layer(self, field: str) -> float:
        """One more layer, of a numeric field of :class:`Reduced`."""
        return max(0.0, getattr(self.two, field) - getattr(self.one, field))

    def around(self, field: str) -> float:
        """Embedding and loss together."""
        return max(0.0, getattr(self.one, field) - self.layer(field))

    def layer_state(self, category: str) -> float:
        """Bytes of a layer's parameters, gradients or optimizer states."""
        return max(0.0, self.two.states[category] - self.one.states[category])

    def around_state(self, category: str) -> float:
        """The same of embedding and output layer."""
        return max(0.0, self.one.states[category] - self.layer_state(category))


_PER_LAYER = (
    "forward", "backward", "exposed_communication", "exposed_forward", "host_forward", "host_backward", "optimizer", "rest",
    "saved", "temporary_optimizer",
)  # fmt: skip
_HEADS = ("head_forward", "head_backward", "head_host_forward", "head_host_backward")


def other_kind(base: LayerCosts, two: Reduced) -> LayerCosts:
    """Another kind of layer from its two-layer job alone: what stands around the layers is as with ``base``."""
    half = {f: base.around(f) + max(0.0, getattr(two, f) - base.around(f)) / 2 for f in _PER_LAYER}
    one = msgspec.structs.replace(
        two,
        **half,
        **{f: getattr(base.one, f) for f in _HEADS},
        states=base.one.states,
        others=base.one.others,
    )
    two = msgspec.structs.replace(two, states=base.two.states, others=base.two.others)
    return msgspec.structs.replace(base, one=one, two=two)


def recomputed(base: LayerCosts, input_bytes: int) -> LayerCosts:
    """Layers like ``base`` of which only the input is kept: backward runs the forward again."""
    reduced = []
    for layers, job in ((1, base.one), (2, base.two)):
        temporary = job.temporary_layer + int(base.layer("saved"))
        reduced.append(
            msgspec.structs.replace(
                job,
                backward=job.backward + layers * base.layer("forward"),
                host_backward=job.host_backward + layers * base.layer("host_forward"),
                lag_backward=max(job.lag_forward, job.lag_backward),
                exposed_communication=job.exposed_communication + layers * base.layer("exposed_forward"),
                saved=int(base.around("saved")) + layers * input_bytes,
                temporary_layer=temporary,
                temporary=max(job.temporary, temporary),
            )
        )
    return msgspec.structs.replace(base, one=reduced[0], two=reduced[1])


def reduce_other(program: Program, facts: JobFacts, base: LayerCosts) -> Reduced:
    """A reduced job of another kind of layer, for :func:`other_kind`."""
    return _reduce(program, facts, base.prices, [0, 0], base.shards)


def measure(
    programs: Sequence[Program],
    facts: JobFacts,
    costs: CostModel,
    *,
    nvls: frozenset[str],
    gpus_per_domain: int,
    sharded: bool = False,
) -> LayerCosts:
    """From the programs of rank 0 of the one-layer and the two-layer job; ``sharded``: their optimizer states are spread
    over their data-parallel ranks, where costs are told as if one rank had them.

    Raises :class:`PrismError` when they are not what a probe should be (no two micro-batches of forward and backward).
    """
    one, two = programs
    layer_events = _phase_lengths(two) - _phase_lengths(one)
    heads = [
        max(0, _common_prefix(one, two, kind) - int(layer_events[i]))
        for i, kind in enumerate(("forward", "backward"))
    ]
    shards = facts.layout.dp * facts.layout.cp if sharded else 1
    costs = _at_clocks_of(_layers_alone(two, heads, layer_events), facts, costs)
    reduced = [_reduce(program, facts, costs, heads, shards) for program in programs]
    return LayerCosts(
        one=reduced[0],
        two=reduced[1],
        uses=communicators(one, gpus_per_domain=gpus_per_domain),
        nvls=nvls,
        prices=costs,
        shards=shards,
        overlaps=reduces_in_backward(one),
    )


def _layers_alone(two: Program, heads: Sequence[int], layer_events: np.ndarray) -> Program:
    """The steps of the two-layer job without embedding, loss and optimizer: what a stage of many layers mostly does."""
    parts = []
    for kind, head, length in zip(_MEASURED, heads, layer_events.tolist(), strict=True):
        first = _rows(two, kind)[0] + 1 + head
        parts.append(two.events[first : first + 2 * length])
    return msgspec.structs.replace(two, events=np.concatenate(parts))


def _at_clocks_of(program: Program, facts: JobFacts, costs: CostModel) -> CostModel:
    """Prices at the clocks of a job that runs this program. The optimizer, which is as large in a reduced job as all its
    layers, would have them higher."""
    costs.settle(_as_job(program, facts))
    return costs.in_state_of(program.signatures)


def _as_job(program: Program, facts: JobFacts) -> JobPrograms:
    """A job with every rank as rank 0."""
    ranks = np.arange(facts.layout.world_size)
    cls = RankClass(name="all", ranks=ranks, representative=program.rank, exemplar=program)
    return JobPrograms(layout=facts.layout, classes=(cls,))


def _simulate(program: Program, facts: JobFacts, costs: CostModel) -> Simulation:
    """The reduced job with every rank as rank 0."""
    return Simulation(_as_job(program, facts), costs)


def _steps(program: Program) -> dict[tuple[str, int], tuple[int, int]]:
    """(kind, micro-batch) → rows between its marks."""
    return {(phase.kind, phase.microbatch): (lo, hi) for phase, lo, hi in program.iter_phases()}


_MEASURED = {"forward": 1, "backward": 0}
"""Micro-batch whose step is measured: parameters are gathered in the first forward, gradients reduced in the last backward."""


def _rows(program: Program, kind: str) -> tuple[int, int]:
    steps = _steps(program)
    missing = [f"{kind} {m}" for kind in _MEASURED for m in (0, 1) if (kind, m) not in steps]
    if missing:
        raise PrismError(f"a reduced job lacks the steps {', '.join(missing)} (kind, micro-batch)")
    return steps[kind, _MEASURED[kind]]


def _phase_lengths(program: Program) -> np.ndarray:
    return np.array([hi - lo for lo, hi in (_rows(program, "forward"), _rows(program, "backward"))])


def _common_prefix(one: Program, two: Program, kind: str) -> int:
    """Events that the same phase of both programs begins with alike."""
    names = []
    for program in (one, two):
        lo, hi = _rows(program, kind)
        events = program.events[lo + 1 : hi]
        names.append([_name(program, e) for e in events.tolist()])
    same = 0
    for a, b in zip(*names, strict=False):
        if a != b:
            break
        same += 1
    return same


def _name(program: Program, event: tuple[int, int, int, int, int]) -> tuple:
    kind, flags, stream, ref, value = event
    if kind == EventKind.KERNEL:
        return (kind, stream, program.signatures[ref])
    if kind == EventKind.COMM:
        comm = program.comms[ref]
        return (kind, flags, stream, comm.kind, comm.group, comm.in_numel)
    return (kind, stream, value if kind == EventKind.ALLOC else 0)


def _reduce(
    program: Program, facts: JobFacts, costs: CostModel, heads: list[int], shards: int = 1
) -> Reduced:
    simulation = _simulate(program, facts, costs)
    times = simulation.op_times(program.rank)
    end = np.maximum.accumulate(times.end_ns)
    forward, backward = _rows(program, "forward"), _rows(program, "backward")
    steps = _steps(program)
    ended = {step: float(end[hi]) for step, (_, hi) in steps.items()}
    alone = _simulate(program, facts, without_host(costs)).op_times(program.rank)
    device = np.maximum.accumulate(alone.end_ns)
    begins = {
        "forward": float(device[steps["backward", 0][1]]),
        "backward": float(device[steps["forward", 0][1]]),
    }
    forward_ns = float(device[forward[1]]) - begins["forward"]
    backward_ns = float(device[backward[1]]) - begins["backward"]
    host_ns = host_ns_of_events(
        *(program.events[column] for column in ("kind", "ref", "value")), Pricer(costs).price(program)
    )
    lags = {
        kind: _lag(program, rows, host_ns, device - begins[kind])
        for kind, rows in (("forward", forward), ("backward", backward))
    }
    optimizer = steps.get(("optimizer", -1))
    optimizer_ns = float(end[optimizer[1]] - end[optimizer[0]]) if optimizer else 0.0
    gathered = _waited(program, times, (optimizer,)) if optimizer and shards > 1 else 0.0
    synced = max(ended.get(("grad_sync", -1), 0.0), ended["backward", 1])
    waiting = synced - ended["backward", 1] - _gradient_reductions(program, costs)
    rest = float(end[steps["forward", 0][0]]) + simulation.timeline.iteration_time_ns - synced - optimizer_ns
    rest += 0.0 if reduces_in_backward(program) else max(0.0, waiting)
    curve = allocated_curve(program)
    live = int(curve[-1])
    start, between = int(curve[forward[0]]), int(curve[forward[1]])
    saved = max(0, between - start)
    top = start + saved
    head = backward[0] + 1 + heads[1]
    in_layers = int(curve[head : backward[1]].max(initial=0)) - int(curve[min(head, backward[1])])
    first = forward[0] + 1 + heads[0]
    last = max(first + 1, forward[1] - heads[1])
    in_layers = max(in_layers, int(curve[first:last].max(initial=0)) - int(curve[last]))
    whole = int(max(curve[forward[0] : steps["backward", 1][1]].max(initial=0) - top, 0))
    states = dict.fromkeys((str(c) for c in _STATES), 0)
    others = 0
    for allocation in program.initial:
        if allocation.category in states:
            states[str(allocation.category)] += allocation.nbytes
        else:
            others += allocation.nbytes
    states[str(MemoryCategory.OPTIMIZER_STATE)] *= shards
    optimizer_rows = optimizer or (len(curve) - 1, len(curve) - 1)
    return Reduced(
        forward=forward_ns * _NS,
        backward=backward_ns * _NS,
        head_forward=_until(device, begins["forward"], forward[0] + heads[0]) * _NS,
        head_backward=_until(device, begins["backward"], backward[0] + heads[1]) * _NS,
        exposed_communication=_waited(program, alone, (forward, backward)) * _NS,
        exposed_forward=_waited(program, alone, (forward,)) * _NS,
        host_forward=float(host_ns[slice(*forward)].sum()) * _NS,
        host_backward=float(host_ns[slice(*backward)].sum()) * _NS,
        head_host_forward=float(host_ns[forward[0] : forward[0] + heads[0]].sum()) * _NS,
        head_host_backward=float(host_ns[backward[0] : backward[0] + heads[1]].sum()) * _NS,
        lag_forward=lags["forward"] * _NS,
        lag_backward=lags["backward"] * _NS,
        optimizer=max(0.0, optimizer_ns - gathered) * shards * _NS,
        rest=max(0.0, rest) * _NS,
        states=states,
        others=others,
        saved=saved,
        temporary_layer=max(0, in_layers),
        temporary=whole,
        temporary_optimizer=shards
        * max(0, int(curve[optimizer_rows[0] : optimizer_rows[1] + 1].max(initial=0)) - live),
    )


def _lag(program: Program, rows: tuple[int, int], host_ns: np.ndarray, device_ns: np.ndarray) -> float:
    """The longest lead of the device over the host in the first half of a phase, in which both begin at 0.

    A step of kernels of lengths ``d`` that the host issues at ``H`` ends at ``max over j (H[j] + sum of d[j:])``, so later than
    the device alone by ``max over j (H[j] - sum of d[:j])``. ``device_ns``: the device's work up to each row.
    """
    lo, hi = rows[0], rows[0] + (rows[1] - rows[0]) // 2
    kinds = program.events["kind"][lo:hi]
    issued = np.cumsum(host_ns[lo:hi])
    done = np.maximum(device_ns[lo - 1 : hi - 1], 0.0)  # another phase is before each measured one
    works = (kinds == EventKind.KERNEL) | (kinds == EventKind.COMM)
    return float(np.maximum(issued - done, 0.0)[works].max(initial=0.0))


def _until(end: np.ndarray, begin: float, row: int) -> float:
    return max(0.0, float(end[row]) - float(begin))


def _waited(program: Program, times, phases: Sequence[tuple[int, int]]) -> float:
    """Time of collectives that the issuing stream waits for."""
    total = 0.0
    for lo, hi in phases:
        events = program.events[lo:hi]
        rows = lo + np.flatnonzero(
            (events["kind"] == EventKind.COMM) & (events["flags"] & int(EventFlag.ASYNC) == 0)
        )
        total += float((times.end_ns[rows] - times.start_ns[rows]).sum())
    return total


def reduces_in_backward(program: Program) -> bool:
    """Whether gradients are reduced during the last backward: it then has large calls that the others have not."""
    steps = _steps(program)
    calls = []
    for m in (0, 1):
        lo, hi = steps["backward", m]
        events = program.events[lo:hi]
        refs = events["ref"][events["kind"] == EventKind.COMM].tolist()
        calls.append(sum(program.comms[ref].in_numel >= _SMALL_NUMEL for ref in refs))
    return calls[1] > calls[0]


def _gradient_reductions(program: Program, costs: CostModel) -> float:
    """What the reduced job's own gradient reductions take: its data-parallel group is not that of the layout."""
    total, inside = 0.0, False
    for kind, _, _, ref, _ in program.events.tolist():
        if kind == EventKind.PHASE_BEGIN:
            inside = program.phases[ref].kind in ("grad_sync", "optimizer")
        elif kind == EventKind.PHASE_END:
            inside = False
        elif inside and kind == EventKind.COMM:
            comm = program.comms[ref]
            if comm.in_numel >= _SMALL_NUMEL and comm.kind not in ("send", "recv"):
                ranks = comm_ranks(program.rank, program.groups[comm.group], comm)
                total += costs.price_comm(comm, ranks, program.rank).duration_ns
    return total
