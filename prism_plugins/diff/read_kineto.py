"""Reads torch.profiler's traces: which op launched each kernel, and how long it took.

A kernel belongs to the CPU op with its ``External id``, the innermost one around the launch, and to those around that.
Kernels that triton generated are told by their name. Forward and backward are told by the thread that launched: autograd has its own.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.diff.real import MAX_FILE_BYTES, OpKey, OpTotal, RealRank, RealRun
from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.files import open_regular

COMPILED = "compiled regions"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver", "privateuse1_runtime")
_KINDS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "all_gather": "all_gather", "allgather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_allv": "all_to_all", "all_to_all": "all_to_all",
}  # fmt: skip


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Distributed(msgspec.Struct, frozen=True):
    rank: int = 0


class _Device(msgspec.Struct, frozen=True):
    name: str = ""


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    distributedInfo: _Distributed = _Distributed()
    deviceProperties: list[_Device] = []


def find_traces(path: Path) -> list[Path]:
    """Kineto traces at a path: the file itself, or those of a folder."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")) and p.is_file())


def read_kineto(path: Path) -> RealRun:
    """Read a trace, or a folder with one trace a rank.

    Raises :class:`FileFormatError` for a file that is not such a trace.
    """
    ranks: dict[int, RealRank] = {}
    for file in find_traces(path):
        rank = read_trace(file)
        if rank.rank in ranks:
            raise PrismError(
                f"{path}: two traces of rank {rank.rank}; name one of them, or a folder with one a rank"
            )
        ranks[rank.rank] = rank
    found = tuple(_with_transfers(ranks[rank], ranks.values()) for rank in sorted(ranks))
    times = [rank.iteration_ms for rank in found if rank.iteration_ms]
    return RealRun(
        source=f"{len(found)} Kineto traces of {path}" if len(found) > 1 else f"Kineto trace {path}",
        iteration_ms=max(times, default=0.0),
        iterations=max((rank.iterations for rank in found), default=0),
        ranks=found,
    )


def _with_transfers(rank: RealRank, everyone: Collection[RealRank]) -> RealRank:
    """The member that comes last to a call waits for nobody: the shortest duration among members is the transfer."""
    transfer: dict[str, float] = {}
    for call in rank.collectives_ms:
        of_members = [r.collectives_ms[call] for r in everyone if call in r.collectives_ms]
        if len(of_members) > 1 and len({len(times) for times in of_members}) == 1 and rank.iterations:
            shortest = sum(map(min, zip(*of_members, strict=True)))
            transfer[call[0].group] = transfer.get(call[0].group, 0.0) + shortest / rank.iterations
        else:
            transfer[call[0].group] = math.nan
    known = {group: ms for group, ms in transfer.items() if not math.isnan(ms)}
    return msgspec.structs.replace(rank, transfer_ms=known)


