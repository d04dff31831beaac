"""What a slice on a real GPU measured beside its program: ``measured.json`` in its directory."""

from __future__ import annotations

import msgspec

from prism_plugins.program.model import SCHEMA, OpSignature


class MeasuredOp(msgspec.Struct, frozen=True, array_like=True):
    """Time of an op inside the running slice."""

    signature: OpSignature
    ns: float
    """Mean time on its stream."""
    count: int
    """Occurrences behind it."""
    host_ns: float = 0.0
    """Mean time of the host to issue it, without waiting for the GPU; 0: not known."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU while the timed iterations ran, by NVML; zeros where it could not be read."""

    name: str = ""
    driver: str = ""
    power_w: float = 0.0
    """Median board power."""
    cap_w: float = 0.0
    clock_mhz: float = 0.0
    """Median SM clock."""
    max_clock_mhz: float = 0.0
    temperature_c: float = 0.0
    throttled: dict[str, float] = {}
    """Reason → share of the samples in which it held the clocks down; the power cap is ``power cap``."""
    samples: int = 0


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the slice's process on its GPU, bytes."""

    used: int = 0
    """What the device reports as used while nothing else runs there; 0 when something else did."""
    context: int = 0
    """Of it before torch allocated anything: context and modules."""
    reserved: int = 0
    """By torch when ``used`` was read."""

    @property
    def libraries(self) -> int:
        """cuBLAS, compiled modules and the like; a real job's NCCL comes on top."""
        return max(0, self.used - self.context - self.reserved)


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """Iterations that CUPTI alone watched, one after the other: what kernels take in the running job."""

    iteration_ms: tuple[float, ...] = ()
    """From begin to begin on the GPU."""
    busy_ms: float = 0.0
    """The GPU did something, answers of virtual peers included; mean."""
    beside_ms: float = 0.0
    """Kernels of other streams than the busiest."""
    overlap_ms: float = 0.0
    """More than one stream was busy."""
    gap_ms: float = 0.0
    """Between kernels that were queued."""
    host_ms: float = 0.0
    """To issue an iteration, without waiting for the GPU."""
    tail_ms: float = 0.0
    """On the GPU, from the end of the last kernel to the begin of the next iteration."""
    kernel_scale: float = 1.0
    """What kernel times were multiplied by to agree with the timed iterations; 1 where the host is the bound."""
    gap_scale: float = 1.0
    """The same for gaps, which CUPTI makes longer."""
    host_scale: float = 1.0
    """The same for host times: by whole iterations where the host is the bound, else by phases."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring."""

    schema: int = SCHEMA
    rank: int
    torch: str = ""
    iteration_ms: tuple[float, ...] = ()
    """Of the timed iterations, no profiler: from begin to begin on the GPU."""
    profiled_ms: tuple[float, ...] = ()
    """Of the iterations that were traced, first to last kernel."""
    busy_ms: float = 0.0
    """Of a traced iteration: the GPU did something, answers of virtual peers included."""
    between_ms: float = 0.0
    """On the GPU, from the end of an iteration to the begin of the next: what the script logs and loads meanwhile."""
    host_ms: float = 0.0
    """What the host needs to issue an iteration, corrected for the profiler."""
    host_profiled_ms: float = 0.0
    scale: float = 1.0
    """What traced durations were multiplied by to agree with the timed iterations; 1 where others were watched."""
    watched: Watched | None = None
    """None: none were, or CUPTI saw nothing in them; op times are then those of the traced iterations."""
    ops: tuple[MeasuredOp, ...] = ()
    gpu: GpuState = GpuState()
    memory: MeasuredMemory = MeasuredMemory()
