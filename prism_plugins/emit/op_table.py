"""The program of one rank as a table, one op a row, with predicted times: what ``prism ops`` prints."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from prism_plugins.emit.spans import communicator_of_lane
from prism_plugins.emit.trace_names import op_name, phase_name
from prism_plugins.program.model import CommSignature, EventFlag, EventKind, OpSignature, Program
from prism_plugins.simulate.timeline import OpTimes


class OpRow(msgspec.Struct, frozen=True, kw_only=True):
    """One op. Times are microseconds from the start of the iteration."""

    index: int
    """Row of the program's events."""
    phase: str
    stream: str
    """CUDA stream number, or ``nccl:<process group name>``, with ``:<peer>`` for the communicator of a pair."""
    kind: str
    """``kernel`` or ``comm``."""
    name: str
    """Op with overload (``aten::add.Tensor``), or the kind of the collective (``all_reduce``)."""
    group: str = ""
    """Description (or name) of the process group."""
    group_ranks: tuple[int, ...] = ()
    """Global ranks; communication only."""
    peer: int = -1
    """Global rank of the root, or of the other side of a send or receive; -1 where there is none."""
    bytes: int = 0
    """Kernel: of its inputs and outputs; communication: of the message, as nccl-tests counts it."""
    dtype: str = ""
    in_shapes: tuple[tuple[int, ...], ...] = ()
    in_numel: int = 0
    out_numel: int = 0
    is_async: bool = False
    work: int = -1
    """Communication with the same work is one kernel."""
    site: str = ""
    """Communication: ``path:line`` of the call in the script or its framework."""
    start_us: float
    duration_us: float
    wait_us: float = 0.0
    """Part of the duration spent waiting: for the other members, or for kernels of other streams."""


def op_rows(program: Program, times: OpTimes, *, only_comm: bool = False, phase: str = "") -> Iterator[OpRow]:
    """Rows in host issue order; ``phase`` keeps phases whose name contains it (case-insensitive)."""
    events = program.events
    kinds = events["kind"]
    wanted = kinds == EventKind.COMM
    if not only_comm:
        wanted |= kinds == EventKind.KERNEL
    owner = phase_of_row(program)
    phase_names = [*(phase_name(p) for p in program.phases), ""]
    if phase:
        keep = np.array([phase.lower() in name.lower() for name in phase_names])
        wanted &= keep[owner]
    op_fields = [_op_fields(signature) for signature in program.signatures]
    comm_fields = [_comm_fields(signature, program) for signature in program.comms]
    lane_names = {lane: _lane_name(program, lane) for lane in np.unique(times.lane).tolist()}
    for row in np.flatnonzero(wanted).tolist():
        _, flags, _, ref, value = events[row].tolist()
        is_comm = kinds[row] == EventKind.COMM
        lane = int(times.lane[row])
        start, end = float(times.start_ns[row]), float(times.end_ns[row])
        extra = {"is_async": bool(flags & EventFlag.ASYNC), "work": value} if is_comm else {}
        yield OpRow(
            index=row,
            phase=phase_names[int(owner[row])],
            stream=lane_names[lane],
            start_us=round(start / 1e3, 3),
            duration_us=round((end - start) / 1e3, 3),
            wait_us=round((float(times.transfer_start_ns[row]) - start) / 1e3, 3),
            **(comm_fields[ref] if is_comm else op_fields[ref]),
            **extra,
        )


def matching_phases(program: Program, phase: str) -> bool:
    """Whether any phase of the program has this text in its name."""
    return any(phase.lower() in phase_name(p).lower() for p in program.phases)


def _lane_name(program: Program, lane: int) -> str:
    communicator = communicator_of_lane(program, lane)
    if communicator is None:
        return str(lane)
    return f"nccl:{communicator.group.name}" + (f":{communicator.peer}" if communicator.peer >= 0 else "")


def phase_of_row(program: Program) -> np.ndarray:
    """Index into ``phases`` for every row, or the number of phases outside any."""
    owner = np.full(len(program.events), len(program.phases), dtype=np.int64)
    refs = program.events["ref"]
    kinds = program.events["kind"]
    begins = np.flatnonzero(kinds == EventKind.PHASE_BEGIN)
    ends = np.flatnonzero(kinds == EventKind.PHASE_END)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        owner[begin : end + 1] = refs[begin]
    return owner


def _op_fields(signature: OpSignature) -> dict:
    tensors = (*signature.inputs, *signature.outputs)
    name = op_name(signature) if signature.op == "prism::fused" else signature.op
    return {
        "kind": "kernel",
        "name": name,
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "dtype": tensors[0].dtype if tensors else "",
        "in_shapes": tuple(tensor.shape for tensor in signature.inputs),
    }


def _comm_fields(signature: CommSignature, program: Program) -> dict:
    group = program.groups[signature.group]
    return {
        "kind": "comm",
        "name": signature.kind,
        "group": group.desc or group.name,
        "group_ranks": group.ranks,
        "peer": group.ranks[signature.peer] if 0 <= signature.peer < len(group.ranks) else -1,
        "bytes": signature.nbytes,
        "dtype": signature.dtype,
        "in_numel": signature.in_numel,
        "out_numel": signature.out_numel,
        "site": signature.site,
    }
