"""The memory stage's allocator and the virtual device's own: the same sequence takes the same segments."""

from __future__ import annotations

import random

import pytest
import torch

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.program.memory import memory_of_program
from prism_plugins.program.memory_device import DeviceOverhead
from prism_plugins.program.model import EventKind, Program

DEVICE = "virtual"
MIB = 2**20


def allocate_at_random(seed):
    rng = random.Random(seed)
    live = []
    sizes = [512, 3000, 100_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB + 7]
    for _ in range(300):
        if live and rng.random() < 0.45:
            live.pop(rng.randrange(len(live)))
        else:
            size = int(rng.choice(sizes) * rng.uniform(0.5, 1.5))
            live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def statistics():
    stats = torch.cuda.memory_stats()
    return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.current"]


@pytest.mark.parametrize("seed", range(5))
def test_emulation_equals_the_device(seed):
    recorder = get_recorder()
    with torch.cuda.stream(torch.cuda.Stream()):  # a pool of its own: nothing is cached
        torch.cuda.reset_peak_memory_stats()
        _, reserved_before = statistics()
        allocated_before = torch.cuda.memory_allocated()
        recorder.start()
        allocate_at_random(seed)
        events = recorder.stop().events
        peak, reserved = statistics()
    changes = events[(events["kind"] == EventKind.ALLOC) | (events["kind"] == EventKind.FREE)]
    assert len(changes) > 300
    program = Program(rank=0, events=changes, signatures=[], comms=[], groups=[], phases=[], initial=[])
    use = memory_of_program(program, overhead=DeviceOverhead(context_bytes=0, libraries_bytes=0), passes=1)
    assert use.peak_allocated_bytes == peak - allocated_before
    assert use.peak_reserved_bytes == reserved - reserved_before
