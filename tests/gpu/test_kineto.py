"""The Kineto reader on a trace of an H200 (torch 2.11): two streams, a compiled region, backward, a fused optimizer.

``prism::0`` and ``prism::2`` open and close a phase, ``prism::1`` is a call that was answered by one kernel.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prism_plugins.capture.kineto import parse_trace, read_trace
from prism_plugins.capture.kineto_program import END, STREAM, Mark, SignatureTable, build_iteration
from prism_plugins.errors import FileFormatError
from prism_plugins.program.model import EventKind, TensorSpec

DATA = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"
MARKS = [Mark(EventKind.PHASE_BEGIN), Mark(EventKind.COMM, 0, 1), Mark(EventKind.PHASE_END)]


@pytest.fixture(scope="module")
def raw() -> dict:
    return json.loads(gzip.decompress(DATA.read_bytes()))


def build(raw: dict, **given):
    table = SignatureTable()
    trace = parse_trace(json.dumps(raw).encode(), source="trace")
    return build_iteration(trace, marks=MARKS, table=table, **given), table, trace


def ops_of(iteration, table):
    rows = iteration.events[iteration.events["kind"] == EventKind.KERNEL]
    return [(table.signatures[r["ref"]].op, int(r["stream"])) for r in rows]


def test_ops_come_in_the_order_of_their_launch_on_their_stream(raw) -> None:
    iteration, table, _ = build(raw)
    ops = ops_of(iteration, table)
    assert ops[:5] == [
        ("aten::normal_", 0),
        ("aten::addmm", 0),
        ("aten::gelu", 0),
        ("aten::addmm", 0),
        ("triton_poi_fused_add_mul_relu_threshold_backward_0", 1),
    ]
    assert ops[-2:] == [("aten::_foreach_add_.Scalar", 0), ("aten::_fused_adamw_", 0)]
    assert [op for op, stream in ops if stream == 1] == [
        "triton_poi_fused_add_mul_relu_threshold_backward_0",
        "triton_poi_fused_mul_threshold_backward_0",
    ]


def test_what_answers_a_call_is_no_part_of_the_program(raw) -> None:
    with_answer, table, trace = build(raw)
    assert "aten::mul_" not in {op.partition(".")[0] for op, _ in ops_of(with_answer, table)}
    assert any(op.name.startswith("aten::mul_") for op in trace.ops), "the trace holds the answer"
    plain = {**raw, "traceEvents": [e for e in raw["traceEvents"] if e.get("name") != "prism::answer"]}
    without, table, _ = build(plain)
    assert len(ops_of(without, table)) == len(ops_of(with_answer, table)) + 1


def test_all_time_of_kernels_is_accounted_for(raw) -> None:
    iteration, _, trace = build(raw)
    answered = sum(w.end_ns - w.start_ns for w in trace.work) - iteration.op_ns.sum()
    assert 0 < answered < 2_000, "one small kernel answered the call; no gaps, the GPU idled in between"
    assert iteration.busy_ns == pytest.approx(sum(w.end_ns - w.start_ns for w in trace.work), rel=1e-9)
    assert iteration.busy_ns < iteration.span_ns < iteration.host_ns


def test_an_operators_signature_tells_types_shapes_strides(raw) -> None:
    _, table, _ = build(raw)
    by_name = {s.op: s for s in table.signatures}
    linear = by_name["aten::addmm"]
    assert linear.inputs == (
        TensorSpec("bfloat16", (256,)),
        TensorSpec("bfloat16", (128, 256)),
        TensorSpec("bfloat16", (256, 256), (1, 256)),
    )
    assert len(by_name["aten::_fused_adamw_"].inputs) >= 16, "lists of tensors are flattened"
    assert len({(s.op, s.inputs, s.scalars) for s in table.signatures}) == len(table.signatures)


def test_memory_is_followed_across_threads_and_what_was_live_before_can_be_freed(raw) -> None:
    changes = sorted(
        (e["ts"], e["args"]["Addr"], e["args"]["Bytes"])
        for e in raw["traceEvents"]
        if e["name"] == "[memory]" and e["args"]["Device Type"] == 1
    )
    assert [e["ts"] for e in raw["traceEvents"] if e["name"] == "[memory]"] != [c[0] for c in changes], (
        "by thread"
    )
    iteration, _, _ = build(raw)
    kinds = iteration.events["kind"]
    allocs, frees = (iteration.events[kinds == k] for k in (EventKind.ALLOC, EventKind.FREE))
    assert allocs["value"].tolist() == [size for _, _, size in changes if size > 0]
    live: set[int] = set()
    old = []
    for _, address, size in changes:
        if size > 0:
            live.add(address)
        elif address in live:
            live.remove(address)
        else:
            old.append(address)
    assert len(frees) == sum(size < 0 for _, _, size in changes) - len(old)
    made: set[int] = set()
    for event in iteration.events:
        if event["kind"] == EventKind.ALLOC:
            made.add(int(event["ref"]))
        elif event["kind"] == EventKind.FREE:
            made.remove(int(event["ref"]))
    assert len(made) == len(live)
    known, _, _ = build(raw, live=[(1, 512, "parameters"), *((a, 512, "gradients") for a in old)])
    assert [a.category for a in known.initial][:1] == ["parameters"]
    released = known.events[known.events["kind"] == EventKind.FREE]["ref"].tolist()
    assert set(range(1, 1 + len(old))) <= set(released)
    assert 0 not in released


def test_marks_stand_where_they_were_made(raw) -> None:
    iteration, table, _ = build(raw)
    rows = [
        (int(e["kind"]), int(e["value"]))
        for e in iteration.events
        if e["kind"] in (EventKind.PHASE_BEGIN, EventKind.COMM, EventKind.PHASE_END, EventKind.STREAM_SYNC)
    ]
    assert rows == [
        (EventKind.PHASE_BEGIN, 0),
        (EventKind.COMM, 1),
        (EventKind.PHASE_END, 0),
        (EventKind.STREAM_SYNC, 0),
    ]
    kinds = iteration.events["kind"].tolist()
    before = kinds[: kinds.index(EventKind.COMM)].count(EventKind.KERNEL)
    assert ops_of(iteration, table)[before - 1][0] == "aten::addmm"


def test_the_iteration_ends_at_its_mark(raw) -> None:
    marked = max(e["ts"] for e in raw["traceEvents"] if e.get("name") == "aten::_foreach_add_.Scalar")
    end = {"ph": "X", "cat": "user_annotation", "name": END, "tid": 486, "ts": marked - 1, "dur": 0.1}
    iteration, table, _ = build({**raw, "traceEvents": [*raw["traceEvents"], end]})
    assert ops_of(iteration, table)[-1][0] == "aten::_local_scalar_dense"
    assert EventKind.DEVICE_SYNC not in iteration.events["kind"]
    whole, _, _ = build(raw)
    assert iteration.host_ns < whole.host_ns


def test_a_streams_number_is_found_by_a_launch_on_it(raw) -> None:
    work = next(e for e in raw["traceEvents"] if e.get("cat") == "kernel" and e["args"]["stream"] == 13)
    launch = next(
        e
        for e in raw["traceEvents"]
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and e["args"].get("correlation") == work["args"]["correlation"]
    )
    note = {
        "ph": "X", "cat": "user_annotation", "name": f"{STREAM}4242", "tid": launch["tid"],
        "ts": launch["ts"] - 0.5, "dur": launch["dur"] + 1,
    }  # fmt: skip
    table = SignatureTable()
    trace = parse_trace(
        json.dumps({**raw, "traceEvents": [*raw["traceEvents"], note]}).encode(), source="trace"
    )
    marks = [MARKS[0], Mark(EventKind.WORK_WAIT, 9, stream=4242), MARKS[2]]
    iteration = build_iteration(trace, marks=marks, table=table)
    wait = iteration.events[iteration.events["kind"] == EventKind.WORK_WAIT][0]
    other = [int(e["stream"]) for e in iteration.events if e["kind"] == EventKind.KERNEL and e["stream"]]
    assert wait["stream"] != 0
    assert set(other) == {int(wait["stream"])}


def test_gaps_between_queued_kernels_belong_to_the_later_one() -> None:
    def kernel(correlation: int, ts: float, dur: float) -> dict:
        args = {"stream": 7, "correlation": correlation}
        return {"ph": "X", "cat": "kernel", "name": "k", "tid": 7, "ts": ts, "dur": dur, "args": args}

    def launch(correlation: int, ts: float) -> dict:
        args = {"correlation": correlation}
        return {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "tid": 1,
            "ts": ts,
            "dur": 1,
            "args": args,
        }

    events = [
        launch(1, 0),
        launch(2, 2),
        launch(3, 40),
        kernel(1, 5, 10),
        kernel(2, 16.5, 10),
        kernel(3, 50, 10),
    ]
    trace = parse_trace(json.dumps({"traceEvents": events}).encode(), source="trace")
    iteration = build_iteration(trace, marks=[], table=SignatureTable())
    assert iteration.op_ns.tolist() == [10_000, 11_500, 10_000], (
        "the third was launched after the second had ended"
    )


def test_the_host_does_not_work_while_the_launch_queue_is_full() -> None:
    def call(at: float, dur: float, name: str = "cudaLaunchKernel") -> dict:
        return {"ph": "X", "cat": "cuda_runtime", "name": name, "tid": 1, "ts": at, "dur": dur, "args": {}}

    quick = [call(100.0 * i, 5) for i in range(4)]
    throttled = [call(1000.0 + 500 * i, 405) for i in range(16)]
    sync = call(9000, 1000, "cudaStreamSynchronize")
    args = {"correlation": 1, "stream": 7}
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "tid": 7, "ts": 500, "dur": 9000, "args": args}
    trace = parse_trace(
        json.dumps({"traceEvents": [*quick, *throttled, sync, kernel]}).encode(), source="trace"
    )
    iteration = build_iteration(trace, marks=[], table=SignatureTable())
    expected = 1e3 * (10_000 - 500 - 16 * 400)
    assert iteration.host_ns == pytest.approx(expected, rel=0.001), "the GPU did nothing in the last 500 us"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"traceEvents": 3}',
        b'{"traceEvents": [{"ts": "soon"}]}',
        b"\xff\xfe",
        b"PK\x03\x04",
    ],
)
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match=r"t\.json"):
        read_trace(path)


def test_a_truncated_trace_is_refused(raw, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(json.dumps(raw).encode()[:-200])
    with pytest.raises(FileFormatError):
        read_trace(path)
    with pytest.raises(FileFormatError):
        read_trace(tmp_path / "none.json")


def test_a_hostile_trace_yields_events_in_range(raw) -> None:
    strange = [
        {"ph": "X", "cat": "user_annotation", "name": "prism::999999", "tid": 1, "ts": 1, "dur": 1},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "x" * 5000,
            "tid": 7,
            "ts": 2,
            "dur": 1,
            "args": {"correlation": 7},
        },
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cuLaunch",
            "tid": 1,
            "ts": 1,
            "dur": 1,
            "args": {"correlation": 7},
        },
    ]
    iteration, table, _ = build({"traceEvents": strange})
    assert len(iteration.events) == 1
    assert len(table.signatures[0].op) < 300
    assert np.isfinite(iteration.op_ns).all()
    assert msgspec.json.encode(table.signatures)
