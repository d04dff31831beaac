"""Are two programs the same, op by op? Numbers that a process hands out (ids of allocations, works and events,
indices into tables) are resolved or counted from their first use; everything else is compared as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec
import numpy as np

from prism_plugins.program.model import EventFlag, EventKind, OpSignature, Program, TensorSpec
from prism_plugins.program.schedule import describe

_MEMORY = (EventKind.ALLOC, EventKind.FREE)
_COMMUNICATION = (EventKind.COMM, EventKind.WORK_WAIT, EventKind.PHASE_BEGIN, EventKind.PHASE_END)
_CUDA_EVENTS = (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first op in which two programs differ, and how many do."""

    what: str
    """``device`` (kernels, communication, waits, phases), ``memory`` (allocations and releases in their order) or
    ``initial`` (allocations that are live at the start)."""
    position: int
    """Row among the compared events of this kind."""
    phase: str
    left: str
    right: str
    num_differing: int
    """Ops that one program has and the other has not, whatever their order; 0 when only the order differs."""

    def __str__(self) -> str:
        place = f"{self.what} op {self.position}" + (f" in {self.phase}" if self.phase else "")
        extent = f"{self.num_differing} ops differ" if self.num_differing else "only the order differs"
        return f"{place}: {self.left} ≠ {self.right} ({extent})"


def compare_programs(left: Program, right: Program) -> Difference | None:
    """The first difference: of device ops if there is one, else of memory, else of what is live at the start.

    Host durations, group names and where the programs came from are not compared.
    """
    tables = _Tables()
    rows = [_rows(program, tables) for program in (left, right)]
    device = [~np.isin(r["kind"], (*_MEMORY, EventKind.HOST)) for r in rows]
    found = _first_difference(left, right, rows, device, "device")
    if found is None:
        everything = [r["kind"] != EventKind.HOST for r in rows]
        found = _first_difference(left, right, rows, everything, "memory")
    return found if found is not None else _initial_difference(left, right)


def compare_communication(left: Program, right: Program) -> tuple[Difference | None, int]:
    """The first difference of communication, waits for it and phases; and how many device ops differ in all."""
    tables = _Tables()
    rows = [_rows(program, tables) for program in (left, right)]
    device = [r[~np.isin(r["kind"], (*_MEMORY, EventKind.HOST))] for r in rows]
    found = _first_difference(left, right, rows, [np.isin(r["kind"], _COMMUNICATION) for r in rows], "device")
    return found, _num_differing(*device)


