"""A predicted timeline of one rank as a Kineto trace (Chrome JSON), which Perfetto, Holistic Trace Analysis,
TensorBoard and Chakra read.

What readers are strict about, and what is done here:

* HTA finds the rank by the pattern ``"rank":\\s+N`` in the first line that has it, so separators are not compact
  and ``distributedInfo`` comes first. Without it all ranks collapse onto rank 0.
* HTA drops the last ``ProfilerStep#N``: one empty step is added after the real one.
* HTA joins kernels to launches by ``correlation``; both are written for every kernel.
* HTA floors decimal timestamps to whole microseconds, start up and end down, which loses up to a microsecond a
  kernel; timestamps are whole microseconds here, rounded so that neighbours still touch, and never 0 long.
* Perfetto drops events that overlap on one track without nesting: spans of one track are disjoint, phases enclose
  their kernels, and overlapping work of one communicator gets a second track.
* pids differ between ranks, so traces of several ranks can be opened together.

Times on the host track are those of the simulator's host lane: an op lasts from when the host turns to it until it
is launched.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from prism_plugins.costs.base import Price
from prism_plugins.emit import trace_names as names
from prism_plugins.emit.files import replaced_file
from prism_plugins.emit.memory_curve import allocated_curve
from prism_plugins.emit.spans import DeviceSpans, SpanKind, communicator_of_lane, device_spans
from prism_plugins.emit.trace_layout import SYNC_NAMES, HostTimes, Tracks, whole_microseconds
from prism_plugins.program.model import EventFlag, EventKind, OpSignature, Program
from prism_plugins.program.slices import GpuFacts
from prism_plugins.simulate.timeline import OpTimes

CPU_PID_BASE = 1_000_000
MAIN_THREAD = 1
FIRST_CORRELATION = 1_000_000
"""HTA keeps event indices in the integer type that the correlations need; with pandas 3, small ones overflow it."""

_SLOT = "\x00"
_CHUNK_EVENTS = 8192
_LAUNCH_US = 4
"""Length drawn for a launch call, where there is room; the host's time itself is the simulator's."""


class TraceContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says about the job around it."""

    world_size: int
    iteration_time_ns: float
    gpus_per_node: int = 8
    gpu: GpuFacts | None = None
    cost_model: str = ""
    price_op: Callable[[OpSignature], Price] | None = None
    """To name the rule behind every kernel's duration."""


def write_kineto(path: Path, program: Program, times: OpTimes, context: TraceContext) -> None:
    """Write the trace of one rank, gzipped. The file appears when it is complete."""
    with (
        replaced_file(path) as temporary,
        gzip.GzipFile(fileobj=temporary, filename="", mode="wb", compresslevel=3, mtime=0) as out,
    ):
        out.write(_header(program, context).encode())
        separator = ""
        events = trace_events(program, times, context)
        while chunk := list(itertools.islice(events, _CHUNK_EVENTS)):
            out.write((separator + ",\n".join(chunk)).encode())
            separator = ",\n"
        out.write(b"\n]}\n")


def trace_events(program: Program, times: OpTimes, context: TraceContext) -> Iterator[str]:
    """The events of the trace, each a JSON object as text."""
    spans = device_spans(program, times)
    tracks = Tracks(spans)
    start_us, end_us = whole_microseconds(spans, tracks.tid)
    host = HostTimes(program, times, iteration_time_ns=context.iteration_time_ns)
    yield from _metadata(program, context, tracks)
    yield from _steps(program, context, host, end_us)
    yield from _phases(program, spans, tracks, start_us, end_us, host)
    yield from _kernels(program, spans, tracks, start_us, end_us, host, context)
    yield from _syncs(program, host)
    yield from _memory(program, host)


