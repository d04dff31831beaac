"""PyTorch's CUDA caching allocator, block by block, over a sequence of allocations and frees.

Follows ``c10/cuda/CUDACachingAllocator.cpp``. With its default settings requests are rounded to 512 bytes; up to
1 MiB they come from 2 MiB segments (small pool), else from segments of 20 MiB, or, from 10 MiB on, of their size
rounded to 2 MiB; the best fitting free block of the same stream is taken, the lowest address among equals; a block
is split when the rest is worth keeping (512 bytes in the small pool, more than 1 MiB in the large one); freed
neighbours merge; segments are never returned. With ``expandable_segments`` there is one segment a stream and pool, which
grows at its end by pages of 2 or 20 MiB, and every rest is kept. Other settings: :mod:`.allocator_settings`.

Memory is unlimited here, so nothing is ever given back: garbage collection and retries after an out-of-memory error are the
slices' ledger's alone (``device/csrc/blocks.cpp``). Blocks held back by ``record_stream``: :mod:`.memory_release`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort

import msgspec
import numpy as np

from prism_plugins.program.allocator_settings import ROUNDUP_INTERVALS, UNLIMITED, AllocatorSettings

BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
MIN_LARGE_BYTES = 10 * 2**20
ROUND_LARGE_BYTES = 2 * 2**20
_ADDRESS_SPACE = 2**45
"""Between the beginnings of expandable segments; ordinary ones lie below."""
_MAX_CANDIDATES = 64
"""Periods tried at a boundary before it is taken as the start of none."""


_DEFAULTS = AllocatorSettings()


def block_bytes(requested: np.ndarray, settings: AllocatorSettings = _DEFAULTS) -> np.ndarray:
    """Requested bytes rounded to blocks; an empty request takes none. Any shape, int64."""
    requested = np.asarray(requested, np.int64)
    blocks = -(-requested // BLOCK_BYTES) * BLOCK_BYTES
    if not any(d > 1 for d in settings.roundup_divisions):
        return blocks
    exponent = np.floor(np.log2(np.maximum(requested, 1))).astype(np.int64)
    exponent += (1 << np.minimum(exponent + 1, 62)) <= requested  # log2 of large numbers is not exact
    exponent -= (1 << exponent) > np.maximum(requested, 1)
    divisions = np.array(settings.roundup_divisions)[np.clip(exponent - 20, 0, ROUNDUP_INTERVALS - 1)]
    step = np.maximum((1 << exponent) // np.maximum(divisions, 1), 1)
    divided = (divisions > 1) & (requested > BLOCK_BYTES * divisions)
    return np.where(divided, -(-requested // step) * step, blocks)


class AllocatorUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence did to the allocator, bytes."""

    peak_allocated_bytes: int
    peak_index: int
    """Index of the step after which the most was allocated (the first, if several)."""
    allocated_bytes_end: int
    reserved_bytes: int


