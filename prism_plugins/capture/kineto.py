"""Reads the Chrome JSON that ``torch.profiler`` (Kineto, CUPTI) exports: what the host launched and what the GPU did.

Only what a program is made of is kept. Times are nanoseconds on the trace's own clock. A file may be truncated, foreign
or damaged: that is a :class:`~prism_plugins.errors.FileFormatError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.errors import FileFormatError

_MAX_BYTES = 8 << 30
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")


class _Args(msgspec.Struct, frozen=True):
    correlation: int = -1
    stream: int = -1
    dims: Any = msgspec.field(name="Input Dims", default=())
    types: Any = msgspec.field(name="Input type", default=())
    strides: Any = msgspec.field(name="Input Strides", default=())
    concrete: Any = msgspec.field(name="Concrete Inputs", default=())
    address: int = msgspec.field(name="Addr", default=0)
    nbytes: int = msgspec.field(name="Bytes", default=0)
    device_type: int = msgspec.field(name="Device Type", default=-1)


_NO_ARGS = _Args()


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw()


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


class Span(msgspec.Struct):
    """Something the host did: an op, a runtime call, an annotation."""

    name: str
    thread: int | str
    start_ns: int
    end_ns: int
    args: _Args = _NO_ARGS


class Work(msgspec.Struct):
    """Something the GPU did: a kernel, a copy, a fill."""

    name: str
    stream: int
    """CUPTI's number of the stream; 7 is the default stream."""
    correlation: int
    start_ns: int
    end_ns: int


class Sync(msgspec.Struct):
    """A synchronisation that CUPTI reports."""

    name: str
    """``Stream Sync`` and ``Context Sync`` are the host's; which event others wait for is not always told."""
    stream: int
    correlation: int


class MemoryChange(msgspec.Struct):
    """An allocation (positive) or a release of device memory."""

    at_ns: int
    address: int
    nbytes: int


class Trace(msgspec.Struct):
    """A trace by kind of event, each in the order of the file."""

    ops: list[Span]
    runtime: list[Span]
    annotations: list[Span]
    work: list[Work]
    syncs: list[Sync]
    memory: list[MemoryChange]


def read_trace(path: str | Path) -> Trace:
    """Read an exported trace. Raises FileFormatError for a file that is not a whole one."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise FileFormatError(f"the trace {path} is larger than {_MAX_BYTES >> 30} GiB")
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    return parse_trace(data, source=str(path))


def parse_trace(data: bytes, *, source: str) -> Trace:
    """Decode a trace; ``source`` names it in errors. Raises FileFormatError."""
    trace = Trace([], [], [], [], [], [])
    decode_args = msgspec.json.Decoder(_Args).decode
    try:
        for event in msgspec.json.decode(data, type=_File).events:
            _sort_in(trace, event, decode_args)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{source} is truncated or not a Kineto trace: {error}") from None
    return trace


def _sort_in(trace: Trace, event: _Event, decode_args: Any) -> None:
    cat = event.cat
    start, end = round(event.ts * 1e3), round((event.ts + event.dur) * 1e3)
    if cat == "cpu_op":
        trace.ops.append(Span(event.name, event.tid, start, end, decode_args(event.args)))
    elif cat in _RUNTIME:
        trace.runtime.append(Span(event.name, event.tid, start, end, decode_args(event.args)))
    elif cat in _GPU_WORK:
        args = decode_args(event.args)
        trace.work.append(Work(event.name, args.stream, args.correlation, start, end))
    elif cat == "user_annotation":
        trace.annotations.append(Span(event.name, event.tid, start, end))
    elif cat == "cuda_sync":
        args = decode_args(event.args)
        trace.syncs.append(Sync(event.name, args.stream, args.correlation))
    elif event.name == "[memory]":
        args = decode_args(event.args)
        if args.device_type == 1:
            trace.memory.append(MemoryChange(start, args.address, args.nbytes))
