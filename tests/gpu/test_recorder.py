"""The recorder of a real GPU: its interface is the other one's; its life on a fake GPU."""

from __future__ import annotations

import inspect
import json
import re
import types
from pathlib import Path

import pytest
import torch

from prism_plugins.capture.recorder import Recorder
from prism_plugins.errors import PrismError
from prism_plugins.gpu import recorder as recorder_module
from prism_plugins.gpu.recorder import GpuRecorder
from prism_plugins.gpu.sensors import GpuSensors
from prism_plugins.gpu.timing import Schedule, make_schedule
from prism_plugins.program.model import CommSignature, EventKind, GroupInfo, Phase
from prism_plugins.steadiness import iteration_hash


def test_whatever_calls_a_recorder_can_call_this_one(tmp_path) -> None:
    recorder = GpuRecorder(make_schedule(8), work_dir=tmp_path)
    classes = [cls for cls in Recorder.__mro__ if cls is not object]
    methods = {name for cls in classes for name in vars(cls) if not name.startswith("_")}
    starts = "".join(inspect.getsource(cls.__init__) for cls in classes)
    attributes = set(re.findall(r"self\.([a-z]\w*)\b[^=\n]*=", starts))
    assert {"comm", "group_made", "stats"} <= methods
    assert {"recording", "startup"} <= attributes
    assert not {name for name in methods | attributes if not hasattr(recorder, name)}
    for name in methods:
        function = inspect.getattr_static(Recorder, name)
        if inspect.isfunction(function):
            ours = inspect.signature(getattr(GpuRecorder, name)).parameters.values()
            wanted = inspect.signature(function).parameters
            if not any(p.kind is p.VAR_POSITIONAL for p in ours):
                assert set(wanted) <= {p.name for p in ours}, name


class Event:
    """A CUDA event on a clock that the test moves."""

    clock_ms = 0.0

    def __init__(self, **_) -> None:
        self.at = -1.0

    def record(self, stream=None) -> None:
        self.at = Event.clock_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Profiler:
    """Writes the trace of one op in each phase, and of what the recorder marked."""

    def __init__(self, marks: list) -> None:
        self.marks = marks

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def start(self) -> None:
        pass

    stop = start

    def export_chrome_trace(self, path: str) -> None:
        def put(cat: str, name: str, ts: float, dur: float, **args) -> dict:
            return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}

        events = [put("user_annotation", f"prism::{i}", 100.0 * i, 1) for i in range(len(self.marks))]
        events += [
            put("cpu_op", "aten::mm", 10, 50, **{"Input Dims": [[4, 4]], "Input type": ["float"], "Input Strides": [[4, 1]]}),
            put("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1),
            put("kernel", "gemm", 30, 1000, correlation=1, stream=7),
            put("user_annotation", "prism::end", 5000, 1),
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events}))


class Watcher(Profiler):
    """Writes the trace of one launch in each iteration, between those of the marker; the kernel takes 100 us longer than
    under the whole profiler, and is 40 us late as the host is."""

    started = 0

    def start(self) -> None:
        Watcher.started += 1

    def export_chrome_trace(self, path: str) -> None:
        def put(cat: str, name: str, ts: float, dur: float, **args) -> dict:
            return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}

        events, number = [], 0
        for turn in range(len(self.marks)):
            at = 50_000.0 * turn
            for name, after, took in (("spin_kernel(long)", 0.0, 1.0), ("gemm", 40.0, 1100.0)):
                number += 1
                events += [
                    put("cuda_runtime", "cudaLaunchKernel", at + after, 5, correlation=number),
                    put("kernel", name, at + after + 6, took, correlation=number, stream=7),
                ]
        Path(path).write_text(json.dumps({"traceEvents": events[:-2]}))


