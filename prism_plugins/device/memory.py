"""Memory statistics: of the virtual device in the shape ``torch._C._cuda_memoryStats`` returns them, and of the host."""

from __future__ import annotations

import ctypes

import msgspec

from prism_plugins.device import library
from prism_plugins.program.allocator_settings import ROUNDUP_INTERVALS, UNLIMITED, AllocatorSettings

_STATS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_POOLS = ("all", "small_pool", "large_pool")
_FIELDS = ("current", "peak", "allocated", "freed")


def memory_counts(device: int) -> dict:
    """Nested statistics: name → pool → current, peak, allocated, freed; and plain counts."""
    numbers = (ctypes.c_int64 * (len(_STATS) * len(_POOLS) * len(_FIELDS) + 4))()
    library.call("device_stats", device, numbers)
    values = iter(numbers)
    stats: dict = {
        name: {pool: {field: next(values) for field in _FIELDS} for pool in _POOLS} for name in _STATS
    }
    stats["num_alloc_retries"], stats["num_ooms"], stats["num_device_alloc"], stats["num_device_free"] = (
        values
    )
    stats["max_split_size"] = _max_split_size[0]
    # Not counted.
    stats["num_sync_all_streams"] = 0
    stats["oversize_allocations"] = dict.fromkeys(_FIELDS, 0)
    stats["oversize_segments"] = dict.fromkeys(_FIELDS, 0)
    return stats


def configure_allocator(settings: AllocatorSettings) -> None:
    """Let the ledger follow these settings; in a CUDA build torch's own allocator reads them itself."""
    library.call(
        "configure_allocator",
        settings.expandable_segments,
        settings.max_split_size,
        settings.max_non_split_rounding,
        settings.garbage_collection_threshold,
        (ctypes.c_uint64 * ROUNDUP_INTERVALS)(*settings.roundup_divisions),
    )
    _max_split_size[0] = settings.max_split_size if settings.max_split_size < UNLIMITED else -1


_max_split_size = [-1]
_BYTES = ("allocated_bytes", "reserved_bytes", "requested_bytes")
_peaks: dict[tuple[int, str], int] = {}
"""Peaks that the script has reset since :func:`begin_peaks`, by device and statistic."""


def begin_peaks(device: int) -> None:
    """Peaks of the device count from now on."""
    _peaks.clear()
    library.call("reset_peak_stats", device)


def reset_peaks(device: int) -> None:
    """``torch.cuda.reset_peak_memory_stats``: for the script; :func:`peak_bytes` remembers."""
    for name in _BYTES:
        _peaks[device, name] = peak_bytes(device, name)
    library.call("reset_peak_stats", device)


def peak_bytes(device: int, name: str) -> int:
    """Peak of ``allocated_bytes``, ``reserved_bytes`` or ``requested_bytes`` since :func:`begin_peaks`."""
    return max(memory_counts(device)[name]["all"]["peak"], _peaks.get((device, name), 0))


class HostCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of large tensors of one process, bytes."""

    pageable: int
    pageable_peak: int
    pinned: int
    """In use, as requested."""
    pinned_peak: int
    page_locked: int
    """What torch's pinned allocator holds: sizes rounded up to powers of two, and kept when freed."""
    total_peak: int
    """Of pageable and page-locked together, since the process began."""
    untouched: int
    """Reserved for shape-only tensors, pinned or not."""
    untouched_peak: int
    """Since the process began."""


def host_counts() -> HostCounts:
    """Counts of this process; ``pageable_peak`` and ``pinned_peak`` since the recorder's peaks were reset."""
    numbers = (ctypes.c_int64 * len(HostCounts.__struct_fields__))()
    library.call("host_stats", numbers)
    return HostCounts(**dict(zip(HostCounts.__struct_fields__, numbers, strict=True)))
