"""Synthetic programs and costs for the simulator's tests."""

from __future__ import annotations

import numpy as np

from prism_plugins.costs.base import Price, SteadyClock
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import (
    EVENT_DTYPE,
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    Program,
)
from prism_plugins.world.layout import Layout


class TableCosts(SteadyClock):
    """Prices ops by an attribute and calls by size; ``scale`` stretches one kind of cost."""

    name = "table"

    def __init__(self, *, op_scale: float = 1.0, comm_scale: float = 1.0, host_scale: float = 1.0) -> None:
        self.op_scale, self.comm_scale, self.host_scale = op_scale, comm_scale, host_scale

    def price_op(self, signature: OpSignature) -> Price:
        a = signature.attrs
        if a.get("free"):
            return Price(duration_ns=0.0, rule="t", provenance="free", host_ns=a["host"] * self.host_scale)
        return Price(
            duration_ns=a["ns"] * self.op_scale,
            rule="t",
            provenance="unpriced" if signature.op == "aten::mystery" else "modelled",
            host_ns=a["host"] * self.host_scale,
        )

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        base = 500.0 if comm.kind in ("send", "recv") else 700.0 + 100 * len(ranks)
        return Price(
            duration_ns=(base + comm.nbytes) * self.comm_scale,
            rule="t",
            provenance="modelled",
            host_ns=300.0 * self.host_scale,
        )

    def assumptions(self) -> tuple[str, ...]:
        return ()


