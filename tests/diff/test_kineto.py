"""A run beside traces: its own, which must agree, changed ones, and a real one from an H200."""

import gzip
import json
import pathlib

import pytest

from prism_plugins import cli
from prism_plugins.cli_run import load_view
from prism_plugins.costs.calibration import read_calibration
from prism_plugins.diff.compare import compare, predicted_ops
from prism_plugins.diff.read_kineto import read_kineto, read_trace
from prism_plugins.diff.real import OpKey
from prism_plugins.emit.all import write_traces
from prism_plugins.emit.spans import device_spans

REAL = pathlib.Path(__file__).parents[1] / "data" / "kineto_h200_one.json.gz"
SLOW = "aten::add"


@pytest.fixture
def traced(run):
    """(run, its view, the folder with its own trace of rank 0)."""
    view = load_view(run)
    write_traces(run, view, [0])
    return run, view, run.kineto


def change(path, change_event):
    """Rewrite the events of a trace."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = [e for e in map(change_event, trace["traceEvents"]) if e is not None]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def compared(view, folder):
    program, times = view.timed_program(0)
    return compare(0, program, device_spans(program, times), view.costs, read_kineto(folder).ranks[0])


def test_a_run_agrees_with_its_own_trace(traced):
    _, view, folder = traced
    comparison = compared(view, folder)
    assert not comparison.missing()
    assert not comparison.extra()
    assert comparison.real_ms == pytest.approx(comparison.predicted_ms, rel=0.01)
    for row in comparison.rows:
        assert row.predicted.calls == row.real.calls
        assert abs(row.delta_ms) < 0.002 * row.real.calls
    assert not comparison.to_measure()


def test_a_slower_op_is_named_first_and_written_back(traced, capsys, tmp_path):
    _, view, folder = traced
    doubled = []

    def slow(event):
        if event.get("cat") == "kernel" and event["name"] == SLOW:
            doubled.append(event["dur"])
            event["dur"] *= 2
        return event

    change(folder / "rank0.json.gz", slow)
    comparison = compared(view, folder)
    first = comparison.rows[0]
    assert first.key.name == SLOW
    assert first.delta_ms == pytest.approx(-sum(doubled) / 1e3, rel=0.02)
    assert [row.key.name for row in comparison.to_measure()] == [SLOW]

    out = tmp_path / "mine.json"
    change(folder / "rank0.json.gz", lambda e: e)
    assert cli.main(["diff", "latest", str(folder), "--write-calibration", str(out)]) == 0
    text = capsys.readouterr().out
    assert "measure again" in text
    figures = {f.signature.op: f for f in read_calibration(out).figures}
    assert figures["aten::add.Tensor"].us == pytest.approx(2 * sum(doubled) / len(doubled), rel=0.01)


def test_missing_and_extra_ops(traced):
    _, view, folder = traced

    def other(event):
        if event.get("name") == "aten::copy_" or event.get("name", "").startswith("Memcpy DtoD"):
            return None
        if event.get("name") == SLOW:
            event["name"] = "aten::hypot"
        return event

    change(folder / "rank0.json.gz", other)
    comparison = compared(view, folder)
    assert {row.key.name for row in comparison.missing()} == {SLOW, "aten::copy_"}
    assert [row.key.name for row in comparison.extra()] == ["aten::hypot"]


def test_traces_of_several_members_tell_waiting_from_transfer(traced):
    run, view, folder = traced
    write_traces(run, view, [1])

    def late(event):
        """Rank 0 waits a millisecond longer in every reduction of its tensor-parallel group."""
        args = event.get("args", {})
        if (
            event.get("cat") == "kernel"
            and args.get("Process Group Description") == "TENSOR_MODEL_PARALLEL_GROUP"
        ):
            event["dur"] += 1000
        return event

    change(folder / "rank0.json.gz", late)
    program, times = view.timed_program(0)
    spans = device_spans(program, times)
    real = read_kineto(folder).ranks[0]
    predicted, measured = compare(0, program, spans, view.costs, real).transfers[
        "TENSOR_MODEL_PARALLEL_GROUP"
    ]
    assert measured == pytest.approx(predicted, rel=0.05)
    assert "PIPELINE_MODEL_PARALLEL_GROUP" not in real.transfer_ms, "the other stage has no trace here"


def test_steps_are_averaged(traced):
    _, view, folder = traced
    path = folder / "rank0.json.gz"
    once = read_trace(path)
    trace = json.loads(gzip.decompress(path.read_bytes()))
    again, shift = [], 1e9
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event["name"] != "ProfilerStep#1":
            args = dict(event.get("args", {}))
            for key in ("External id", "correlation"):
                if key in args:
                    args[key] += 10_000_000
            again.append({**event, "ts": event["ts"] + shift, "args": args})
    trace["traceEvents"] += again
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    twice = read_trace(path)
    assert twice.iterations == 2
    assert twice.ops == once.ops
    assert twice.iteration_ms == pytest.approx(once.iteration_ms)
    assert not compared(view, folder).to_measure()


class TestRealTrace:
    """Megatron-LM (8 layers, h 4096) on one H200, torch 2.11; fields that are not read were removed."""

    def test_all_device_time_is_attributed(self):
        real = read_trace(REAL)
        events = json.loads(gzip.decompress(REAL.read_bytes()))["traceEvents"]
        device = sum(e["dur"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
        assert sum(op.ms for op in real.ops.values()) == pytest.approx(device / 1e3)
        assert not [chain for chain in real.ops if chain[0].name.startswith("kernel ")]
        assert real.iteration_ms == pytest.approx(580.77, abs=0.01)
        assert (real.rank, real.iterations, real.gpu) == (0, 1, "NVIDIA H200")
        assert sum(real.phase_ms.values()) == pytest.approx(device / 1e3, rel=0.01)
        assert real.phase_ms["backward"] > real.phase_ms["forward"] > real.phase_ms["optimizer"] > 40

    def test_a_kernel_knows_the_ops_around_its_own(self):
        chains = [chain for chain in read_trace(REAL).ops if chain[0].name == "aten::mul"]
        product = next(c for c in chains if len(c) > 1 and c[1].name == "aten::_softmax_backward_data")
        assert product[0] == OpKey("aten::mul", ((4, 32, 2048, 2048),) * 2)

    def test_kernels_of_two_streams_take_turns(self):
        events = json.loads(gzip.decompress(REAL.read_bytes()))["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel"]
        ends: dict[int, float] = {}
        overlap = side = 0.0
        for kernel in sorted(kernels, key=lambda e: e["ts"]):
            stream, end = kernel["args"]["stream"], kernel["ts"] + kernel["dur"]
            others = max((e for s, e in ends.items() if s != stream), default=0.0)
            overlap += max(0.0, min(others, end) - kernel["ts"])
            ends[stream] = max(end, ends.get(stream, 0.0))
            if stream != 7:
                side += kernel["dur"]
                assert others <= kernel["ts"]  # the backward pass's kernel before it is done
        assert set(ends) == {7, 21}  # the backward pass; gradients added to their buffers
        assert side == pytest.approx(15_430, abs=1)
        assert overlap == pytest.approx(420, abs=1)  # last waves only, 4 us of a kernel

    def test_gemms_are_found_by_shape(self):
        ops = {chain[0]: total for chain, total in read_trace(REAL).ops.items()}
        gemm = ops[OpKey("aten::mm", ((8192, 4096), (4096, 22016)))]
        assert gemm.calls == 16
        assert 1.0 < gemm.ms / gemm.calls < 3.0


def test_waits_for_other_streams_are_no_kernel_time(traced):
    folder = traced[2]
    before = read_kineto(folder).ranks[0]
    waits = []

    def wait_first(event):
        if event.get("cat") == "kernel" and "Collective name" not in event["args"]:
            event["dur"] += 7
            event["args"]["prism_wait_us"] = 7
            waits.append(event)
        return event

    (file,) = folder.glob("*.json.gz")
    change(file, wait_first)
    after = read_kineto(folder).ranks[0]
    assert waits
    assert after.phase_ms == pytest.approx(before.phase_ms)
    assert {k: op.ms for k, op in after.ops.items()} == pytest.approx(
        {k: op.ms for k, op in before.ops.items()}
    )


def test_predicted_ops_cover_the_device_time(run):
    view = load_view(run)
    program, times = view.timed_program(0)
    spans = device_spans(program, times)
    ops = predicted_ops(program, spans, view.costs)
    assert sum(op.ms for op in ops.values()) == pytest.approx((spans.end_ns - spans.start_ns).sum() / 1e6)


class TestBrokenInput:
    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("t.json", b"", "truncated or not JSON"),
            ("t.json", b"{}", "not a Kineto trace"),
            ("t.json", b'{"traceEvents": 3}', "not a Kineto trace"),
            ("t.json", b'{"traceEvents": []}', "without device work"),
            ("t.json", b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "not a Kineto trace"),
            ("t.json.gz", gzip.compress(b'{"traceEvents": []}', mtime=0)[:20], "truncated"),
            ("t.json.gz", b"\x1f\x8bgarbage", "cannot be read"),
            ("train.log", b"step 1 loss 3\n", "neither a Kineto trace"),
            ("train.log", bytes(range(256)) * 10, "neither a Kineto trace"),
        ],
    )
    def test_one_line_and_nothing_written(self, run, tmp_path, capsys, name, content, says):
        path = tmp_path / name
        path.write_bytes(content)
        out = tmp_path / "calibration.json"
        assert cli.main(["diff", "latest", str(path), "--write-calibration", str(out)]) == 2
        captured = capsys.readouterr()
        assert not captured.out
        assert captured.err.count("\n") == 1
        assert says in captured.err
        assert not out.exists()

    def test_absent_empty_and_foreign_folders(self, run, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        (tmp_path / "foreign").mkdir()
        (tmp_path / "foreign" / "notes.txt").write_text("hello")
        for name in ("nowhere", "empty", "foreign"):
            assert cli.main(["diff", "latest", str(tmp_path / name)]) == 2
            assert capsys.readouterr().err.count("\n") == 1

    def test_a_rank_that_is_not_there(self, traced, capsys):
        _, _, folder = traced
        assert cli.main(["diff", "latest", str(folder), "--rank", "3"]) == 2
        assert "has ranks [0]" in capsys.readouterr().err
        change(folder / "rank0.json.gz", lambda e: e)
        text = gzip.decompress((folder / "rank0.json.gz").read_bytes()).replace(
            b'"rank": 0', b'"rank": 99', 1
        )
        (folder / "rank0.json.gz").write_bytes(gzip.compress(text))
        assert cli.main(["diff", "latest", str(folder)]) == 2
        assert "the run has 8 ranks" in capsys.readouterr().err
