"""The predicted iteration of one rank as a Chakra execution trace (mlcommons/chakra, schema 1.0.0: et_def.proto).

A file is a sequence of messages, each behind its length: ``GlobalMetadata``, then a ``Node`` for every kernel and
call. Nodes depend on what precedes them on their stream or communicator, and on the collective that their stream
waited for; times are the predicted ones. Attributes are those that Chakra's feeder reads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.emit.files import replaced_file
from prism_plugins.emit.spans import DeviceSpans, SpanKind, device_spans
from prism_plugins.emit.trace_names import describe_comm, op_name
from prism_plugins.emit.wire import block, number, varint
from prism_plugins.program.model import CommSignature, EventFlag, EventKind, Program
from prism_plugins.simulate.timeline import OpTimes

SCHEMA_VERSION = "1.0.0"

_COMP, _SEND, _RECV, _COLL = 4, 5, 6, 7
_COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
"""Our kind → ``CollectiveCommType``."""
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29


def write_chakra(path: Path, program: Program, times: OpTimes, costs: CostModel) -> int:
    """Write the trace of one rank, atomically; returns the number of nodes."""
    spans = device_spans(program, times)
    nodes = 0
    with replaced_file(path) as file:
        file.write(_message(block(1, SCHEMA_VERSION) + _attribute("rank", _INT64, program.rank, field=2)))
        for node in _nodes(program, spans, costs):
            file.write(_message(node))
            nodes += 1
    return nodes


def _nodes(program: Program, spans: DeviceSpans, costs: CostModel):
    model = costs.in_state_of(program.signatures)
    ops = [_op_parts(program, i, model) for i in range(len(program.signatures))]
    depends = _dependencies(program, spans)
    refs = program.events["ref"][spans.row].tolist()
    starts = np.rint(spans.start_ns / 1e3).astype(np.int64).tolist()
    lengths = np.maximum(np.rint((spans.end_ns - spans.start_ns) / 1e3), 1).astype(np.int64).tolist()
    for i, (ref, kind, start, length) in enumerate(
        zip(refs, spans.kind.tolist(), starts, lengths, strict=True)
    ):
        if kind == SpanKind.COMMUNICATION:
            rows = spans.members.get(i, spans.row[i : i + 1])
            name, node_type, rest = _comm_parts(
                program, [program.comms[r] for r in program.events["ref"][rows].tolist()]
            )
        else:
            name, node_type, rest = ops[ref]
        head = number(1, i) + block(2, name) + number(3, node_type)
        deps = b"".join(varint(d) for d in depends[i])
        yield (head + (block(5, deps) if deps else b"") + number(6, max(start, 0)) + number(7, length) + rest)


def _op_parts(program: Program, index: int, model: CostModel) -> tuple[str, int, bytes]:
    signature = program.signatures[index]
    price = model.price_op(signature)
    size = sum(t.nbytes for t in (*signature.inputs, *signature.outputs))
    inputs = block(2, str([list(t.shape) for t in signature.inputs])) + block(
        3, str([t.dtype for t in signature.inputs])
    )
    outputs = block(2, str([list(t.shape) for t in signature.outputs])) + block(
        3, str([t.dtype for t in signature.outputs])
    )
    attributes = (
        _attribute("is_cpu_op", _BOOL, 0)
        + _attribute("num_ops", _INT64, int(price.flops))
        + _attribute("tensor_size", _UINT64, size)
        + _attribute("prism_source", _STRING, program.source)
        + _attribute("prism_cost", _STRING, f"{price.rule} ({price.provenance})")
    )
    return op_name(signature), _COMP, block(8, inputs) + block(9, outputs) + attributes


def _comm_parts(program: Program, comms: list[CommSignature]) -> tuple[str, int, bytes]:
    first = comms[0]
    group = program.groups[first.group]
    size = sum(c.nbytes for c in comms)
    attributes = (
        _attribute("is_cpu_op", _BOOL, 0)
        + _attribute("comm_size", _INT64, size)
        + _attribute("pg_name", _STRING, group.name)
        + _attribute("prism_source", _STRING, program.source)
    )
    kinds = {c.kind for c in comms}
    if kinds <= {"send", "recv"}:
        node_type = _SEND if first.kind == "send" else _RECV
        peer = group.ranks[first.peer] if 0 <= first.peer < len(group.ranks) else 0
        source, target = (program.rank, peer) if first.kind == "send" else (peer, program.rank)
        attributes += (
            _attribute("comm_src", _INT32, source)
            + _attribute("comm_dst", _INT32, target)
            + _attribute("comm_tag", _INT32, 0)
        )
        if len(comms) > 1:
            attributes += _attribute(
                "prism_coalesced", _STRING, "; ".join(describe_comm(c, group.ranks) for c in comms)
            )
        return "+".join(sorted(kinds)), node_type, attributes
    attributes += _attribute("comm_type", _INT64, _COLLECTIVES.get(first.kind, 0))
    attributes += _attribute("comm_group", _STRING, str(list(group.ranks)))
    return first.kind, _COLL, attributes


def _dependencies(program: Program, spans: DeviceSpans) -> list[list[int]]:
    """For every span those that it starts after: the last one of its stream, and what the stream waited for."""
    events = program.events
    kinds, streams = events["kind"].tolist(), events["stream"].tolist()
    refs, flags, values = events["ref"].tolist(), events["flags"].tolist(), events["value"].tolist()
    span_of_row = {int(row): i for i, row in enumerate(spans.row.tolist())}
    for i, rows in spans.members.items():
        span_of_row.update((int(row), i) for row in rows.tolist())
    last: dict[int, set[int]] = {}
    of_work: dict[int, int] = {}
    of_lane: dict[int, int] = {}
    recorded: dict[int, set[int]] = {}
    depends: list[list[int]] = [[] for _ in range(len(spans.row))]
    for row in range(len(events)):
        kind, stream = kinds[row], streams[row]
        if kind == EventKind.KERNEL and row in span_of_row:
            i = span_of_row[row]
            depends[i] = sorted(last.get(stream, ()))
            last[stream] = {i}
        elif kind == EventKind.COMM:
            i = span_of_row[row]
            lane = int(spans.lane[i])
            before = last.get(stream, set()) | ({of_lane[lane]} if lane in of_lane else set())
            depends[i] = sorted({*depends[i], *before} - {i})
            of_work[values[row]] = of_lane[lane] = i
            if not flags[row] & EventFlag.ASYNC:
                last[stream] = {i}
        elif kind == EventKind.WORK_WAIT and refs[row] in of_work:
            last.setdefault(stream, set()).add(of_work[refs[row]])
        elif kind == EventKind.EVENT_RECORD:
            recorded[refs[row]] = set(last.get(stream, ()))
        elif kind == EventKind.EVENT_WAIT:
            last.setdefault(stream, set()).update(recorded.get(refs[row], ()))
        elif kind in (EventKind.DEVICE_SYNC, EventKind.STREAM_SYNC, EventKind.EVENT_SYNC):
            pass  # the host's order is not a dependency of the device
    return depends


def _attribute(name: str, kind: int, value: int | str, *, field: int = 10) -> bytes:
    """``AttributeProto``: field 10 of a node, 2 of the metadata."""
    data = block(kind, value) if isinstance(value, str) else number(kind, value)
    return block(field, block(1, name) + data)


def _message(data: bytes) -> bytes:
    return varint(len(data)) + data
