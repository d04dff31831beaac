"""The allocator follows torch's caching allocator: rounding, pools, segments, splitting, streams, statistics."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.device.load import cublas_workspace_bytes
from prism_plugins.device.memory import configure_allocator
from prism_plugins.program.allocator_settings import parse_settings
from prism_plugins.program.model import EventKind, MemoryCategory

DEVICE = "virtual"
MIB = 2**20


def fresh():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def byte_tensor(n):
    return torch.empty(n, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_rounding_and_segments(size, block, segment):
    allocated, reserved = fresh()
    # Blocks of other tests may leave room in small segments: look at a stream of its own.
    with torch.cuda.stream(torch.cuda.Stream()):
        t = byte_tensor(size)
    assert torch.cuda.memory_allocated() - allocated == block
    assert torch.cuda.memory_reserved() - reserved == segment
    del t
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() - reserved == segment
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def test_reuse_splitting_and_coalescing():
    _, reserved = fresh()
    with torch.cuda.stream(torch.cuda.Stream()):
        a, b, c = (byte_tensor(4 * MIB) for _ in range(3))  # one 20 MiB segment
        assert torch.cuda.memory_reserved() - reserved == 20 * MIB
        first = a.data_ptr()
        del a, b
        d = byte_tensor(8 * MIB)  # fits only if both neighbours were merged
        assert d.data_ptr() == first
        assert torch.cuda.memory_reserved() - reserved == 20 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - reserved == 20 * MIB  # the segment is in use
        del c, d


def test_streams_have_their_own_pools():
    _, reserved = fresh()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        t = byte_tensor(15 * MIB)
        del t
    with torch.cuda.stream(two):
        byte_tensor(15 * MIB)
    assert torch.cuda.memory_reserved() - reserved == 32 * MIB


def test_record_stream_is_counted_when_it_would_delay_reuse():
    before = get_recorder().stats().delayed_reuse
    t = byte_tensor(100)
    t.record_stream(torch.cuda.current_stream())
    del t
    assert get_recorder().stats().delayed_reuse == before
    t = byte_tensor(100)
    t.record_stream(torch.cuda.Stream())
    del t
    assert get_recorder().stats().delayed_reuse == before + 1


def late_reserved():
    return get_recorder().stats().late_peak_reserved_bytes


def test_the_late_ledger_reuses_a_shared_block_when_the_gpu_has_come_to_its_release():
    fresh()
    side, work = torch.cuda.Stream(), byte_tensor(8)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        work.add_(1)
        before, reserved = late_reserved(), torch.cuda.memory_reserved()
        t = byte_tensor(100 * MIB)
        t.record_stream(side)
        del t
        t = byte_tensor(100 * MIB)
        assert late_reserved() - before == 200 * MIB  # its reuse waits for the other stream
        assert torch.cuda.memory_reserved() - reserved == 100 * MIB
        del t
        t = byte_tensor(100 * MIB)  # the second one: nobody else used it
        assert late_reserved() - before == 200 * MIB
        for _ in range(1022):
            work.add_(1)
        u = byte_tensor(100 * MIB)
        assert late_reserved() - before == 300 * MIB
        work.add_(1)
        work.add_(1)  # the 1024th launch after the release: the GPU has started what came after it
        v = byte_tensor(100 * MIB)
        assert late_reserved() - before == 300 * MIB
        t.record_stream(side)
        del t
        torch.cuda.synchronize()
        t = byte_tensor(100 * MIB)  # the host has waited
        assert late_reserved() - before == 300 * MIB
        del t, u, v


def test_autograd_on_a_stream_of_its_own_shares_gradients():
    parameter = torch.nn.Parameter(torch.empty(4 * MIB, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    before = get_recorder().stats().delayed_reuse
    (parameter * 2).sum().backward()
    parameter.grad = None
    assert get_recorder().stats().delayed_reuse == before + 1
    del accumulate


def configured(conf):
    configure_allocator(parse_settings(conf))


def test_expandable_segments_grow_and_give_pages_back():
    _, reserved = fresh()
    try:
        configured("expandable_segments:True")
        with torch.cuda.stream(torch.cuda.Stream()):
            a, b, c = byte_tensor(30 * MIB), byte_tensor(40 * MIB), byte_tensor(30 * MIB)
            assert torch.cuda.memory_reserved() - reserved == 100 * MIB
            assert b.data_ptr() == a.data_ptr() + 30 * MIB
            del b
            torch.cuda.empty_cache()  # pages 2 and 3 hold parts of a and c; of 30 to 70 MiB only 40 to 60 are whole
            assert torch.cuda.memory_reserved() - reserved == 80 * MIB
            b = byte_tensor(40 * MIB)  # the lowest place with room: the gap
            assert b.data_ptr() == a.data_ptr() + 30 * MIB
            assert torch.cuda.memory_reserved() - reserved == 100 * MIB
            del a, b, c
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == reserved
    finally:
        configured("")


def test_a_limited_process_collects_old_blocks():
    _, reserved = fresh()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        configured("garbage_collection_threshold:0.5")
        torch.cuda.set_per_process_memory_fraction((reserved + 400 * MIB) / total)
        with torch.cuda.stream(torch.cuda.Stream()):
            old = byte_tensor(100 * MIB)
            del old
            a, b = byte_tensor(150 * MIB), byte_tensor(120 * MIB)
            # With 250 MiB it is above the threshold: the free block goes before more is taken.
            assert torch.cuda.memory_reserved() - reserved == 270 * MIB
            del a, b
    finally:
        configured("")
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_peaks_and_statistics():
    allocated, _ = fresh()
    # Tests share a process: another one may have asked for more than there is.
    before = torch.cuda.memory_stats()["num_ooms"]
    t = byte_tensor(3 * MIB)
    del t
    assert torch.cuda.max_memory_allocated() - allocated == 3 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    stats = torch.cuda.memory_stats()
    for name in ("allocation", "segment", "active", "inactive_split"):
        assert f"{name}.small_pool.current" in stats
    for name in (
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    ):
        assert stats[f"{name}.all.peak"] >= stats[f"{name}.all.current"] >= 0
    assert stats["num_ooms"] == before
    assert "Allocated memory" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved()


def test_beyond_the_capacity_allocations_succeed_and_are_counted():
    fresh()
    total = torch.cuda.get_device_properties(0).total_memory
    before = get_recorder().stats().num_ooms
    t = torch.empty(total + MIB, dtype=torch.uint8, device="cuda")
    assert get_recorder().stats().num_ooms == before + 1
    assert t.shape == (total + MIB,)
    del t
    torch.cuda.empty_cache()


def test_cublas_workspace_is_charged_once_per_thread_and_stream():
    torch._C._cuda_clearCublasWorkspaces()
    allocated, _ = fresh()
    workspace = cublas_workspace_bytes((9, 0))
    assert workspace == 32 * MIB
    a = torch.randn(16, 16, device="cuda")
    base = torch.cuda.memory_allocated()
    for _ in range(3):
        a @ a
    assert torch.cuda.memory_allocated() - base == workspace
    categories = {x.category for x in get_recorder().live_allocations() if x.nbytes == workspace}
    assert categories == {MemoryCategory.WORKSPACE}
    torch._C._cuda_clearCublasWorkspaces()
    del a
    assert torch.cuda.memory_allocated() == allocated


def test_ledger_and_events_of_a_random_workload():
    recorder = get_recorder()
    recorder.start()
    initial = {a.id: a.nbytes for a in recorder.live_allocations()}
    rng = random.Random(0)
    held = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            held.append(byte_tensor(int(10 ** rng.uniform(1, 8))))
    recorded = recorder.stop()
    live = dict(initial)
    for event in recorded.events:
        if event["kind"] == EventKind.ALLOC:
            assert int(event["ref"]) not in live
            live[int(event["ref"])] = int(event["value"])
        elif event["kind"] == EventKind.FREE:
            del live[int(event["ref"])]
    assert live == {a.id: a.nbytes for a in recorder.live_allocations()}
    assert {a.id for a in recorded.initial} == set(initial)
    stats = recorder.stats()
    rounded = sum((n + 511) // 512 * 512 for n in live.values())
    assert stats.requested_bytes == sum(live.values())
    # A large block keeps a rest of up to 1 MiB that is not worth splitting off.
    assert rounded <= stats.allocated_bytes <= rounded + MIB * len(live)


def test_tags():
    recorder = get_recorder()
    t = byte_tensor(777)
    recorder.tag(t, MemoryCategory.PARAMETERS)
    assert [a.category for a in recorder.live_allocations() if a.nbytes == 777] == [MemoryCategory.PARAMETERS]
    recorder.tag(torch.ones(1), MemoryCategory.PARAMETERS)  # no device memory: nothing to tag