def _header(program: Program, context: TraceContext) -> str:
    """Everything before the events, on the first line."""
    device = program.rank % context.gpus_per_node
    joined = [group for group in program.groups if program.rank in group.ranks]
    head: dict = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": program.rank,
            "world_size": context.world_size,
            "pg_count": len(joined),
            "pg_config": [
                {
                    "pg_name": group.name,
                    "pg_desc": group.desc or "undefined",
                    "backend_config": f"cuda:{group.backend}",
                    "pg_size": len(group.ranks),
                    "ranks": list(group.ranks),
                }
                for group in joined
            ],
        },
        "deviceProperties": [],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": f"rank{program.rank}.json",
        "prism": {"predicted": True, "program": program.source, "cost_model": context.cost_model},
    }
    if context.gpu is not None:
        head["deviceProperties"] = [
            {
                "id": device,
                "name": context.gpu.name,
                "totalGlobalMem": context.gpu.memory_bytes,
                "computeMajor": context.gpu.capability[0],
                "computeMinor": context.gpu.capability[1],
                "numSms": context.gpu.num_sms,
            }
        ]
    return json.dumps(head)[:-1] + ', "traceEvents": [\n'


def _metadata(program: Program, context: TraceContext, tracks: Tracks) -> Iterator[str]:
    rank = program.rank
    cpu, gpu = CPU_PID_BASE + rank, rank

    def entry(kind: str, pid: int, tid: int, args: dict) -> str:
        return json.dumps({"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args})

    yield entry("process_name", cpu, 0, {"name": f"rank {rank} host"})
    yield entry("process_labels", cpu, 0, {"labels": "CPU"})
    yield entry("process_sort_index", cpu, 0, {"sort_index": 2 * rank})
    yield entry("thread_name", cpu, MAIN_THREAD, {"name": "thread 1 (launches)"})
    yield entry("process_name", gpu, 0, {"name": f"rank {rank} device"})
    yield entry("process_labels", gpu, 0, {"labels": f"GPU {rank % context.gpus_per_node}"})
    yield entry("process_sort_index", gpu, 0, {"sort_index": 2 * rank + 1})
    for tid, (lane, k) in sorted(tracks.label.items()):
        communicator = communicator_of_lane(program, lane)
        if communicator is None:
            what = "default" if lane == 0 else f"side {lane}"
        else:
            info = communicator.group
            what = f"nccl {info.desc or info.name} {names.ranks_text(info.ranks)}"
            what += f" with rank {communicator.peer}" if communicator.peer >= 0 else ""
        what += f" #{k + 1}" if k else ""
        yield entry("thread_name", gpu, tid, {"name": f"stream {tid} {what}"})
        yield entry("thread_sort_index", gpu, tid, {"sort_index": tid})


def _steps(program: Program, context: TraceContext, host: HostTimes, end_us: np.ndarray) -> Iterator[str]:
    """The profiler step of the iteration, and an empty one, which HTA drops."""
    last = max(
        int(np.ceil(context.iteration_time_ns / 1e3)),
        int(end_us.max(initial=0)),
        int(host.end[-1]) + 1 if len(host.end) else 0,
    )
    for number, (ts, dur) in enumerate(((0, last), (last, 1))):
        yield json.dumps(
            {
                "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}",
                "pid": CPU_PID_BASE + program.rank, "tid": MAIN_THREAD, "ts": ts, "dur": dur,
                "args": {"prism_source": program.source if number == 0 else "empty step"},
            }
        )  # fmt: skip


def _phases(
    program: Program,
    spans: DeviceSpans,
    tracks: Tracks,
    start_us: np.ndarray,
    end_us: np.ndarray,
    host: HostTimes,
) -> Iterator[str]:
    """Phases as annotations of the host track, and of every compute stream over the kernels they launched."""
    template = _template(
        {"ph": "X", "cat": _SLOT, "name": _SLOT, "pid": _SLOT, "tid": _SLOT, "ts": _SLOT, "dur": _SLOT,
         "args": {"prism_source": program.source}}
    )  # fmt: skip
    compute = np.flatnonzero(spans.kind != SpanKind.COMMUNICATION)
    for phase, begin, end in program.iter_phases():
        name = json.dumps(names.phase_name(phase))
        ts, stop = int(host.begin[begin]), int(host.end[end])
        yield template % (
            '"user_annotation"', name, CPU_PID_BASE + program.rank, MAIN_THREAD, ts, stop - ts
        )  # fmt: skip
        low, high = np.searchsorted(spans.row[compute], (begin, end))
        inside = compute[low:high]
        for tid in np.unique(tracks.tid[inside]).tolist():
            mine = inside[tracks.tid[inside] == tid]
            first, last = int(start_us[mine].min()), int(end_us[mine].max())
            yield template % ('"gpu_user_annotation"', name, program.rank, tid, first, last - first)


def _kernels(
    program: Program,
    spans: DeviceSpans,
    tracks: Tracks,
    start_us: np.ndarray,
    end_us: np.ndarray,
    host: HostTimes,
    context: TraceContext,
) -> Iterator[str]:
    """For every span: the CPU op, its launch, the kernel, and the flow between them."""
    templates = _Templates(program, context)
    events = program.events
    refs = events["ref"][spans.row].tolist()
    wait_us = np.rint((spans.transfer_start_ns - spans.start_ns) / 1e3).astype(np.int64).tolist()
    begin_us, issued_us = host.begin[spans.row], host.end[spans.row]
    launch_us = np.maximum(begin_us, issued_us - _LAUNCH_US)
    columns = zip(
        refs, spans.kind.tolist(), tracks.tid.tolist(), start_us.tolist(), (end_us - start_us).tolist(),
        begin_us.tolist(), issued_us.tolist(), launch_us.tolist(), wait_us, strict=True,
    )  # fmt: skip
    for i, (ref, kind, tid, start, length, begin, issued, launched, wait) in enumerate(columns):
        correlation = FIRST_CORRELATION + i
        if kind == SpanKind.COMMUNICATION:
            rows = spans.members.get(i)
            refs_of_span = (ref,) if rows is None else tuple(events["ref"][rows].tolist())
            op, runtime, kernel = templates.comm(refs_of_span, tid)
            device_event = kernel % (start, length, correlation, correlation, wait, max(length - wait, 0))
        else:
            op, runtime, kernel = templates.op(ref, tid, waits=wait > 0)
            waited = (min(wait, length),) if wait > 0 else ()
            device_event = kernel % (start, length, correlation, correlation, *waited)
        flow = templates.flow
        yield (
            f"{op % (begin, issued - begin, correlation)},\n"
            f"{runtime % (launched, issued - launched, correlation, correlation)},\n"
            f"{device_event},\n"
            f"{flow[0] % (correlation, launched)},\n{flow[1] % (correlation, tid, start)}"
        )


class _Templates:
    """The constant part of every event, by signature and track: printing an event is one ``%`` operation."""

    def __init__(self, program: Program, context: TraceContext):
        self._program = program
        self._context = context
        self._cpu = {"pid": CPU_PID_BASE + program.rank, "tid": MAIN_THREAD, "ts": _SLOT, "dur": _SLOT}
        self._device = program.rank % context.gpus_per_node
        self._runtime = {
            name: _template(
                {"ph": "X", "cat": "cuda_runtime", "name": name, **self._cpu,
                 "args": {"External id": _SLOT, "cbid": cbid, "correlation": _SLOT}}
            )
            for name, cbid in (("cudaLaunchKernel", 211), ("cudaMemcpyAsync", 41), ("cudaMemsetAsync", 51))
        }  # fmt: skip
        self.flow = (
            _template({"ph": "s", "id": _SLOT, "pid": CPU_PID_BASE + program.rank, "tid": MAIN_THREAD,
                       "ts": _SLOT, "cat": "ac2g", "name": "ac2g"}),
            _template({"ph": "f", "id": _SLOT, "pid": program.rank, "tid": _SLOT, "ts": _SLOT,
                       "cat": "ac2g", "name": "ac2g", "bp": "e"}),
        )  # fmt: skip
        self._ops: dict[tuple[int, int, bool], tuple[str, str, str]] = {}
        self._comms: dict[tuple[tuple[int, ...], int], tuple[str, str, str]] = {}

    def op(self, ref: int, tid: int, *, waits: bool) -> tuple[str, str, str]:
        """Templates of (CPU op, launch, kernel); one that waits for kernels of other streams says how long."""
        key = (ref, tid, waits)
        if key not in self._ops:
            self._ops[key] = self._make_op(self._program.signatures[ref], tid, waits)
        return self._ops[key]

    def comm(self, refs: tuple[int, ...], tid: int) -> tuple[str, str, str]:
        """Templates of (CPU op, launch, kernel)."""
        key = (refs, tid)
        if key not in self._comms:
            self._comms[key] = self._make_comm(refs, tid)
        return self._comms[key]

    def _make_op(self, signature: OpSignature, tid: int, waits: bool) -> tuple[str, str, str]:
        name = names.kernel_name(signature)
        category, runtime = "kernel", "cudaLaunchKernel"
        if name.startswith("Memcpy"):
            category, runtime = "gpu_memcpy", "cudaMemcpyAsync"
        elif name.startswith("Memset"):
            category, runtime = "gpu_memset", "cudaMemsetAsync"
        args: dict = {"prism_wait_us": _SLOT} if waits else {}
        if category != "kernel":
            args["bytes"] = sum(tensor.nbytes for tensor in signature.inputs[:1] or signature.outputs[:1])
        if self._context.price_op is not None:
            price = self._context.price_op(signature)
            args["prism_cost"] = f"{price.rule} ({price.provenance})"
        details = {
            "Input Dims": [list(tensor.shape) for tensor in signature.inputs],
            "Input type": [names.INPUT_TYPES.get(tensor.dtype, tensor.dtype) for tensor in signature.inputs],
        }
        return (
            self._cpu_op(names.op_name(signature), details),
            self._runtime[runtime],
            self._kernel(name, category, tid, args),
        )

    def _make_comm(self, refs: tuple[int, ...], tid: int) -> tuple[str, str, str]:
        signatures = [self._program.comms[ref] for ref in refs]
        group = self._program.groups[signatures[0].group]
        kernel = names.nccl_kernel_name(
            {s.kind for s in signatures}, signatures[0].dtype, signatures[0].reduce_op
        )
        args = names.comm_args(signatures, group.ranks, group.name, group.desc)
        waits = {"prism_wait_us": _SLOT, "prism_transfer_us": _SLOT}
        return (
            self._cpu_op("record_param_comms", args),
            self._runtime["cudaLaunchKernel"],
            self._kernel(kernel, "kernel", tid, {**waits, **args}),
        )

    def _cpu_op(self, name: str, details: dict) -> str:
        args = {"External id": _SLOT, **details}
        return _template({"ph": "X", "cat": "cpu_op", "name": name, **self._cpu, "args": args})

    def _kernel(self, name: str, category: str, tid: int, args: dict) -> str:
        return _template(
            {
                "ph": "X", "cat": category, "name": name, "pid": self._program.rank, "tid": tid,
                "ts": _SLOT, "dur": _SLOT,
                "args": {"External id": _SLOT, "queued": 0, "device": self._device, "context": 1, "stream": tid,
                         "correlation": _SLOT, **args, "prism_source": self._program.source},
            }
        )  # fmt: skip


def _syncs(program: Program, host: HostTimes) -> Iterator[str]:
    """Host synchronisations, as long as the host was blocked."""
    for row in host.sync_rows.tolist():
        args: dict = {"cbid": 131, "prism_source": program.source}
        if program.events["flags"][row] & EventFlag.SYNTHESIZED:
            args["prism_synthesized"] = True
        yield json.dumps(
            {
                "ph": "X", "cat": "cuda_runtime", "name": SYNC_NAMES[EventKind(program.events["kind"][row])],
                "pid": CPU_PID_BASE + program.rank, "tid": MAIN_THREAD,
                "ts": int(host.begin[row]), "dur": int(host.end[row] - host.begin[row]), "args": args,
            }
        )  # fmt: skip


def _memory(program: Program, host: HostTimes) -> Iterator[str]:
    """Allocated memory over the host's time, as a counter."""
    for ts, nbytes in allocated_curve(program, host.begin):
        yield json.dumps(
            {
                "ph": "C", "name": "allocated memory", "pid": CPU_PID_BASE + program.rank, "tid": MAIN_THREAD,
                "ts": ts, "args": {"GiB": round(nbytes / 2**30, 4)},
            }
        )  # fmt: skip


def _template(event: dict) -> str:
    """JSON of an event with ``%s`` for every slot, in the order the slots have in the event."""
    return json.dumps(event).replace("%", "%%").replace(json.dumps(_SLOT), "%s")
