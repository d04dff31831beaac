"""Blocks that other streams use, on timelines worked out by hand."""

from __future__ import annotations

import numpy as np

from prism_plugins.program import memory_release
from prism_plugins.program.memory import held_back_bytes
from prism_plugins.program.memory_release import IssueTimes, held_blocks, host_with_queue
from prism_plugins.program.model import (
    EVENT_DTYPE,
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    OpSignature,
    Program,
)

MIB = 2**20


def timed(*rows, comms=(), groups=()):
    """A program of rows ``(kind, flags, stream, ref, value, host, start, end)`` and its times."""
    events = np.zeros(len(rows), EVENT_DTYPE)
    for event, row in zip(events, rows, strict=True):
        event["kind"], event["flags"], event["stream"], event["ref"], event["value"] = row[:5]
    program = Program(
        rank=0, events=events, signatures=[OpSignature(op="aten::add.Tensor")], comms=list(comms),
        groups=list(groups), phases=[], initial=[],
    )  # fmt: skip
    host, start, end = (np.array([row[i] for row in rows], dtype=float) for i in (5, 6, 7))
    return program, IssueTimes(host, start, end)


def kernel(host, start, end, stream=0):
    return (EventKind.KERNEL, 0, stream, 0, 0, host, start, end)


def alloc(ref, mib, at, flags=0):
    return (EventKind.ALLOC, int(flags), 0, ref, mib * MIB, at, at, at)


def free(ref, at):
    return (EventKind.FREE, 0, 0, ref, 0, at, at, at)


def gradients(flags, side_end):
    """A block that stream 1 adds up beside, released by the host at 3; the next allocations come at 4, 6 and 8."""
    return timed(
        alloc(1, 64, 0, flags),
        kernel(1, 1, 5),
        kernel(2, 5, side_end, stream=1),
        free(1, 3),
        alloc(2, 64, 4),
        alloc(3, 64, 6),
        alloc(4, 64, 8),
        free(2, 9),
    )


def test_a_block_waits_for_the_stream_that_uses_it():
    program, times = gradients(EventFlag.OTHER_STREAM, side_end=7)
    assert held_blocks(program, times) == [(0, 3, 6)]  # free again when block 4 is asked for
    assert held_back_bytes(program, times) == 0  # 64 + 64 + 64 MiB in use at the end
    program, times = gradients(EventFlag.OTHER_STREAM, side_end=20)
    assert held_blocks(program, times) == [(0, 3, len(program.events))]
    assert held_back_bytes(program, times) == 64 * MIB


def test_without_another_stream_or_behind_a_fast_one_nothing_is_held_back():
    assert held_blocks(*gradients(0, side_end=7)) == []
    assert held_blocks(*gradients(EventFlag.OTHER_STREAM, side_end=2.5)) == []


def message(kind, ref, work, host, end):
    return (EventKind.COMM, EventFlag.ASYNC, 0, ref, work, host, host, end)


def test_a_sent_block_waits_for_the_pairs_stream_only():
    group = GroupInfo(ranks=(0, 1, 2), name="pp")
    comms = [
        CommSignature(kind="send", group=0, dtype="uint8", in_numel=64 * MIB, peer=1),
        CommSignature(kind="recv", group=0, dtype="uint8", out_numel=8 * MIB, peer=2),
    ]
    rows = (
        alloc(1, 64, 0, EventFlag.MESSAGE),
        message("send", 0, 1, 1, end=5),
        message("recv", 1, 2, 2, end=50),
        free(1, 3),
        alloc(2, 64, 4),
        alloc(3, 64, 6),
    )
    assert held_blocks(*timed(*rows, comms=comms, groups=[group])) == [(0, 3, 5)]
    # In one batch both run on the group's stream.
    batch = (rows[0], message("send", 0, 1, 1, end=50), message("recv", 1, 1, 2, end=50), *rows[3:])
    assert held_blocks(*timed(*batch, comms=comms, groups=[group])) == [(0, 3, 6)]


def test_the_host_waits_for_room_in_the_queue(monkeypatch):
    monkeypatch.setattr(memory_release, "LAUNCH_QUEUE", 2)
    program, times = timed(
        kernel(1, 1, 10), kernel(2, 10, 20), kernel(3, 20, 30), alloc(1, 1, 4), kernel(5, 30, 40)
    )
    # The fourth launch finds room when the second starts, the third when the first does.
    assert host_with_queue(program, times).tolist() == [1, 2, 3, 4, 10]
