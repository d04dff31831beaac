"""A replay: what a rank of interest is told about its virtual peers, and what it measured among them.

Times are nanoseconds from the start of an iteration.
"""

from __future__ import annotations

import msgspec

from prism_plugins.program.model import SCHEMA

ON_TIME = -1.0
"""A call whose peers arrive when we do."""


VIRTUAL_CLOCK = "virtual clock"
"""The timer of a replay without a GPU."""


class ReplayCall(msgspec.Struct, frozen=True, array_like=True):
    """One collective or point-to-point call of an iteration, in the order the rank issues them."""

    kind: str
    nbytes: int
    duration_ns: float
    """From the arrival of the last member."""
    peers_ns: float = ON_TIME
    """When the last of the others arrives, where the simulation says that it comes after us."""
    channels: int = 0
    """NCCL channels: thread blocks that hold an SM while it lasts."""
    hbm_bytes: float = 0.0
    """HBM traffic it causes."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """plan.json of a replay."""

    schema: int = SCHEMA
    rank: int
    iteration_ns: float
    """Simulated."""
    idle_ns: float
    """What the rank waits at the end of an iteration for others that it meets in the next one."""
    calls: tuple[ReplayCall, ...] = ()


class ClockPlan(msgspec.Struct, frozen=True, kw_only=True):
    """plan.json of a replay without a GPU: what the clocks of the script show. Arrays are little-endian, as base64."""

    schema: int = SCHEMA
    rank: int
    iteration_ns: float
    """Simulated."""
    kinds: bytes
    """uint8: :class:`EventKind` of the iteration's events, those of memory and of host work left out."""
    host_ns: bytes
    """float64, for each of them: when the host comes to it."""
    record_ns: bytes
    """float64: when the device reaches each EVENT_RECORD, in order."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """replay.json of a replay."""

    schema: int = SCHEMA
    rank: int
    iteration_ms: tuple[float, ...] = ()
    """From begin to begin, by the GPU's clock or the virtual one."""
    calls: int = 0
    """Of an iteration."""
    unmatched: int = 0
    """Calls that the plan did not foresee: answered at once."""
    timer: str = ""
    """How virtual peers keep time: ``globaltimer`` or ``sleep``; :data:`VIRTUAL_CLOCK` without a GPU."""
    strange: int = 0
    """On a virtual clock: iterations, but for the first two, whose events are not those of the simulated program."""
    peak_allocated_bytes: int = 0
    peak_requested_bytes: int = 0
    """Allocated, but for what the allocator gives on top: it uses cached blocks that are up to 1 MiB larger whole."""
    peak_reserved_bytes: int = 0


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """In the prediction: a replay beside the simulation."""

    rank: int
    iteration_time_ms: float
    """Median of the steady iterations."""
    simulated_ms: float
    spread: float = 0.0
    """(Largest - smallest) over the median of the steady iterations."""
    iterations: int = 0
    unmatched_calls: int = 0
    peak_allocated_bytes: int = 0
    timer: str = ""
    """How time was kept, see :class:`ReplayResult`; empty in runs of earlier versions: on a GPU."""
    log: str = ""
    """Where the script's own output is, relative to the run directory."""