class _Tables:
    """Numbers for table entries that are equal in both programs."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def numbers(self, keys: Sequence[Hashable]) -> np.ndarray:
        return np.array([self._numbers.setdefault(key, len(self._numbers)) for key in keys], dtype=np.int64)


_ROW = np.dtype(
    [("kind", "u1"), ("flags", "u1"), ("stream", "u2"), ("what", "i8"), ("id", "i8"), ("size", "i8")]
)


def _rows(program: Program, tables: _Tables) -> np.ndarray:
    """Events with references resolved through common tables and ids counted from their first use."""
    events = program.events
    kinds, refs, values = events["kind"], events["ref"].astype(np.int64), events["value"]
    rows = np.zeros(len(events), dtype=_ROW)
    for column in ("kind", "flags", "stream"):
        rows[column] = events[column]
    # Whether a value that is read back was computed is prism's matter, not the job's; so is what its ledger notes of an allocation that
    # another stream uses: of two buffers used in turn (ZeRO-2's buckets) a rank may give either one, or both.
    rows["flags"] &= np.uint8(0xFF ^ EventFlag.SYNTHESIZED ^ EventFlag.OTHER_STREAM)
    for kind, keys in (
        (EventKind.KERNEL, [op_key(s) for s in program.signatures]),
        (EventKind.COMM, comm_keys(program)),
        (EventKind.PHASE_BEGIN, [("phase", p) for p in program.phases]),
        (EventKind.PHASE_END, [("phase", p) for p in program.phases]),
    ):
        at = kinds == kind
        if at.any():
            rows["what"][at] = tables.numbers(keys)[refs[at]]
    works = np.where(kinds == EventKind.COMM, values, refs)
    rows["id"][:] = -1
    _number(rows, np.isin(kinds, (EventKind.COMM, EventKind.WORK_WAIT)), works)
    _number(rows, np.isin(kinds, _CUDA_EVENTS), refs)
    memory = np.isin(kinds, _MEMORY)
    _number(rows, memory, refs)
    rows["size"][memory] = _sizes(program)[memory]
    return rows


def _number(rows: np.ndarray, at: np.ndarray, ids: np.ndarray) -> None:
    if not at.any():
        return
    _, first, inverse = np.unique(ids[at], return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    rows["id"][at] = order[inverse]


def _sizes(program: Program) -> np.ndarray:
    """Bytes of the allocation of every ALLOC and FREE row."""
    events = program.events
    allocs = events["kind"] == EventKind.ALLOC
    ids = np.concatenate([[a.id for a in program.initial], events["ref"][allocs]]).astype(np.int64)
    nbytes = np.concatenate([[a.nbytes for a in program.initial], events["value"][allocs]]).astype(np.int64)
    order = np.argsort(ids, kind="stable")
    where = np.searchsorted(ids[order], events["ref"])
    return nbytes[order][np.minimum(where, len(ids) - 1)] if len(ids) else np.zeros(len(events), np.int64)


def op_key(signature: OpSignature) -> Hashable:
    """Equal for ops that are the same."""
    return (
        signature.op,
        signature.inputs,
        signature.outputs,
        signature.scalars,
        tuple(sorted(signature.attrs.items())),
    )


def comm_keys(program: Program) -> list[Hashable]:
    """Per entry of ``comms``: equal for calls that are the same, by the same ranks, on the same communicator: of groups with equal
    ranks and description the n-th that the program uses."""
    ordinals: dict[int, int] = {}
    seen: dict[Hashable, int] = {}
    for number in sorted({comm.group for comm in program.comms}):
        group = program.groups[number]
        name = (group.ranks, group.desc)
        ordinals[number] = seen[name] = seen.get(name, -1) + 1
    keys: list[Hashable] = []
    for comm in program.comms:
        group = program.groups[comm.group]
        call = msgspec.structs.replace(comm, group=0, site="")
        keys.append((call, group.ranks, group.desc, group.backend, ordinals[comm.group]))
    return keys


def _first_difference(
    left: Program, right: Program, rows: list[np.ndarray], masks: list[np.ndarray], what: str
) -> Difference | None:
    a, b = (r[m] for r, m in zip(rows, masks, strict=True))
    common = min(len(a), len(b))
    unequal = np.flatnonzero(a[:common] != b[:common])
    if not len(unequal) and len(a) == len(b):
        return None
    position = int(unequal[0]) if len(unequal) else common
    texts, phase = [], ""
    for program, row, mask in ((left, rows[0], masks[0]), (right, rows[1], masks[1])):
        at = np.flatnonzero(mask)
        if position < len(at):
            texts.append(describe_event(program, int(at[position]), size=int(row["size"][at[position]])))
            phase = phase or _phase_at(program, int(at[position]))
        else:
            texts.append("nothing")
    return Difference(
        what=what,
        position=position,
        phase=phase,
        left=texts[0],
        right=texts[1],
        num_differing=_num_differing(a, b),
    )


def _num_differing(a: np.ndarray, b: np.ndarray) -> int:
    """Size of the multiset difference, ids left out (they shift after any insertion)."""
    a, b = a.copy(), b.copy()
    a["id"] = b["id"] = 0
    values, counts = np.unique(np.concatenate([a, b]), return_inverse=True)
    of_a = np.bincount(counts[: len(a)], minlength=len(values))
    of_b = np.bincount(counts[len(a) :], minlength=len(values))
    return int(max(np.maximum(of_a - of_b, 0).sum(), np.maximum(of_b - of_a, 0).sum()))


def _initial_difference(left: Program, right: Program) -> Difference | None:
    a, b = (sorted((x.category, x.nbytes) for x in program.initial) for program in (left, right))
    if a == b:
        return None
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    texts = [f"{x[position][0]} {x[position][1]} B" if position < len(x) else "nothing" for x in (a, b)]
    return Difference(
        what="initial",
        position=position,
        phase="",
        left=texts[0],
        right=texts[1],
        num_differing=max(len(set(a) - set(b)), len(set(b) - set(a)), abs(len(a) - len(b))),
    )


def describe_event(program: Program, index: int, *, size: int | None = None) -> str:
    """An event in words, with what it refers to."""
    event = program.events[index]
    kind, ref, stream = EventKind(int(event["kind"])), int(event["ref"]), int(event["stream"])
    on = f" on stream {stream}" if stream else ""
    if kind == EventKind.KERNEL:
        return _describe_op(program.signatures[ref]) + on
    if kind == EventKind.COMM:
        return _describe_comm(program, ref, bool(event["flags"] & EventFlag.ASYNC)) + on
    if kind in (EventKind.PHASE_BEGIN, EventKind.PHASE_END):
        return f"{'begin' if kind == EventKind.PHASE_BEGIN else 'end'} of {describe(program.phases[ref])}"
    if kind in _MEMORY:
        return f"{kind.name.lower()} of {int(event['value']) if size is None else size} B"
    return kind.name.lower() + on


def _describe_op(signature: OpSignature) -> str:
    tensors = ", ".join(map(_describe_tensor, signature.inputs[:4])) + (
        ", …" if len(signature.inputs) > 4 else ""
    )
    outputs = ", ".join(map(_describe_tensor, signature.outputs[:2])) + (
        ", …" if len(signature.outputs) > 2 else ""
    )
    scalars = ", ".join(f"{name}={value}" for name, value in signature.scalars)
    name = signature.attrs.get("name")
    return f"{signature.op}{f'[{name}]' if name else ''}({tensors}{'; ' + scalars if scalars else ''}) -> {outputs}"


def _describe_tensor(tensor: TensorSpec) -> str:
    strides = f"/{'x'.join(map(str, tensor.strides))}" if tensor.strides else ""
    return f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}{strides}]"


def _describe_comm(program: Program, index: int, is_async: bool) -> str:
    comm = program.comms[index]
    group = program.groups[comm.group]
    ranks = ",".join(map(str, group.ranks[:8])) + (f",… ({len(group.ranks)})" if len(group.ranks) > 8 else "")
    peer = f" peer {group.ranks[comm.peer]}" if comm.peer >= 0 else ""
    return (
        f"{'async ' if is_async else ''}{comm.kind} {comm.dtype} {comm.in_numel}->{comm.out_numel}{peer} "
        f"in {group.desc or group.name} ({ranks})" + (f" at {comm.site}" if comm.site else "")
    )


def _phase_at(program: Program, index: int) -> str:
    for phase, begin, end in program.iter_phases():
        if index <= end:
            return describe(phase) if index >= begin else f"the gap before {describe(phase)}"
    return "what follows the last phase"