class Builder:
    """Appends events to one rank's program."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rows: list[tuple] = []
        self.signatures: list[OpSignature] = []
        self.comms: list[CommSignature] = []
        self.groups: list[GroupInfo] = []
        self.phases: list[Phase] = []
        self._index: dict = {}
        self._work = 0
        self._event = 0

    def _intern(self, table: list, item) -> int:
        key = (id(table), repr(item))
        if key not in self._index:
            self._index[key] = len(table)
            table.append(item)
        return self._index[key]

    def group(self, ranks: tuple[int, ...], desc: str = "") -> int:
        return self._intern(self.groups, GroupInfo(ranks=ranks, name=f"g{desc}", desc=desc))

    def kernel(
        self, ns: float, *, stream: int = 0, host: float = 100.0, op: str = "aten::mm", free: bool = False
    ) -> None:
        attrs = {"ns": ns, "host": host, **({"free": 1} if free else {})}
        self.rows.append(
            (EventKind.KERNEL, 0, stream, self._intern(self.signatures, OpSignature(op=op, attrs=attrs)), 0)
        )

    def comm(self, *signatures: CommSignature, stream: int = 0, is_async: bool = False) -> int:
        self._work += 1
        for s in signatures:
            flags = EventFlag.ASYNC if is_async else 0
            self.rows.append((EventKind.COMM, flags, stream, self._intern(self.comms, s), self._work))
        return self._work

    def wait(self, work: int, *, stream: int = 0) -> None:
        self.rows.append((EventKind.WORK_WAIT, 0, stream, work, 0))

    def record(self, *, stream: int = 0) -> int:
        self._event += 1
        self.rows.append((EventKind.EVENT_RECORD, 0, stream, self._event, 0))
        return self._event

    def wait_event(self, event: int, *, stream: int = 0) -> None:
        self.rows.append((EventKind.EVENT_WAIT, 0, stream, event, 0))

    def sync(self, *, stream: int = 0) -> None:
        self.rows.append((EventKind.STREAM_SYNC, 0, stream, 0, 0))

    def event_sync(self, event: int) -> None:
        self.rows.append((EventKind.EVENT_SYNC, 0, 0, event, 0))

    def device_sync(self) -> None:
        self.rows.append((EventKind.DEVICE_SYNC, 0, 0, 0, 0))

    def host_op(self, ns: float) -> None:
        signature = OpSignature(op="host::work", attrs={"ns": ns, "host": 0.0})
        self.rows.append((EventKind.HOST, 0, 0, 1 + self._intern(self.signatures, signature), 0))

    def host(self, ns: int) -> None:
        self.rows.append((EventKind.HOST, 0, 0, 0, ns))

    def begin(self, kind: str, **fields) -> None:
        self._phase = self._intern(self.phases, Phase(kind=kind, **fields))
        self.rows.append((EventKind.PHASE_BEGIN, 0, 0, self._phase, 0))

    def end(self) -> None:
        self.rows.append((EventKind.PHASE_END, 0, 0, self._phase, 0))

    def program(self) -> Program:
        return Program(
            rank=self.rank,
            events=np.array(self.rows, dtype=EVENT_DTYPE),
            signatures=self.signatures,
            comms=self.comms,
            groups=self.groups,
            phases=self.phases,
            initial=[],
        )


def collective(
    group: int, numel: int = 100, kind: str = "all_reduce", dtype: str = "float32"
) -> CommSignature:
    return CommSignature(kind=kind, group=group, dtype=dtype, in_numel=numel, out_numel=numel)


def message(kind: str, group: int, peer: int, numel: int = 50) -> CommSignature:
    sizes = {"in_numel": numel} if kind == "send" else {"out_numel": numel}
    return CommSignature(kind=kind, group=group, dtype="float32", peer=peer, **sizes)


def one_class_per_rank(programs: dict[int, Program], layout: Layout | None = None) -> JobPrograms:
    return JobPrograms(
        layout=layout or Layout(world_size=len(programs), dp=len(programs)),
        classes=tuple(
            RankClass(name=f"rank {r}", ranks=np.array([r]), representative=r, exemplar=p)
            for r, p in programs.items()
        ),
    )


def random_programs(
    rng: np.random.Generator, *, num_ranks: int, num_actions: int, num_streams: int = 3
) -> dict[int, Program]:
    """Programs that cannot hang: all ranks issue what concerns them in one global order."""
    builders = {r: Builder(r) for r in range(num_ranks)}
    pending: dict[int, list[int]] = {r: [] for r in builders}
    recorded: dict[int, list[int]] = {r: [] for r in builders}
    subsets = [tuple(range(num_ranks))]
    for _ in range(3):
        size = int(rng.integers(2, num_ranks + 1))
        subsets.append(tuple(sorted(rng.choice(num_ranks, size, replace=False).tolist())))

    def stream() -> int:
        return int(rng.choice([0, 0, 0, *range(num_streams)]))

    for _ in range(num_actions):
        action = rng.choice(
            ["kernel"] * 8
            + ["free", "host", "collective", "collective", "coalesced", "p2p", "batch", "exchange"]
            + ["wait", "wait", "record", "wait_event", "sync", "device_sync", "event_sync"]
        )
        r = int(rng.integers(num_ranks))
        b = builders[r]
        if action == "kernel":
            b.kernel(float(rng.integers(1, 3000)), stream=stream(), host=float(rng.integers(10, 1500)))
        elif action == "free":
            b.kernel(0, stream=stream(), host=float(rng.integers(10, 500)), free=True)
        elif action == "host":
            b.host(int(rng.integers(1, 5000)))
            b.host_op(float(rng.integers(1, 5000)))
        elif action in ("collective", "coalesced"):
            ranks = subsets[int(rng.integers(len(subsets)))]
            sizes = [int(rng.integers(1, 2000)) for _ in range(1 if action == "collective" else 3)]
            for m in ranks:
                g = builders[m].group(ranks, f"s{subsets.index(ranks)}")
                is_async = bool(rng.random() < 0.5)
                work = builders[m].comm(
                    *(collective(g, n) for n in sizes), stream=stream(), is_async=is_async
                )
                pending[m].append(work)
        elif action in ("p2p", "batch", "exchange"):
            a, c = (int(x) for x in rng.choice(num_ranks, 2, replace=False))
            ranks = subsets[0]
            n, n2 = (int(x) for x in rng.integers(1, 2000, 2))
            is_async = bool(rng.random() < 0.5)
            ga, gc = builders[a].group(ranks, "p2p"), builders[c].group(ranks, "p2p")
            if action == "p2p":
                pending[a].append(
                    builders[a].comm(message("send", ga, c, n), stream=stream(), is_async=is_async)
                )
                pending[c].append(builders[c].comm(message("recv", gc, a, n), stream=stream()))
            elif action == "batch":
                sends = [message("send", ga, c, n), message("recv", ga, c, n2)]
                recvs = [message("recv", gc, a, n), message("send", gc, a, n2)]
                pending[a].append(builders[a].comm(*sends, stream=stream(), is_async=is_async))
                pending[c].append(builders[c].comm(*recvs, stream=stream(), is_async=is_async))
            else:  # a ring among all: every rank sends to the next and receives from the one before, in one batch
                for m in range(num_ranks):
                    g = builders[m].group(ranks, "p2p")
                    parts = [
                        message("send", g, (m + 1) % num_ranks, n),
                        message("recv", g, (m - 1) % num_ranks, n),
                    ]
                    pending[m].append(builders[m].comm(*parts, stream=stream(), is_async=is_async))
        elif action == "wait" and pending[r]:
            b.wait(pending[r].pop(int(rng.integers(len(pending[r])))), stream=stream())
        elif action == "record":
            recorded[r].append(b.record(stream=stream()))
        elif action == "wait_event" and recorded[r]:
            b.wait_event(recorded[r][int(rng.integers(len(recorded[r])))], stream=stream())
        elif action == "sync" and rng.random() < 0.5:
            b.sync(stream=stream())
        elif action == "event_sync" and recorded[r] and rng.random() < 0.5:
            b.event_sync(recorded[r][-1])
        elif action == "device_sync" and rng.random() < 0.3:
            b.device_sync()
    for b in builders.values():
        b.kernel(1.0)
    return {r: b.program() for r, b in builders.items()}
