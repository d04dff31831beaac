"""The fast allocator against a slow one that keeps every block of every segment in a list."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_plugins.program.memory_allocator import CachingAllocator, block_bytes

MIB = 2**20


class SlowAllocator:
    """The rules of CUDACachingAllocator.cpp, written down without any data structure."""

    def __init__(self):
        self.segments = []  # each: {"pool": (stream, small), "blocks": [[size, owner or None], ...]}
        self.allocated = self.peak = 0

    @property
    def reserved(self):
        return sum(size for segment in self.segments for size, _ in segment["blocks"])

    def malloc(self, size, stream, owner):
        small = size <= MIB
        best = None
        for segment in self.segments:
            if segment["pool"] != (stream, small):
                continue
            for i, (have, used) in enumerate(segment["blocks"]):
                if used is None and have >= size and (best is None or have < best[0]):
                    best = (have, segment, i)
        if best is None:
            if small:
                total = 2 * MIB
            elif size < 10 * MIB:
                total = 20 * MIB
            else:
                total = -(-size // (2 * MIB)) * 2 * MIB
            segment = {"pool": (stream, small), "blocks": [[total, None]]}
            self.segments.append(segment)
            best = (total, segment, 0)
        have, segment, i = best
        rest = have - size
        if rest >= 512 if small else rest > MIB:
            segment["blocks"][i : i + 1] = [[size, owner], [rest, None]]
            have = size
        else:
            segment["blocks"][i][1] = owner
        self.allocated += have
        self.peak = max(self.peak, self.allocated)

    def free(self, owner):
        for segment in self.segments:
            for block in segment["blocks"]:
                if block[1] == owner:
                    self.allocated -= block[0]
                    block[1] = None
            merged = []
            for size, used in segment["blocks"]:
                if merged and used is None and merged[-1][1] is None:
                    merged[-1][0] += size
                else:
                    merged.append([size, used])
            segment["blocks"] = merged


def sequence(script):
    """(sizes, targets, streams) from a list of (bytes or None for a free, index, stream)."""
    sizes, targets, streams, live, ordinal = [], [], [], [], 0
    for nbytes, pick, stream in script:
        if nbytes is None:
            if not live:
                continue
            sizes.append(-1)
            targets.append(live.pop(pick % len(live)))
        else:
            sizes.append(int(block_bytes(np.array(nbytes))))
            targets.append(-1)
            live.append(ordinal)
            ordinal += 1
        streams.append(stream)
    return np.array(sizes, np.int64), np.array(targets, np.int64), np.array(streams, np.int64)


def slow(sizes, targets, streams):
    allocator, ordinal = SlowAllocator(), 0
    for size, target, stream in zip(sizes.tolist(), targets.tolist(), streams.tolist(), strict=True):
        if size < 0:
            allocator.free(target)
        else:
            if size:
                allocator.malloc(size, stream, ordinal)
            ordinal += 1
    return allocator


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(4096, 3 * MIB),
    st.integers(3 * MIB, 64 * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB]),
)
STEPS = st.tuples(st.one_of(SIZES, st.none()), st.integers(0, 10**6), st.integers(0, 1))


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=80))
def test_equals_reference(script):
    sizes, targets, streams = sequence(script)
    use = CachingAllocator().run(sizes, targets, streams)
    expected = slow(sizes, targets, streams)
    assert use.reserved_bytes == expected.reserved
    assert use.allocated_bytes_end == expected.allocated
    assert use.peak_allocated_bytes == expected.peak


def test_unsplit_rest_counts_as_allocated():
    # 21.5 MiB asks for a segment of 22 MiB; the rest of 0.5 MiB stays with the block, as CUDA's statistics show
    use = CachingAllocator().run(np.array([43 * MIB // 2]), np.array([-1]), np.array([0]))
    assert use.peak_allocated_bytes == use.reserved_bytes == 22 * MIB


def pipeline(num_microbatches, warmup, rng):
    """ALLOC/FREE steps of a 1F1B stage and the steps at which phases begin."""
    kept = rng.integers(1, 40 * MIB, 12)
    temporary = rng.integers(1, 40 * MIB, 20)
    sizes, targets, bounds, ordinal, stacks = [], [], [], 0, []

    def alloc(nbytes):
        nonlocal ordinal
        sizes.append(int(block_bytes(np.array(nbytes))))
        targets.append(-1)
        ordinal += 1
        return ordinal - 1

    def free(target):
        sizes.append(-1)
        targets.append(target)

    def forward():
        bounds.append(len(sizes))
        saved = []
        for keep, temp in zip(kept.tolist(), temporary.tolist(), strict=False):
            scratch = alloc(temp)
            saved.append(alloc(keep))
            free(scratch)
        stacks.append(saved)

    def backward():
        bounds.append(len(sizes))
        scratch = None
        for saved in reversed(stacks.pop(0)):
            new = alloc(int(temporary[saved % 20]))
            if scratch is not None:
                free(scratch)
            scratch = new
            free(saved)
        free(scratch)

    for _ in range(warmup):
        forward()
    for _ in range(num_microbatches - warmup):
        forward()
        backward()
    for _ in range(warmup):
        backward()
    return (
        np.array(sizes, np.int64),
        np.array(targets, np.int64),
        np.zeros(len(sizes), np.int64),
        np.array(bounds),
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(0, 8))
def test_skipping_repeated_periods_changes_nothing(seed, num_microbatches, warmup):
    steps = pipeline(num_microbatches, min(warmup, num_microbatches), np.random.default_rng(seed))
    fast, plain = CachingAllocator(), CachingAllocator()
    assert fast.run(*steps) == plain.run(*steps[:3])
    assert fast._live == plain._live
    assert fast._free_at == plain._free_at


def test_repetition_makes_long_iterations_cheap():
    steps = pipeline(4000, 8, np.random.default_rng(1))
    assert len(steps[0]) > 250_000
    begin = time.perf_counter()
    fast = CachingAllocator().run(*steps)
    assert time.perf_counter() - begin < 2.0
    assert (
        fast.reserved_bytes
        == CachingAllocator().run(*pipeline(40, 8, np.random.default_rng(1))[:3]).reserved_bytes
    )
