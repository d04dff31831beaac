"""What a replay is told: the simulated times of a rank's calls, and how late its peers are."""

from __future__ import annotations

import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import EventKind
from prism_plugins.program.replay import ON_TIME, ClockPlan, ReplayCall, ReplayPlan
from prism_plugins.replay.virtual_clock import NO_TIME, timed_kinds
from prism_plugins.simulate.clocks import event_times_ns
from prism_plugins.simulate.engine import Simulation, simulation_of
from prism_plugins.simulate.prices import Pricer, host_ns_of_events
from prism_plugins.simulate.timeline import Timeline

_LATE_NS = 1_000.0
"""Peers that come so much after us are late: they are given the time at which the simulation has them come. Others come
when we do, however long our own kernels take in the replay: they run the same program."""


def make_plan(job: JobPrograms, costs: CostModel, simulated: Simulation | Timeline, rank: int) -> ReplayPlan:
    """The plan for the replay of a rank, inferred or sliced. A simulation with slow ranks or links is given itself."""
    program = program_of(job, rank)
    simulation = simulation_of(job, costs, simulated)
    times, timeline = simulation.op_times(rank), simulation.timeline
    prices = Pricer(costs).price(program)
    rows = np.flatnonzero(program.events["kind"] == EventKind.COMM)
    calls = []
    for row, ref in zip(rows.tolist(), program.events["ref"][rows].tolist(), strict=True):
        comm = program.comms[ref]
        came, moved, ended = (float(t[row]) for t in (times.start_ns, times.transfer_start_ns, times.end_ns))
        calls.append(
            ReplayCall(
                kind=comm.kind,
                nbytes=comm.nbytes,
                duration_ns=max(0.0, ended - moved),
                peers_ns=moved if moved - came > _LATE_NS else ON_TIME,
                channels=int(prices.comm_channels[ref]),
                hbm_bytes=float(prices.comm_hbm_rate[ref]) * max(0.0, ended - moved),
            )
        )
    events = program.events
    host_end = times.host_ns + host_ns_of_events(events["kind"], events["ref"], events["value"], prices)
    idle_ns = timeline.iteration_time_ns - max(times.end_ns.max(initial=0.0), host_end.max(initial=0.0))
    return ReplayPlan(
        rank=rank,
        iteration_ns=timeline.iteration_time_ns,
        idle_ns=float(idle_ns) if idle_ns > _LATE_NS else 0.0,
        calls=tuple(calls),
    )


def make_clock_plan(
    job: JobPrograms, costs: CostModel, simulated: Simulation | Timeline, rank: int
) -> ClockPlan:
    """The plan for the replay of a rank without a GPU. Arguments as of :func:`make_plan`."""
    program = program_of(job, rank)
    simulation = simulation_of(job, costs, simulated)
    times, timeline = simulation.op_times(rank), simulation.timeline
    timed = ~np.isin(program.events["kind"], NO_TIME)
    return ClockPlan(
        rank=rank,
        iteration_ns=timeline.iteration_time_ns,
        kinds=timed_kinds(program.events).tobytes(),
        host_ns=times.host_ns[timed].astype("<f8").tobytes(),
        record_ns=event_times_ns(program, times).astype("<f8").tobytes(),
    )