@pytest.fixture
def recorder(tmp_path, monkeypatch) -> GpuRecorder:
    made = GpuRecorder(make_schedule(9), work_dir=tmp_path, sensors=GpuSensors(types.SimpleNamespace()))
    markers: list[int] = []
    Watcher.started = 0
    monkeypatch.setattr(recorder_module, "_new_profiler", lambda: Profiler(made._marks))
    monkeypatch.setattr(recorder_module, "_new_watcher", lambda: Watcher(markers))
    monkeypatch.setattr(GpuRecorder, "_follow_events", lambda self: None)
    fakes = {
        "Event": Event,
        "synchronize": lambda: None,
        "_sleep": lambda cycles: markers.append(cycles) if Watcher.started else None,
        "current_stream": lambda: types.SimpleNamespace(cuda_stream=0),
        "memory_snapshot": lambda: [
            {
                "address": 1024,
                "blocks": [{"state": "active_allocated", "size": 512}, {"state": "inactive", "size": 99}],
            }
        ],
        "memory_stats": lambda: {"allocated_bytes.all.peak": 4096},
        "mem_get_info": lambda: (1 << 30, 3 << 30),
        "memory_reserved": lambda: 1 << 30,
        "reset_peak_memory_stats": lambda: None,
        "get_device_name": lambda: "NVIDIA Fake",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    Event.clock_ms = 0.0
    return made


def iterate(recorder: GpuRecorder, group: int):
    recorder.reset_peaks()
    recorder.start()
    recorder.begin_phase(Phase(kind="forward", microbatch=0))
    recorder.comm(CommSignature(kind="barrier", group=group), work=recorder.new_work(), is_async=False)
    with recorder.answering():
        pass
    recorder.end_phase()
    Event.clock_ms += 50.0
    recorded = recorder.stop()
    Event.clock_ms += 7.0
    return recorded


def test_iterations_are_warmed_up_timed_and_traced(recorder) -> None:
    recorder.group_made((0, 1), "TENSOR", "t.py:1")
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    recorded = [iterate(recorder, group) for _ in range(9)]
    assert recorder.has_program
    assert [EventKind.KERNEL in r.events["kind"] for r in recorded] == [False] * 7 + [True] * 2
    assert recorder.schedule == Schedule(warm_up=2, timed=3, watched=2)
    last = recorded[-1]
    assert [EventKind(k).name for k in last.events["kind"]] == [
        "PHASE_BEGIN", "KERNEL", "COMM", "PHASE_END", "DEVICE_SYNC", "HOST",
    ]  # fmt: skip
    tail_ns = 50_000_000 - 40_000 - 1_100_000
    assert last.events["value"][-1] == tail_ns, "from the end of the last kernel to the next iteration"
    assert iteration_hash(last.events) == iteration_hash(recorded[-2].events)
    assert [a.nbytes for a in last.initial] == [512]
    measured = recorder.measured(3)
    assert measured.iteration_ms == (57.0,) * 3
    assert measured.between_ms == 7.0
    assert [(op.signature.op, op.ns, op.count) for op in measured.ops] == [("aten::mm", 1.1e6, 2)], (
        "as it was watched, not as it was traced"
    )
    assert measured.watched.iteration_ms == (50.0,), "the first does not count"
    assert measured.watched.busy_ms == 1.1
    assert (measured.watched.kernel_scale, measured.watched.gap_scale) == (1.0, 1.0), "the host is the bound"
    ratio = measured.watched.host_scale
    assert measured.ops[0].host_ns == pytest.approx(40_000 * ratio, abs=1)
    assert measured.host_ms == pytest.approx(0.040 * ratio, abs=1e-5)
    assert measured.memory.used == 2 << 30
    assert recorder.stats().peak_allocated_bytes == 4096
    assert any("clocks, power and throttling were not seen" in line for line in recorder.remarks)
    assert recorder.startup.result(last.groups) is not None


def test_what_runs_on_after_the_program_is_known_is_not_traced_or_timed(recorder) -> None:
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    for _ in range(9):
        iterate(recorder, group)
    before = recorder.measured(0)
    assert Watcher.started == 1
    Event.clock_ms += 1000
    assert EventKind.KERNEL not in iterate(recorder, group).events["kind"]
    assert recorder.measured(0).iteration_ms == before.iteration_ms


def test_where_cupti_alone_sees_nothing_kernels_take_what_was_traced(recorder, monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "_new_watcher", lambda: Watcher([]))
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    for _ in range(9):
        recorded = iterate(recorder, group)
    measured = recorder.measured(0)
    assert measured.watched is None
    assert recorded.events["value"][-1] == 7_000_000, "the pause between timed iterations, ns"
    assert [(op.ns, op.host_ns) for op in measured.ops] == [(1e6, 0.0)]
    assert any("show no kernels" in line for line in recorder.remarks)


def test_long_iterations_are_watched_once(recorder, monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "_WATCH_NS", -1)
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    for _ in range(9):
        iterate(recorder, group)
    assert len(recorder.measured(0).watched.iteration_ms) == 1
    assert not recorder.remarks[1:], "NVML's only"


def test_a_profiler_that_sees_no_kernel_is_one_line(recorder, monkeypatch) -> None:
    class Blind(Profiler):
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": []}')

    monkeypatch.setattr(recorder_module, "_new_profiler", lambda: Blind([]))
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    with pytest.raises(PrismError, match="saw no kernel on the GPU"):
        for _ in range(9):
            iterate(recorder, group)
