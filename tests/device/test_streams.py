"""Streams and events: identity, what is recorded, and which stream work lands on."""

from __future__ import annotations

import pytest
import torch

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.device.library import call
from prism_plugins.program.model import EventKind

DEVICE = "virtual"


def number(stream):
    """What events call the stream."""
    return call("external_stream", stream.cuda_stream)


class Recording:
    def __enter__(self):
        get_recorder().start()
        return self

    def __exit__(self, *exc):
        self.events = get_recorder().stop().events

    def of(self, *kinds):
        return [e for e in self.events if e["kind"] in kinds]


def test_identity_and_priority():
    one, two, high = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    assert one != two
    assert one.priority == 0
    assert high.priority == -1
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.default_stream().cuda_stream == 0
    with torch.cuda.stream(one):
        assert torch.cuda.current_stream() == one
        assert torch.cuda.current_stream().stream_id == one.stream_id
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == one
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    external = torch.cuda.ExternalStream(0x7F001234)
    assert external == torch.cuda.ExternalStream(0x7F001234)
    assert external != one
    assert {number(torch.cuda.Stream()) for _ in range(64)} <= set(range(1, 33))  # a pool of 32, as in torch


def test_kernels_land_on_the_current_stream():
    x = torch.randn(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    with Recording() as r:
        x.relu()
        with torch.cuda.stream(side):
            x.relu()
        x.relu()
    assert [e["stream"] for e in r.of(EventKind.KERNEL)] == [0, number(side), 0]


def test_backward_runs_on_the_stream_of_forward():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    x.grad = torch.zeros_like(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x.relu()
        grad = torch.ones_like(y)
    with Recording() as r:
        y.backward(grad)
    streams = [int(e["stream"]) for e in r.of(EventKind.KERNEL)]
    assert number(side) in streams
    assert streams[0] == number(side)


def test_events_are_numbered_by_record_and_waits_refer_to_them():
    side = torch.cuda.Stream()
    event = torch.cuda.Event()
    with Recording() as r:
        event.record()
        side.wait_event(event)
        event.record(side)
        event.wait()
        event.synchronize()
    record, wait, again, wait_again, sync = r.events
    assert (record["kind"], record["stream"]) == (EventKind.EVENT_RECORD, 0)
    assert (wait["kind"], wait["stream"], wait["ref"]) == (
        EventKind.EVENT_WAIT,
        number(side),
        record["ref"],
    )
    assert again["ref"] != record["ref"]
    assert (wait_again["stream"], wait_again["ref"]) == (0, again["ref"])
    assert (sync["kind"], sync["ref"]) == (EventKind.EVENT_SYNC, again["ref"])


def test_wait_stream_and_synchronize():
    side = torch.cuda.Stream()
    with Recording() as r:
        side.wait_stream(torch.cuda.current_stream())
        side.synchronize()
        torch.cuda.synchronize()
    assert [e["kind"] for e in r.events] == [
        EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.STREAM_SYNC, EventKind.DEVICE_SYNC,
    ]  # fmt: skip
    assert r.events[2]["stream"] == number(side)


def test_an_event_of_before_the_recording_has_passed():
    event = torch.cuda.Event()
    event.record()
    with Recording() as r:
        event.wait()
        event.synchronize()
        torch.cuda.Event().synchronize()  # never recorded
    assert len(r.events) == 0


def test_elapsed_time():
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        a.elapsed_time(b)
    a.record()
    b.record()
    assert 0 <= a.elapsed_time(b) < 1000
    assert a.query()


def test_generic_torch_streams_work_too():
    stream, event = torch.Stream("cuda"), torch.Event("cuda")
    event.record()
    stream.wait_event(event)
    stream.synchronize()
    with stream:
        assert torch.cuda.current_stream().stream_id == stream.stream_id
