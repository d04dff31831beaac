"""Times blocks of launches: with CUDA events and a reading of the SM clock around each block, or on the CPU.

The SM clock of a block is exact: a one-thread-per-SM kernel before and after it notes ``clock64`` (SM cycles) and
``globaltimer`` (ns) of every SM; cycles over nanoseconds is the clock, whatever the power limiter did meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_STAMP = r"""
extern "C" __global__ void stamp(long long* out) {
  unsigned int sm;
  long long ns;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  if (sm < 192) { out[2 * sm] = clock64(); out[2 * sm + 1] = ns; }
}
"""
_MAX_SMS = 192
_MAX_BLOCKS = 1 << 15
"""Blocks whose stamps are kept until they are read."""


class Sample(NamedTuple):
    """One timed block."""

    us: float
    """Per repetition."""
    clock_mhz: float
    repetitions: int


class CpuTimer:
    """Times launches by the wall clock. For machines without a GPU, and tests."""

    uses_graphs = False

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []

    def block(self, launch: Callable[[], None], repetitions: int) -> int:
        """Run and time ``launch``, which stands for ``repetitions`` calls; returns a ticket for :meth:`read`."""
        began = time.perf_counter()
        launch()
        self._samples.append((time.perf_counter() - began, repetitions))
        return len(self._samples) - 1

    def full(self) -> bool:
        """Whether blocks must be read before more are timed."""
        return False

    def wait(self, ticket: int) -> None:
        """Wait for a block."""

    def read_all(self) -> list[Sample]:
        """Results of all blocks since the last call, in order."""
        self.drain()
        samples, self._samples = self._samples, []
        return [Sample(max(s * 1e6 / n, 1e-3), 0.0, n) for s, n in samples]

    def drain(self) -> None:
        """Wait for everything."""

    def hold(self) -> None:
        """Keep the device busy while the host enqueues."""


class CudaTimer:
    """Times blocks on the current stream, without waiting for them."""

    uses_graphs = True

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any, int]] = []
        self._num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._stamps = torch.zeros((_MAX_BLOCKS, 2, _MAX_SMS, 2), dtype=torch.int64, device="cuda")
        self._kernel: Any = None
        try:
            from torch.cuda import _compile_kernel

            self._kernel = _compile_kernel(_STAMP, "stamp")
            self._stamp(self._stamps[0, 0])
            torch.cuda.synchronize()
        except Exception:  # no NVRTC: clocks then stay unknown, and every figure says 0 MHz
            self._kernel = None

    def block(self, launch: Callable[[], None], repetitions: int) -> int:
        """Enqueue a block that stands for ``repetitions`` calls; returns its ticket."""
        ticket = len(self._events)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stamp(self._stamps[ticket, 0])
        begin.record()
        launch()
        end.record()
        self._stamp(self._stamps[ticket, 1])
        self._events.append((begin, end, repetitions))
        return ticket

    def full(self) -> bool:
        """Whether blocks must be read before more are timed."""
        return len(self._events) >= _MAX_BLOCKS

    def wait(self, ticket: int) -> None:
        """Wait for a block."""
        self._events[ticket][1].synchronize()

    def read_all(self) -> list[Sample]:
        """Results of all blocks since the last call, in order."""
        self.drain()
        events, self._events = self._events, []
        stamps = self._stamps[: len(events)].cpu().numpy()
        cycles = (stamps[:, 1, :, 0] - stamps[:, 0, :, 0]).astype(float)
        ns = (stamps[:, 1, :, 1] - stamps[:, 0, :, 1]).astype(float)
        seen = (stamps[..., 1] > 0).all(axis=1) & (ns > 0) & (cycles > 0)
        self._stamps[: len(events)].zero_()
        samples = []
        for i, (begin, end, repetitions) in enumerate(events):
            clock = float(np.median(cycles[i][seen[i]] / ns[i][seen[i]])) * 1e3 if seen[i].any() else 0.0
            samples.append(Sample(begin.elapsed_time(end) * 1e3 / repetitions, clock, repetitions))
        return samples

    def drain(self) -> None:
        """Wait for everything."""
        torch.cuda.synchronize()

    def hold(self) -> None:
        """Keep the device busy for about 150 us, so that the host can enqueue a whole block."""
        torch.cuda._sleep(250_000)

    def _stamp(self, where: torch.Tensor) -> None:
        if self._kernel is not None:
            self._kernel(grid=(self._num_sms, 1, 1), block=(1, 1, 1), args=[where])