class CachingAllocator:
    """The allocator's state. Live blocks are known by the ordinal of their allocation (0, 1, 2, …)."""

    def __init__(self, settings: AllocatorSettings = _DEFAULTS) -> None:
        self._settings = settings
        self._plain = settings.max_split_size == UNLIMITED and not settings.expandable_segments
        """Whether the loop that only knows the default rules does."""
        self._end_of: dict[int, int] = {}
        """Pool → end of what is mapped of its expandable segment."""
        self.allocated = 0
        self.reserved = 0
        self._num_allocations = 0
        self._live: dict[int, tuple[int, int, int]] = {}
        """Ordinal → (address, size, pool)."""
        self._free: dict[int, list[tuple[int, int]]] = {}
        """Pool → free blocks (size, address), ascending."""
        self._free_at: dict[int, int] = {}
        """Address of a free block → its size."""
        self._free_until: dict[int, int] = {}
        """End of a free block → its address."""
        self._next_segment = LARGE_SEGMENT_BYTES

    @property
    def live(self) -> dict[int, tuple[int, int, int]]:
        """Live blocks: ordinal → (address, bytes, 2 x stream + 1 in the small pool)."""
        return self._live

    @property
    def free_blocks(self) -> dict[int, int]:
        """Free blocks: address → bytes."""
        return self._free_at

    def run(
        self,
        sizes: np.ndarray,
        targets: np.ndarray,
        streams: np.ndarray,
        boundaries: np.ndarray | None = None,
    ) -> AllocatorUse:
        """Apply steps in order.

        Args:
            sizes: Shape (n,). Requested bytes rounded to blocks for an allocation, -1 for a free.
            targets: Shape (n,). For a free: ordinal of the allocation it ends, counted over this allocator's life.
                Ignored for allocations.
            streams: Shape (n,). Stream of each allocation.
            boundaries: Ascending steps at which a repeating pattern may begin (the start of each micro-batch).
                Where the steps between boundaries repeat and the state they lead to repeats too, the repetitions
                are skipped; the result is the same.
        """
        peak, peak_index = self.allocated, 0
        repeats = _repeats(sizes, targets, streams, boundaries, self._num_allocations)
        first, step, end = self._num_allocations, 0, len(sizes)
        while step < end:
            period = repeats.get(step)
            if period is None:
                stop = min((b for b in repeats if b > step), default=end)
                top, top_index = self._apply(sizes, targets, streams, step, stop)
                if top > peak:
                    peak, peak_index = top, top_index
                step = stop
                continue
            length, count = period
            seen = {self._state(first): (0, self._num_allocations)}
            done = 0
            while done < count:
                top, top_index = self._apply(sizes, targets, streams, step, step + length)
                if top > peak:
                    peak, peak_index = top, top_index
                step += length
                done += 1
                state = self._state(first)
                if state in seen:
                    earlier, allocations = seen[state]
                    cycles = (count - done) // (done - earlier)
                    self._age(cycles * (self._num_allocations - allocations), first)
                    step += cycles * (done - earlier) * length
                    done += cycles * (done - earlier)
                    seen.clear()
                else:
                    seen[state] = (done, self._num_allocations)
        return AllocatorUse(
            peak_allocated_bytes=peak,
            peak_index=peak_index,
            allocated_bytes_end=self.allocated,
            reserved_bytes=self.reserved,
        )

    def _apply(
        self, sizes: np.ndarray, targets: np.ndarray, streams: np.ndarray, start: int, stop: int
    ) -> tuple[int, int]:
        """Run steps [start, stop); return the most that was allocated after one of them, and which."""
        if not self._plain:
            return self._apply_with_settings(sizes, targets, streams, start, stop)
        live, free_at, free_until, free_lists = self._live, self._free_at, self._free_until, self._free
        allocated, ordinal, peak, peak_index = self.allocated, self._num_allocations, -1, start
        steps = zip(
            sizes[start:stop].tolist(),
            targets[start:stop].tolist(),
            streams[start:stop].tolist(),
            strict=True,
        )
        for index, (size, target, stream) in enumerate(steps, start):
            if size > 0:
                small = size <= SMALL_BYTES
                pool = 2 * stream + small
                free = free_lists.get(pool)
                if free is None:
                    free = free_lists[pool] = []
                i = bisect_left(free, (size, 0))
                if i < len(free):
                    have, address = free.pop(i)
                    del free_at[address], free_until[address + have]
                else:
                    have, address = self._segment(size)
                rest = have - size
                if rest > SMALL_BYTES or (small and rest >= BLOCK_BYTES):
                    insort(free, (rest, address + size))
                    free_at[address + size] = rest
                    free_until[address + have] = address + size
                    have = size
                live[ordinal] = (address, have, pool)
                ordinal += 1
                allocated += have
                if allocated > peak:
                    peak, peak_index = allocated, index
            elif size == 0:
                ordinal += 1
            elif target in live:
                address, size, pool = live.pop(target)
                allocated -= size
                free = free_lists[pool]
                after = free_at.pop(address + size, 0)
                if after:
                    del free[bisect_left(free, (after, address + size))]
                    del free_until[address + size + after]
                    size += after
                before = free_until.pop(address, None)
                if before is not None:
                    have = free_at[before]
                    del free[bisect_left(free, (have, before))]
                    address = before
                    size += have
                insort(free, (size, address))
                free_at[address] = size
                free_until[address + size] = address
        self.allocated, self._num_allocations = allocated, ordinal
        return peak, peak_index

    def _apply_with_settings(
        self, sizes: np.ndarray, targets: np.ndarray, streams: np.ndarray, start: int, stop: int
    ) -> tuple[int, int]:
        """The same under settings that change which block is taken or split."""
        settings = self._settings
        peak, peak_index = -1, start
        for index in range(start, stop):
            size, target = int(sizes[index]), int(targets[index])
            if size > 0:
                small = size <= SMALL_BYTES
                pool = 2 * int(streams[index]) + small
                address, have = self._take(size, pool)
                rest = have - size
                splits = rest >= BLOCK_BYTES
                if not (small or settings.expandable_segments):
                    splits = rest > SMALL_BYTES and size < settings.max_split_size
                if splits:
                    self._give(address + size, rest, pool)
                    have = size
                self._live[self._num_allocations] = (address, have, pool)
                self._num_allocations += 1
                self.allocated += have
                if self.allocated > peak:
                    peak, peak_index = self.allocated, index
            elif size == 0:
                self._num_allocations += 1
            elif target in self._live:
                address, size, pool = self._live.pop(target)
                self.allocated -= size
                self._give(address, size, pool)
        return peak, peak_index

    def _take(self, size: int, pool: int) -> tuple[int, int]:
        """A block for so many bytes, before it is split: (address, bytes)."""
        settings = self._settings
        free = self._free.setdefault(pool, [])
        i = bisect_left(free, (size, 0))
        # The last block of what is mapped counts as large as the segment can grow: another one goes first.
        if settings.expandable_segments and i < len(free) - 1 and sum(free[i]) == self._end_of.get(pool):
            i += 1
        if i < len(free):
            have, address = free[i]
            limit = settings.max_split_size
            if have < (limit if size < limit else size + settings.max_non_split_rounding):
                self._remove(address, have, pool)
                return address, have
        if settings.expandable_segments:
            return self._grow(size, pool)
        have, address = self._segment(size)
        return address, have

    def _grow(self, size: int, pool: int) -> tuple[int, int]:
        """Map pages at the end of the pool's segment until its last block has so many bytes."""
        if pool not in self._end_of:
            self._end_of[pool] = (len(self._end_of) + 1) * _ADDRESS_SPACE
        end = self._end_of[pool]
        address = self._free_until.get(end, end)
        have = end - address
        if have:
            self._remove(address, have, pool)
        page = SMALL_SEGMENT_BYTES if pool % 2 else LARGE_SEGMENT_BYTES
        more = -(-(size - have) // page) * page
        self.reserved += more
        self._end_of[pool] = end + more
        return address, have + more

    def _remove(self, address: int, size: int, pool: int) -> None:
        free = self._free[pool]
        del free[bisect_left(free, (size, address))]
        del self._free_at[address], self._free_until[address + size]

    def _give(self, address: int, size: int, pool: int) -> None:
        """A block is free: merge it with free neighbours."""
        after = self._free_at.get(address + size, 0)
        if after:
            self._remove(address + size, after, pool)
            size += after
        before = self._free_until.get(address)
        if before is not None:
            have = self._free_at[before]
            self._remove(before, have, pool)
            address, size = before, size + have
        insort(self._free[pool], (size, address))
        self._free_at[address] = size
        self._free_until[address + size] = address

    def _segment(self, size: int) -> tuple[int, int]:
        if size <= SMALL_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        address = self._next_segment
        self._next_segment += segment + ROUND_LARGE_BYTES  # a gap, so that blocks of two segments never merge
        self.reserved += segment
        return segment, address

    def _state(self, first: int) -> tuple[frozenset[tuple[int, int, int]], frozenset[tuple[int, int]]]:
        """Everything that decides what happens next: live blocks (allocations from ordinal ``first`` on by their
        age, older ones by their ordinal) and free blocks."""
        now = self._num_allocations
        live = frozenset(
            (address, size, ordinal - now if ordinal >= first else ordinal)
            for ordinal, (address, size, _) in self._live.items()
        )
        return live, frozenset(self._free_at.items())

    def _age(self, by: int, first: int) -> None:
        """Rename live blocks from ordinal ``first`` on as if ``by`` allocations had gone by in whole cycles."""
        self._live = {
            (ordinal + by if ordinal >= first else ordinal): block for ordinal, block in self._live.items()
        }
        self._num_allocations += by


def _repeats(
    sizes: np.ndarray,
    targets: np.ndarray,
    streams: np.ndarray,
    boundaries: np.ndarray | None,
    num_allocations: int,
) -> dict[int, tuple[int, int]]:
    """Runs of at least three equal periods: first step → (steps in a period, how many periods).

    A period is one or more stretches between boundaries. Two stretches are equal when they allocate the same sizes
    on the same streams in the same order and free blocks of the same age, in allocations.
    """
    if boundaries is None or len(boundaries) < 3:
        return {}
    is_alloc = sizes >= 0
    ordinals = num_allocations + np.cumsum(is_alloc)
    ages = np.where(targets >= 0, targets - ordinals, np.iinfo(np.int64).min)
    codes = np.where(is_alloc, (sizes << 8) | (streams & 0xFF), ages)
    edges = [*(int(b) for b in boundaries), len(sizes)]
    stretches = [codes[a:b].tobytes() for a, b in itertools.pairwise(edges)]
    positions: dict[bytes, list[int]] = {}
    for i, stretch in enumerate(stretches):
        positions.setdefault(stretch, []).append(i)
    found: dict[int, tuple[int, int]] = {}
    i = 0
    while i < len(stretches):
        period, count = _period_at(stretches, i, positions[stretches[i]])
        if count and edges[i + period] > edges[i]:
            found[edges[i]] = (edges[i + period] - edges[i], count)
        i += max(1, period * count)
    return found


def _period_at(stretches: list[bytes], i: int, occurrences: list[int]) -> tuple[int, int]:
    """The shortest (period, count) with count ≥ 3 that begins at stretch ``i``; (0, 0) if there is none."""
    first = bisect_left(occurrences, i) + 1
    for later in occurrences[first : first + _MAX_CANDIDATES]:
        period = later - i
        if stretches[i : i + 2 * period] != stretches[later : later + 2 * period]:
            continue
        if later + 2 * period > len(stretches):
            continue
        count = 3
        while stretches[i + count * period : i + (count + 1) * period] == stretches[i : i + period]:
            count += 1
        return period, count
    return 0, 0
