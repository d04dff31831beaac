"""Timed virtual participants on fake streams: who waits for whom, and what the timer is told."""

from __future__ import annotations

import contextlib

import pytest
import torch

from prism_plugins.program.model import CommSignature, GroupInfo
from prism_plugins.program.replay import ON_TIME, ReplayCall, ReplayPlan
from prism_plugins.replay.participants import ReplayRecorder
from prism_plugins.rundir import write_json

log: list[tuple] = []


class Stream:
    def __init__(self, name: str = "comm") -> None:
        self.name = name
        self.cuda_stream = 0 if name == "compute" else 7

    def wait_stream(self, other: Stream) -> None:
        log.append((self.name, "after", other.name))

    def wait_event(self, event: Event) -> None:
        log.append((self.name, "waits for", event.on))


class Event:
    def __init__(self, **_) -> None:
        self.on = ""

    def record(self, stream: Stream | None = None) -> None:
        self.on = stream.name if stream else "compute"

    def elapsed_time(self, end: Event) -> float:
        return 12.5


class Timer:
    name = "globaltimer"

    def begin(self, stream) -> None:
        log.append(("begin", stream.name))

    def reached(self, slot, stream) -> None:
        log.append(("reached", slot, stream.name))

    def take_part(self, slot, stream, **what) -> None:
        log.append(("take part", slot, stream.name, what["duration_ns"], what["peers_ns"], what["channels"]))


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    log.clear()
    current = [Stream("compute")]

    @contextlib.contextmanager
    def stream(of):
        before, current[0] = current[0], of
        yield
        current[0] = before

    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda: current[0],
        "synchronize": lambda: None,
        "memory_stats": lambda: {"allocated_bytes.all.peak": 5},
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def message(kind: str, numel: int, group: int = 0) -> CommSignature:
    return CommSignature(kind=kind, group=group, dtype="bfloat16", in_numel=numel, out_numel=numel)


def make(tmp_path, *calls: ReplayCall, idle_ns: float = 0.0, iterations: int = 6) -> ReplayRecorder:
    plan = ReplayPlan(rank=4, iteration_ns=9e6, idle_ns=idle_ns, calls=calls)
    write_json(tmp_path / "plan.json", plan)
    recorder = ReplayRecorder.of_plan(tmp_path / "plan.json", iterations=iterations, timer=Timer())
    recorder.group(GroupInfo(ranks=(0, 1), name="a"))
    recorder.group(GroupInfo(ranks=(0, 1), name="b", backend="gloo"))
    return recorder


def call(
    recorder: ReplayRecorder, signature: CommSignature, *, is_async: bool, work: int | None = None
) -> int:
    work = recorder.new_work() if work is None else work
    recorder.comm(signature, work=work, is_async=is_async)
    with recorder.answering():
        log.append(("answer on", torch.cuda.current_stream().name))
    return work


def test_a_synchronous_call_holds_the_issuing_stream(tmp_path) -> None:
    recorder = make(tmp_path, ReplayCall("all_reduce", 200, 5e3, 7e3, 24, 1e6))
    recorder.start()
    work = call(recorder, message("all_reduce", 100), is_async=False)
    assert log == [
        ("begin", "compute"),
        ("comm", "after", "compute"),
        ("reached", work, "comm"),
        ("answer on", "comm"),
        ("take part", work, "comm", 5e3, 7e3, 24),
        ("compute", "waits for", "comm"),
    ]


def test_an_asynchronous_call_is_waited_for_where_the_script_does(tmp_path) -> None:
    recorder = make(tmp_path, ReplayCall("all_gather", 200, 5e3))
    recorder.start()
    work = call(recorder, message("all_gather", 100), is_async=True)
    assert ("compute", "waits for", "comm") not in log
    assert log[-1] == ("take part", work, "comm", 5e3, ON_TIME, 0)
    recorder.stop()
    recorder.start()
    recorder.wait(work)
    assert log[-1] == ("compute", "waits for", "comm"), "also in the next iteration"


def test_calls_that_were_coalesced_are_reached_together(tmp_path) -> None:
    recorder = make(tmp_path, ReplayCall("send", 200, 5e3), ReplayCall("recv", 200, 6e3, 3e6))
    recorder.start()
    work = call(recorder, message("send", 100), is_async=True)
    call(recorder, message("recv", 100), is_async=True, work=work)
    assert sum(row[0] == "reached" for row in log) == 1
    assert [row[3:5] for row in log if row[0] == "take part"] == [(5e3, ON_TIME), (6e3, 3e6)]


def test_groups_of_the_host_do_not_touch_the_gpu(tmp_path) -> None:
    recorder = make(tmp_path, ReplayCall("all_reduce", 200, 5e3))
    recorder.start()
    call(recorder, message("all_reduce", 100, group=1), is_async=False)
    assert log == [("begin", "compute"), ("answer on", "compute")]


def test_calls_beyond_the_plan_are_answered_at_once_and_counted_when_it_counts(tmp_path) -> None:
    recorder = make(tmp_path, ReplayCall("all_reduce", 200, 5e3), ReplayCall("broadcast", 2, 1e3))
    for index in range(6):
        recorder.start()
        if index == 0:
            call(recorder, message("barrier", 0), is_async=False)
        call(recorder, message("all_reduce", 100), is_async=False)
        if index < 5:
            call(recorder, message("broadcast", 1), is_async=False)
        recorder.stop()
    assert recorder.has_program
    result = recorder.result()
    assert result.unmatched == 1, "the first iterations are warm-up; the last one lacks a call"
    assert (result.rank, result.calls, result.timer, result.peak_allocated_bytes) == (4, 1, "globaltimer", 5)
    assert result.iteration_ms == (12.5,) * 5
    first = next(row for row in log if row[0] == "take part")
    assert first[3] == 0, "no time for what the plan does not know"


def test_who_ends_early_waits_for_the_simulated_end(tmp_path) -> None:
    recorder = make(tmp_path, idle_ns=4e6)
    recorder.start()
    recorder.stop()
    assert log[-1] == ("take part", 0, "compute", 0, 9e6, 0)
