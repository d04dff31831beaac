"""Prices of a program as arrays that its events index."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel, Price
from prism_plugins.program.model import CommSignature, EventKind, GroupInfo, OpSignature, Program

HOST_NS_PER_WAIT = 1_500.0
"""Host time of Work.wait, an event record or an event wait: a CUDA runtime call under a thin Python wrapper."""
_HBM_PASSES = {"all_reduce": 3.0, "reduce_scatter": 3.0, "reduce": 3.0}
"""HBM accesses for each byte on the wire: what goes out is read and what comes in written; a reduction reads what it adds to."""
_ARITHMETIC_FLOPS_PER_BYTE = 100.0
"""From here on arithmetic bounds an op: half the ridge of current GPUs in bf16 (H100 295, H200 206, A100 153, B200 281)."""


class ProgramPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays over the tables of one program."""

    op_ns: np.ndarray
    """float64 over ``signatures``; 0 for ops that launch nothing."""
    op_host_ns: np.ndarray
    op_launches: np.ndarray
    """bool over ``signatures``: the op occupies its stream."""
    op_unpriced: np.ndarray
    comm_ns: np.ndarray
    """float64 over ``comms``."""
    comm_host_ns: np.ndarray
    comm_unpriced: np.ndarray
    op_bytes: np.ndarray
    """HBM traffic, bytes."""
    op_arithmetic: np.ndarray
    """bool over ``signatures``: bound by arithmetic rather than by HBM."""
    comm_channels: np.ndarray
    """SMs that each call holds."""
    comm_hbm_rate: np.ndarray
    """HBM traffic of each call while it transfers, bytes/ns."""
    comm_share: dict[str, np.ndarray]
    """Link → share of its rate that each call takes, 0 for calls that another link limits."""


class Pricer:
    """Prices programs, remembering tables that several programs share."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._ops: dict[tuple[int, int], tuple[OpSignature, CostModel, Price]] = {}
        self._tables: dict[int, tuple[object, tuple[np.ndarray, ...]]] = {}
        self._programs: dict[int, tuple[Program, ProgramPrices]] = {}

    def price(self, program: Program) -> ProgramPrices:
        """Price every distinct op and call of a program."""
        entry = self._programs.get(id(program))
        if entry is None:
            entry = self._programs[id(program)] = (program, self._price(program))
        return entry[1]

    def _price(self, program: Program) -> ProgramPrices:
        op_ns, op_host_ns, op_launches, op_unpriced, op_bytes, op_arithmetic = self._op_table(program)
        used = set(used_comms(program).tolist())
        comm = [self.price_comm(program, c) if i in used else _UNUSED for i, c in enumerate(program.comms)]
        return ProgramPrices(
            op_ns=op_ns,
            op_host_ns=op_host_ns,
            op_launches=op_launches,
            op_unpriced=op_unpriced,
            comm_ns=np.array([p.duration_ns for p in comm]),
            comm_host_ns=np.array([p.host_ns for p in comm]),
            comm_unpriced=np.array([p.provenance == "unpriced" for p in comm], dtype=bool),
            op_bytes=op_bytes,
            op_arithmetic=op_arithmetic,
            comm_channels=np.array([p.channels for p in comm]),
            comm_hbm_rate=np.array(
                [
                    _HBM_PASSES.get(c.kind, 2.0) * p.bytes / max(p.duration_ns, 1.0)
                    for c, p in zip(program.comms, comm, strict=True)
                ]
            ),
            comm_share={
                link: np.array([p.link_share * (p.link == link) for p in comm]) for link in ("gpu", "nic")
            },
        )

    def price_comm(self, program: Program, comm: CommSignature) -> Price:
        """Price one call as this program's rank makes it."""
        return self._costs.price_comm(
            comm, comm_ranks(program.rank, program.groups[comm.group], comm), program.rank
        )

    def _op_table(self, program: Program) -> tuple[np.ndarray, ...]:
        entry = self._tables.get(id(program.signatures))
        if entry is None:
            costs = self._costs.in_state_of(program.signatures)
            prices = [self._op(s, costs) for s in program.signatures]
            arrays = (
                np.array([0.0 if p.provenance == "free" else p.duration_ns for p in prices]),
                np.array([p.host_ns for p in prices]),
                np.array([p.provenance != "free" for p in prices], dtype=bool),
                np.array([p.provenance == "unpriced" for p in prices], dtype=bool),
                np.array([p.bytes for p in prices]),
                np.array([p.flops > _ARITHMETIC_FLOPS_PER_BYTE * p.bytes for p in prices], dtype=bool),
            )
            entry = self._tables[id(program.signatures)] = (program.signatures, arrays)
        return entry[1]

    def _op(self, signature: OpSignature, costs: CostModel) -> Price:
        key = (id(signature), id(costs))
        entry = self._ops.get(key)
        if entry is None:  # the entry keeps both objects, so their ids are not reused
            entry = self._ops[key] = (signature, costs, costs.price_op(signature))
        return entry[2]


def used_comms(program: Program) -> np.ndarray:
    """Indices of the calls that events refer to; a derived program may carry entries of another stage's table."""
    events = program.events
    return np.flatnonzero(np.bincount(events["ref"][events["kind"] == EventKind.COMM]))


_UNUSED = Price(duration_ns=0.0, rule="unused", provenance="free")


def comm_ranks(rank: int, group: GroupInfo, comm: CommSignature) -> tuple[int, ...]:
    """The ranks a call is priced for: the group, or (sender, receiver)."""
    if comm.kind == "send":
        return (rank, group.ranks[comm.peer])
    if comm.kind == "recv":
        return (group.ranks[comm.peer], rank)
    return group.ranks


def host_ns_of_events(
    kind: np.ndarray, ref: np.ndarray, value: np.ndarray, prices: ProgramPrices
) -> np.ndarray:
    """Host time of events, ns; their columns and the result have shape (num_events,)."""
    host = np.zeros(len(kind))
    waits = (kind == EventKind.WORK_WAIT) | (kind == EventKind.EVENT_RECORD) | (kind == EventKind.EVENT_WAIT)
    host[waits] = HOST_NS_PER_WAIT
    for of_kind, table in ((EventKind.KERNEL, prices.op_host_ns), (EventKind.COMM, prices.comm_host_ns)):
        at = np.flatnonzero(kind == of_kind)
        host[at] = table[ref[at]]
    at = np.flatnonzero(kind == EventKind.HOST)
    host[at] = value[at]
    priced = at[ref[at] > 0]
    host[priced] += prices.op_ns[ref[priced] - 1]
    return host