def read_trace(path: Path) -> RealRank:
    """One trace."""
    trace = _decode(path)
    events = [event for event in trace.traceEvents if event.ph == "X"]
    cpu_ops = [event for event in events if event.cat == "cpu_op"]
    ops = {event.args.get("External id"): event for event in cpu_ops}
    around = _parents(cpu_ops)
    launches = {event.args.get("correlation"): event for event in events if event.cat in _RUNTIME}
    kernels = [event for event in events if event.cat in _DEVICE]
    if not kernels:
        raise FileFormatError(f"{path} is a trace without device work; profile with ProfilerActivity.CUDA")
    steps = [e for e in events if e.cat == "user_annotation" and e.name.startswith("ProfilerStep#")]
    steps = [
        step
        for step in steps
        if any(_inside(launches.get(k.args.get("correlation")), [step]) for k in kernels)
    ]
    count = max(len(steps), 1)
    autograd = {e.tid for e in events if e.cat == "cpu_op" and e.name.startswith("autograd::engine::")}
    optimizer = [e for e in events if e.cat == "user_annotation" and e.name.startswith("Optimizer.step")]
    calls: dict[tuple[OpKey, ...], int] = {}
    us: dict[tuple[OpKey, ...], float] = {}
    phases = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    collectives: dict[tuple[OpKey, str], list[tuple[float, float]]] = {}
    counted: set[tuple[tuple[OpKey, ...], Any]] = set()
    for kernel in kernels:
        external = kernel.args.get("External id")
        op = ops.get(external)
        chain = [_key(kernel, op)]
        if op is not None and chain[0].name == op.name:
            while (op := around.get(id(op))) is not None:
                chain.append(_op_key(op))
        key = tuple(chain)
        # Traces of ours: a kernel's turn begins with its wait for other streams.
        waited_us = 0 if chain[0].group else _number(kernel.args.get("prism_wait_us"))
        own_us = kernel.dur - min(max(waited_us, 0), kernel.dur)
        us[key] = us.get(key, 0.0) + own_us
        if (key, external) not in counted or external is None or chain[0].name == COMPILED:
            counted.add((key, external))
            calls[key] = calls.get(key, 0) + 1
        if chain[0].group:
            members = str(kernel.args.get("Process Group Ranks", ""))
            collectives.setdefault((chain[0], members), []).append((kernel.ts, kernel.dur / 1e3))
        launch = launches.get(kernel.args.get("correlation"))
        if not chain[0].group and launch is not None:
            phase = (
                "backward"
                if launch.tid in autograd
                else "optimizer"
                if _inside(launch, optimizer)
                else "forward"
            )
            phases[phase] += own_us
    iteration = sum(step.dur for step in steps) / count if steps else _extent(kernels)
    return RealRank(
        rank=trace.distributedInfo.rank,
        iterations=count,
        iteration_ms=iteration / 1e3,
        ops={key: OpTotal(calls=calls[key] / count, ms=us[key] / 1e3 / count) for key in us},
        phase_ms={name: value / 1e3 / count for name, value in phases.items()} if autograd else {},
        collectives_ms={call: [ms for _, ms in sorted(times)] for call, times in collectives.items()},
        gpu=trace.deviceProperties[0].name if trace.deviceProperties else "",
    )


def _key(kernel: _Event, op: _Event | None) -> OpKey:
    collective = kernel.args.get("Collective name")
    if collective is not None:
        kind = _KINDS.get(str(collective), str(collective))
        elements = max(_number(kernel.args.get("In msg nelems")), _number(kernel.args.get("Out msg nelems")))
        return OpKey(
            kind, ((elements,),), str(kernel.args.get("Process Group Description", "")) or "unnamed group"
        )
    if kernel.name.startswith("ncclDevKernel"):
        return OpKey("nccl", (), "unnamed group")
    if kernel.name.startswith("triton_"):
        return OpKey(COMPILED)
    if op is None:
        return OpKey(f"kernel {kernel.name[:80]}")
    return _op_key(op)


def _op_key(op: _Event) -> OpKey:
    return OpKey(op.name, tuple(_shapes(op.args.get("Input Dims"))))


def _parents(ops: list[_Event]) -> dict[int, _Event]:
    """For every op that is called by another one, by ``id``: that one. Ops of a thread nest."""
    parents: dict[int, _Event] = {}
    stacks: dict[Any, list[_Event]] = {}
    for op in sorted(ops, key=lambda op: (op.ts, -op.dur)):
        stack = stacks.setdefault(op.tid, [])
        while stack and stack[-1].ts + stack[-1].dur <= op.ts:
            stack.pop()
        if stack:
            parents[id(op)] = stack[-1]
        stack.append(op)
    return parents


def _shapes(dims: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of tensor inputs in order, lists flattened; scalars, which are empty, left out."""
    if isinstance(dims, list) and dims:
        if all(isinstance(d, int) for d in dims):
            yield tuple(dims)
        else:
            for each in dims:
                yield from _shapes(each)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _inside(event: _Event | None, stretches: Iterable[_Event]) -> bool:
    return event is not None and any(s.ts <= event.ts <= s.ts + s.dur for s in stretches)


def _extent(kernels: list[_Event]) -> float:
    return max(k.ts + k.dur for k in kernels) - min(k.ts for k in kernels)


def _decode(path: Path) -> _Trace:
    try:
        with open_regular(path) as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw, "rb") if zipped else raw as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path} is truncated or cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise FileFormatError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB; profile fewer steps")
    try:
        return msgspec.json.decode(data, type=_Trace)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{path} is not a Kineto trace: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path} is truncated or not JSON: {error}") from None
