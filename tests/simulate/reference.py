"""A plain, slow simulator: every rank, every event, no compilation, no symmetry. The truth the engine is held to."""

from __future__ import annotations

from collections import defaultdict

from prism_plugins.program.calls import agreement
from prism_plugins.program.model import EventFlag, EventKind, Program
from prism_plugins.simulate.link import merged
from prism_plugins.simulate.prices import HOST_NS_PER_WAIT, comm_ranks


class Reference:
    """Evaluates all programs again and again, each time with more collective ends known, until nothing changes."""

    def __init__(self, programs: dict[int, Program], costs) -> None:
        self.programs = programs
        self.costs = costs
        self.ends: dict[tuple, float] = {}
        self.arrivals: dict[tuple, dict] = {}
        self.times: dict[int, dict[int, tuple[float, float, float]]] = {}
        self.finish: dict[int, float | None] = {}
        while self._sweep():
            pass

    def _sweep(self) -> bool:
        self.arrivals = defaultdict(dict)
        self.durations: dict[tuple, float] = {}
        self.expected: dict[tuple, int] = {}
        for rank, program in self.programs.items():
            self.finish[rank] = self._walk(rank, program)
        new = {
            key: max(found.values()) + self.durations[key]
            for key, found in self.arrivals.items()
            if key not in self.ends and len(found) == self.expected[key]
        }
        self.ends.update(new)
        return bool(new)

    def _walk(self, rank: int, program: Program) -> float | None:
        host = 0.0
        stream: dict[int, float | None] = defaultdict(float)
        lane: dict[tuple, float | None] = defaultdict(float)
        work: dict[int, float | None] = {}
        events: dict[int, float | None] = {}
        sequence: dict[tuple, int] = defaultdict(int)
        times = self.times[rank] = {}
        last = {}
        for i, event in enumerate(program.events):
            if event["kind"] == EventKind.COMM:
                last[int(event["value"])] = i
        batch: dict[int, list[int]] = defaultdict(list)
        for i, event in enumerate(program.events):
            kind, s, ref = EventKind(event["kind"]), int(event["stream"]), int(event["ref"])
            if kind == EventKind.KERNEL:
                price = self.costs.price_op(program.signatures[ref])
                host += price.host_ns
                if price.provenance != "free" and stream[s] is not None:
                    start = max(stream[s], host)
                    stream[s] = start + price.duration_ns
                    times[i] = (start, start, stream[s])
            elif kind == EventKind.COMM:
                comm = program.comms[ref]
                group = program.groups[comm.group]
                host += self.costs.price_comm(comm, comm_ranks(rank, group, comm), rank).host_ns
                number = int(event["value"])
                batch[number].append(ref)
                if last[number] == i:
                    end = self._comm(rank, program, batch[number], host, s, stream, lane, sequence, times, i)
                    work[number] = end
                    if not event["flags"] & EventFlag.ASYNC:
                        stream[s] = None if end is None else max(stream[s], end)
            elif kind in (EventKind.WORK_WAIT, EventKind.EVENT_WAIT):
                host += HOST_NS_PER_WAIT
                until = (work if kind == EventKind.WORK_WAIT else events).get(ref, 0.0)
                stream[s] = None if until is None or stream[s] is None else max(stream[s], until)
            elif kind == EventKind.EVENT_RECORD:
                host += HOST_NS_PER_WAIT
                events[ref] = stream[s]
            elif kind == EventKind.HOST:
                host += int(event["value"])
                if ref:
                    host += self.costs.price_op(program.signatures[ref - 1]).duration_ns
            elif kind in (EventKind.STREAM_SYNC, EventKind.DEVICE_SYNC, EventKind.EVENT_SYNC):
                if kind == EventKind.STREAM_SYNC:
                    needed = [stream[s]]
                elif kind == EventKind.EVENT_SYNC:
                    needed = [events.get(ref, 0.0)]
                else:
                    needed = [*stream.values(), *lane.values()]
                if any(t is None for t in needed):
                    return None
                host = max([host, *needed])
        ends = [host, *stream.values(), *lane.values()]
        return None if any(t is None for t in ends) else max(ends)

    def _comm(self, rank, program, refs, host, s, stream, lane, sequence, times, i):
        comms = [program.comms[r] for r in refs]
        group = program.groups[comms[0].group]
        single_p2p = len(comms) == 1 and comms[0].kind in ("send", "recv")
        name = (group.ranks, group.desc, comms[0].peer if single_p2p else None)
        keys = []
        collectives = [c for c in comms if c.kind not in ("send", "recv")]
        for c in comms:
            if c.kind in ("send", "recv"):
                pair = comm_ranks(rank, group, c)
                channel = (group.ranks, group.desc, pair)
                key = (channel, sequence[channel, c.kind])
                sequence[channel, c.kind] += 1
                keys.append((key, self.costs.price_comm(c, pair, rank).duration_ns, 2, (rank, c.kind)))
        if collectives:
            call = collectives[0] if len(collectives) == 1 else merged(collectives)
            channel = (group.ranks, group.desc)
            key = (channel, sequence[channel])
            sequence[channel] += 1
            keys.append(
                (key, self.costs.price_comm(call, group.ranks, rank).duration_ns, len(group.ranks), (rank, 0))
            )
            assert all(agreement(c) for c in collectives)
        ready = None if stream[s] is None or lane[name] is None else max(host, stream[s], lane[name])
        for key, duration, expected, party in keys:
            self.durations[key] = max(duration, self.durations.get(key, 0.0))
            self.expected[key] = expected
            if ready is not None:
                self.arrivals[key][party] = ready
        ends = [self.ends.get(key) for key, *_ in keys]
        end = None if any(e is None for e in ends) or ready is None else max([ready, *ends])
        lane[name] = end
        if end is not None:
            times[i] = (ready, ready, end)
        return end
