"""A rank's memory over an iteration as a snapshot that https://pytorch.org/memory_viz opens.

The format is that of ``torch.cuda.memory._dump_snapshot``: a pickle of plain containers with the segments and blocks at the
end, and the history of allocations. In place of a stack an allocation has the phase that made it and what it is for.
Nothing in prism reads it back.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from prism_plugins.emit.files import replaced_file
from prism_plugins.program.calls import phase_text
from prism_plugins.program.memory_allocator import SMALL_BYTES, CachingAllocator, block_bytes
from prism_plugins.program.model import EventKind, Program, category_of_flag
from prism_plugins.simulate.timeline import OpTimes


def write_snapshot(path: Path, program: Program, times: OpTimes) -> None:
    """Write the snapshot. Raises :class:`PrismError` when the file cannot be written."""
    with replaced_file(path) as file:
        pickle.dump(snapshot(program, times), file, protocol=2)


def snapshot(program: Program, times: OpTimes) -> dict[str, Any]:
    """The snapshot as plain containers: what is live when the iteration begins comes first in the history."""
    history = _History()
    ordinal_of: dict[int, int] = {}
    for allocation in program.initial:
        ordinal_of[allocation.id] = history.allocate(
            allocation.nbytes, 0, 0.0, _frame("before the iteration", str(allocation.category))
        )
    events = program.events
    rows = np.flatnonzero(np.isin(events["kind"], (EventKind.ALLOC, EventKind.FREE)))
    phases = _phase_names(program)
    for row, (kind, flags, stream, ref, value), at in zip(
        rows.tolist(), events[rows].tolist(), (times.host_ns[rows] / 1e3).tolist(), strict=True
    ):
        if kind == EventKind.ALLOC:
            frame = _frame(phases[row], str(category_of_flag(flags) or "not told"))
            ordinal_of[ref] = history.allocate(value, stream, at, frame)
        elif ref in ordinal_of:
            history.free(ordinal_of.pop(ref), at)
    return {
        "segments": history.segments(),
        "device_traces": [history.trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _frame(phase: str, purpose: str) -> list[dict[str, Any]]:
    return [{"name": phase, "filename": purpose, "line": 0}]


def _phase_names(program: Program) -> list[str]:
    """Name of the open phase for every event."""
    names = ["between phases"] * len(program.events)
    for phase, begin, end in program.iter_phases():
        names[begin : end + 1] = [phase_text(phase)] * (end + 1 - begin)
    return names


class _Allocator(CachingAllocator):
    """Remembers the segments it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[int, int]] = []
        """(address, bytes)."""

    def _segment(self, size: int) -> tuple[int, int]:
        bytes_, address = super()._segment(size)
        self.taken.append((address, bytes_))
        return bytes_, address


class _History:
    """Steps the allocator one allocation at a time and writes down what it does."""

    def __init__(self) -> None:
        self._allocator = _Allocator()
        self._count = 0
        self._requested: dict[int, int] = {}
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._stream_of: dict[int, int] = {}
        """Address of a segment → its stream."""
        self.trace: list[dict[str, Any]] = []

    def allocate(self, nbytes: int, stream: int, at_us: float, frames: list[dict[str, Any]]) -> int:
        """Allocate; returns the ordinal."""
        allocator, ordinal = self._allocator, self._count
        before = len(allocator.taken)
        allocator.run(block_bytes(np.array([nbytes])), np.array([-1]), np.array([stream]))
        self._count += 1
        for address, size in allocator.taken[before:]:
            self._stream_of[address] = stream
            self._note("segment_alloc", address, size, stream, at_us, frames)
        if ordinal in allocator.live:
            self._requested[ordinal], self._frames[ordinal] = nbytes, frames
            address, size, pool = allocator.live[ordinal]
            self._note("alloc", address, size, pool // 2, at_us, frames)
        return ordinal

    def free(self, ordinal: int, at_us: float) -> None:
        """Release."""
        block = self._allocator.live.get(ordinal)
        if block is None:  # nothing was taken for it
            return
        address, size, pool = block
        for action in ("free_requested", "free_completed"):
            self._note(action, address, size, pool // 2, at_us, self._frames.get(ordinal, []))
        self._allocator.run(np.array([-1]), np.array([ordinal]), np.array([0]))

    def _note(
        self, action: str, address: int, size: int, stream: int, at_us: float, frames: list[dict[str, Any]]
    ) -> None:
        self.trace.append(
            {"action": action, "addr": address, "size": size, "stream": stream, "time_us": round(at_us), "frames": frames}
        )  # fmt: skip

    def segments(self) -> list[dict[str, Any]]:
        """Segments and their blocks as they are now."""
        live = {address: (size, ordinal) for ordinal, (address, size, _) in self._allocator.live.items()}
        free = self._allocator.free_blocks
        found = []
        for address, total in sorted(self._allocator.taken):
            blocks = []
            at = address
            while at < address + total:
                size, ordinal = live.get(at, (free.get(at, 0), -1))
                if size <= 0:
                    raise AssertionError("a gap between blocks; this is a defect of prism")
                requested = self._requested[ordinal] if ordinal >= 0 else 0
                blocks.append(
                    {
                        "address": at,
                        "size": size,
                        "requested_size": requested,
                        "state": "active_allocated" if ordinal >= 0 else "inactive",
                        "frames": self._frames.get(ordinal, []),
                    }
                )
                at += size
            used = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
            found.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": total,
                    "allocated_size": used,
                    "active_size": used,
                    "requested_size": sum(b["requested_size"] for b in blocks),
                    "stream": self._stream_of[address],
                    "segment_type": "small" if total <= 2 * SMALL_BYTES else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return found
