"""What one rank's device does when: the rows of a program that occupy the device, with their predicted times.

Every output that draws or sums device time (traces, ``prism ops``, the temporal breakdown) starts here, so that
they agree on what is a kernel, what is a copy, and which rows are one coalesced communication kernel.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from prism_plugins.program.model import EventKind, GroupInfo, OpSignature, Program
from prism_plugins.simulate.timeline import COMM_LANE, OpTimes


class SpanKind(enum.IntEnum):
    """What a span is to a profiler."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2
    """Copies and memsets: not compute, in the sense of Kineto and HTA."""


class DeviceSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Device spans of one rank, in host issue order; every array has shape (num_spans,)."""

    row: np.ndarray
    """Row of the program's events; for coalesced communication the first row of the work id."""
    start_ns: np.ndarray
    end_ns: np.ndarray
    transfer_start_ns: np.ndarray
    """After waiting for members of a collective, or for kernels of other streams."""
    lane: np.ndarray
    kind: np.ndarray
    """:class:`SpanKind`."""
    members: dict[int, np.ndarray]
    """Rows that were coalesced into one span, by span index; only where there is more than one."""


class TemporalBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Device time of one rank from the start of its first span to the end of its last, as HTA counts it, ns.

    ``compute_ns`` is the union of the compute spans over all streams; ``non_compute_ns`` is the time with only
    communication or copies; ``idle_ns`` has nothing on the device. The three sum to ``kernel_ns``.
    """

    idle_ns: float
    compute_ns: float
    non_compute_ns: float
    kernel_ns: float


def device_spans(program: Program, times: OpTimes) -> DeviceSpans:
    """Spans of the rows that take device time. Rows of one work id become one span."""
    events = program.events
    kinds = events["kind"]
    is_kernel = (kinds == EventKind.KERNEL) & (times.end_ns > times.start_ns)
    comm_rows = np.flatnonzero(kinds == EventKind.COMM)
    work = events["value"][comm_rows]
    _, first, inverse = np.unique(work, return_index=True, return_inverse=True)
    num_works = len(first)
    comm_start = np.full(num_works, np.inf)
    comm_end = np.full(num_works, -np.inf)
    comm_transfer = np.full(num_works, -np.inf)
    np.minimum.at(comm_start, inverse, times.start_ns[comm_rows])
    np.maximum.at(comm_end, inverse, times.end_ns[comm_rows])
    np.maximum.at(comm_transfer, inverse, times.transfer_start_ns[comm_rows])

    kernel_rows = np.flatnonzero(is_kernel)
    rows = np.concatenate((kernel_rows, comm_rows[first]))
    order = np.argsort(rows, kind="stable")
    is_memory = np.array([is_memory_op(signature) for signature in program.signatures], dtype=bool)
    kernel_kind = np.full(len(kernel_rows), int(SpanKind.COMPUTE), dtype=np.int8)
    if len(kernel_rows):
        kernel_kind[is_memory[events["ref"][kernel_rows]]] = SpanKind.MEMORY
    kind = np.concatenate((kernel_kind, np.full(num_works, int(SpanKind.COMMUNICATION), dtype=np.int8)))

    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    by_work = np.argsort(inverse, kind="stable")
    counts = np.bincount(inverse, minlength=num_works)
    last = np.cumsum(counts)
    members = {
        int(position[len(kernel_rows) + w]): comm_rows[by_work[last[w] - counts[w] : last[w]]]
        for w in np.flatnonzero(counts > 1).tolist()
    }
    return DeviceSpans(
        row=rows[order],
        start_ns=np.concatenate((times.start_ns[kernel_rows], comm_start))[order],
        end_ns=np.concatenate((times.end_ns[kernel_rows], comm_end))[order],
        transfer_start_ns=np.concatenate((times.transfer_start_ns[kernel_rows], comm_transfer))[order],
        lane=np.concatenate((times.lane[kernel_rows], times.lane[comm_rows[first]]))[order],
        kind=kind[order],
        members=members,
    )


def temporal_breakdown(spans: DeviceSpans) -> TemporalBreakdown:
    """Idle, compute and non-compute time of the device; see :class:`TemporalBreakdown`."""
    if not len(spans.row):
        return TemporalBreakdown(idle_ns=0.0, compute_ns=0.0, non_compute_ns=0.0, kernel_ns=0.0)
    busy = _union(spans.start_ns, spans.end_ns)
    is_compute = spans.kind == SpanKind.COMPUTE
    compute = _union(spans.start_ns[is_compute], spans.end_ns[is_compute])
    total = float(spans.end_ns.max() - spans.start_ns.min())
    return TemporalBreakdown(
        idle_ns=total - busy, compute_ns=compute, non_compute_ns=busy - compute, kernel_ns=total
    )


def is_memory_op(signature: OpSignature) -> bool:
    """Whether the CUDA runtime, not a kernel, does the work: a memset, or a copy that changes neither layout nor dtype."""
    return memory_op_name(signature) is not None


def memory_op_name(signature: OpSignature) -> str | None:
    """Kineto's name of a copy or memset (``Memcpy DtoD (Device -> Device)``), or None for a kernel.

    ``copy_`` is a plain cudaMemcpyAsync when both sides are contiguous and of one shape and dtype (ATen's
    ``copy_device_to_device``); a copy from or to the host always is.
    """
    direction = signature.attrs.get("direction")
    if direction in ("h2d", "d2h"):
        host = str(signature.attrs.get("host", "pinned")).capitalize()
        return f"Memcpy HtoD ({host} -> Device)" if direction == "h2d" else f"Memcpy DtoH (Device -> {host})"
    if signature.op in ("aten::copy_", "aten::copy_.default"):
        tensors = (*signature.inputs[:2], *signature.outputs[:1])
        same = len({(t.dtype, t.shape) for t in tensors}) == 1
        if same and not any(t.strides for t in tensors):
            return "Memcpy DtoD (Device -> Device)"
    if signature.op == "prism::memset":
        return "Memset (Device)"
    return None


class Communicator(msgspec.Struct, frozen=True):
    """What a communication lane stands for."""

    group: GroupInfo
    peer: int = -1
    """Global rank of the other side where NCCL keeps a communicator of the pair (uncoalesced send and receive)."""


def communicator_of_lane(program: Program, lane: int) -> Communicator | None:
    """The communicator of a lane, or None for a CUDA stream.

    Lanes are ``COMM_LANE + group`` and, for pairs, ``COMM_LANE + num_groups * (1 + peer) + group``.
    """
    if lane < COMM_LANE:
        return None
    pair, index = divmod(lane - COMM_LANE, len(program.groups))
    group = program.groups[index]
    return Communicator(group, group.ranks[pair - 1]) if pair else Communicator(group)


def _union(start: np.ndarray, end: np.ndarray) -> float:
    """Total length of the union of intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    starts, ends = start[order], np.maximum.accumulate(end[order])
    previous = np.concatenate(([-np.inf], ends[:-1]))
    return float(np.sum(np.maximum(ends - np.maximum(starts, previous), 0.0)))
