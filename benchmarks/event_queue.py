"""The same programs on simpy, a plain event-queue simulator: one process for the host and for each stream of every rank.

No symmetry, no runs of kernels, no compilation; the semantics are those of ``prism_plugins/simulate/engine.py`` without
interference. What prism's engine is compared with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import simpy

from prism_plugins.costs.base import CostModel
from prism_plugins.program.infer import program_of
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import EventFlag, EventKind, Program
from prism_plugins.simulate.link import merged
from prism_plugins.simulate.prices import Pricer, comm_ranks, host_ns_of_events


class EventQueueSimulation:
    """Simulates every rank of a job; ``finish_ns`` holds when each comes to rest."""

    def __init__(self, job: JobPrograms, costs: CostModel) -> None:
        costs.settle(job)
        self.env = simpy.Environment()
        self.costs = costs
        self.pricer = Pricer(costs)
        self.finish_ns = np.zeros(job.layout.world_size)
        self.meetings: dict[tuple, _Meeting] = {}
        ranks = [_Rank(self, program_of(job, rank)) for rank in range(job.layout.world_size)]
        self.env.run()
        for rank in ranks:
            self.finish_ns[rank.program.rank] = rank.last

    def meeting(self, key: tuple, expected: int) -> _Meeting:
        """The meeting with this key, made by who comes first."""
        if key not in self.meetings:
            self.meetings[key] = _Meeting(self.env, expected)
        return self.meetings[key]


class _Meeting:
    def __init__(self, env: simpy.Environment, expected: int) -> None:
        self.env, self.missing, self.duration = env, expected, 0.0
        self.done = env.event()

    def come(self, duration: float) -> None:
        self.duration = max(self.duration, duration)
        self.missing -= 1
        if not self.missing:
            self.env.process(self._transfer())

    def _transfer(self) -> Iterator:
        yield self.env.timeout(self.duration)
        self.done.succeed()


class _Rank:
    def __init__(self, simulation: EventQueueSimulation, program: Program) -> None:
        self.simulation, self.env, self.program = simulation, simulation.env, program
        self.prices = simulation.pricer.price(program)
        self.queues: dict[int, simpy.Store] = {}
        self.works: dict[int, simpy.Event] = defaultdict(self.env.event)
        self.events: dict[int, simpy.Event] = {}
        self.lane_free: dict[tuple, simpy.Event] = {}
        self.sequence: dict[tuple, int] = defaultdict(int)
        self.last = 0.0
        self.env.process(self._host())

    # the host issues

    def _host(self) -> Iterator:
        program, env = self.program, self.env
        events = program.events
        host = host_ns_of_events(events["kind"], events["ref"], events["value"], self.prices).tolist()
        last = {}
        comm = np.flatnonzero(events["kind"] == EventKind.COMM)
        for i in comm.tolist():
            last[int(events["value"][i])] = i
        batch: dict[int, list[int]] = defaultdict(list)
        for i, (kind, flags, stream, ref, value) in enumerate(events.tolist()):
            if host[i]:
                yield env.timeout(host[i])
            if kind == EventKind.KERNEL:
                if self.prices.op_launches[ref]:
                    self._put(stream, ("kernel", float(self.prices.op_ns[ref])))
            elif kind == EventKind.COMM:
                batch[value].append(ref)
                if last[value] == i:
                    running = self._communicate(tuple(batch[value]), self.works[value])
                    self._put(stream, ("comm", running, bool(flags & EventFlag.ASYNC)))
            elif kind == EventKind.WORK_WAIT:
                if ref in last:
                    self._put(stream, ("wait", self.works[ref]))
            elif kind == EventKind.EVENT_RECORD:
                self.events[ref] = env.event()
                self._put(stream, ("record", self.events[ref]))
            elif kind == EventKind.EVENT_WAIT:
                if ref in self.events:
                    self._put(stream, ("wait", self.events[ref]))
            elif kind == EventKind.EVENT_SYNC:
                if ref in self.events:
                    yield self.events[ref]
            elif kind == EventKind.STREAM_SYNC:
                yield self._marker(stream)
            elif kind == EventKind.DEVICE_SYNC:
                yield from [self._marker(s) for s in list(self.queues)]
                yield from list(self.lane_free.values())
        self.last = max(self.last, env.now)

    def _put(self, stream: int, command: tuple) -> None:
        if stream not in self.queues:
            self.queues[stream] = simpy.Store(self.env)
            self.env.process(self._stream(self.queues[stream]))
        self.queues[stream].put(command)

    def _marker(self, stream: int) -> simpy.Event:
        marker = self.env.event()
        self._put(stream, ("record", marker))
        return marker

    # a stream works

    def _stream(self, queue: simpy.Store) -> Iterator:
        env = self.env
        while True:
            command = yield queue.get()
            what = command[0]
            if what == "kernel":
                yield env.timeout(command[1])
            elif what == "wait":
                yield command[1]
            elif what == "record":
                command[1].succeed()
            else:
                if command[2]:
                    env.process(command[1])
                else:
                    yield from command[1]
            self.last = max(self.last, env.now)

    def _communicate(self, refs: tuple[int, ...], done: simpy.Event) -> Iterator:
        """The call as a process that occupies its communicator from its turn on; turns are in the order of issue."""
        program = self.program
        comms = [program.comms[r] for r in refs]
        single = len(comms) == 1 and comms[0].kind in ("send", "recv")
        lane = (comms[0].group, comms[0].peer if single else -1)
        before, self.lane_free[lane] = self.lane_free.get(lane), done
        return self._occupy(comms, self._parts(comms), before, done)

    def _parts(self, comms: list) -> list[tuple[_Meeting, float]]:
        rank, program = self.program.rank, self.program
        parts = []
        collectives = [c for c in comms if c.kind not in ("send", "recv")]
        for c in comms:
            if c.kind in ("send", "recv"):
                group = program.groups[c.group]
                pair = comm_ranks(rank, group, c)
                channel = (group.ranks, group.desc, pair)
                number = self.sequence[channel, c.kind]
                self.sequence[channel, c.kind] += 1
                duration = self.simulation.pricer.price_comm(program, c).duration_ns
                parts.append((self.simulation.meeting((channel, number), 2), duration))
        if collectives:
            call = collectives[0] if len(collectives) == 1 else merged(collectives)
            group = program.groups[call.group]
            channel = (group.ranks, group.desc)
            number = self.sequence[channel]
            self.sequence[channel] += 1
            duration = self.simulation.pricer.price_comm(program, call).duration_ns
            parts.append((self.simulation.meeting((channel, number), len(group.ranks)), duration))
        return parts

    def _occupy(self, comms: list, parts: list, before: simpy.Event | None, done: simpy.Event) -> Iterator:
        if before is not None:
            yield before
        for meeting, duration in parts:
            meeting.come(duration)
        for meeting, _ in parts:
            yield meeting.done
        self.last = max(self.last, self.env.now)
        done.succeed()
