"""Keeps time on the GPU, in stream order: a kernel that occupies its stream as a collective with virtual peers would.

It notes when the call was reached, waits until the last virtual peer has come, then holds as many thread blocks as NCCL
has channels and moves as much HBM traffic as the collective causes, evenly over its predicted duration. Time is
``%globaltimer``, in steps of up to a microsecond. Its memory is static in the module: torch's allocator sees none of it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

from prism_plugins.errors import PrismError

_SLOTS = 4096
_SCRATCH_MIB = 128
"""Twice the L2 cache of current GPUs: traffic reaches HBM."""
_SOURCE = f"""
#define SCRATCH ({_SCRATCH_MIB}LL << 16)
__device__ long long begin;
__device__ long long reached[{_SLOTS}];
__device__ uint4 scratch[SCRATCH];

__device__ __forceinline__ long long now() {{
  long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}}

extern "C" __global__ void __launch_bounds__(512)
virtual_peer(int what, int slot, int duration, int peers_high, int peers_low, int kib) {{
  if (what < 2) {{
    if (threadIdx.x == 0 && blockIdx.x == 0) {{
      if (what == 0) begin = now(); else reached[slot] = now();
    }}
    return;
  }}
  __shared__ long long start;
  if (threadIdx.x == 0) {{
    long long first = reached[slot];
    if (peers_high >= 0) {{
      long long peers = begin + ((long long)peers_high << 30) + peers_low;
      if (peers > first) first = peers;
    }}
    while (now() < first) __nanosleep(200);
    start = first;
  }}
  __syncthreads();
  const long long end = start + duration;
  if (kib == 0) {{
    if (threadIdx.x == 0) while (now() < end) __nanosleep(200);
    return;
  }}
  // kib: read and written by this block over the duration; a step of the block copies 8 KiB, which is 16 of traffic.
  __shared__ long long elapsed;
  const long long half = SCRATCH / 2;
  long long cursor = ((long long)blockIdx.x * (half / gridDim.x)) / 512 * 512;
  long long moved = 0;
  while (true) {{
    if (threadIdx.x == 0) elapsed = now() - start;
    __syncthreads();
    const long long passed = elapsed;
    __syncthreads();
    if (passed >= duration) return;
    if (moved * duration <= passed * (long long)kib) {{
      const long long at = (cursor + threadIdx.x) % half;
      scratch[half + at] = scratch[at];
      cursor += blockDim.x;
      moved += 16;
    }}
  }}
}}
"""
_BEGIN, _REACHED, _TAKE_PART = 0, 1, 2
_THREADS = 512


class DeviceTimer(Protocol):
    """Marks and waits on a stream."""

    name: str

    def begin(self, stream: Any) -> None:
        """The iteration begins: predicted times count from here."""
        ...

    def reached(self, slot: int, stream: Any) -> None:
        """A call was reached."""
        ...

    def take_part(
        self, slot: int, stream: Any, *, duration_ns: float, peers_ns: float, channels: int, hbm_bytes: float
    ) -> None:
        """Occupy the stream until the call, which was reached at ``slot``, has ended."""
        ...


def make_timer() -> DeviceTimer:
    """The best timer this GPU and torch offer."""
    try:
        return GlobalTimer()
    except (ImportError, AttributeError, OSError, RuntimeError):  # no NVRTC, or another torch
        return SleepTimer()


class GlobalTimer:
    """See the module docstring. Raises where the kernel cannot be compiled."""

    name = "globaltimer"

    def __init__(self) -> None:
        from torch.cuda import _compile_kernel

        self._kernel = _compile_kernel(_SOURCE, "virtual_peer")
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        self._values = (ctypes.c_int * 6)()
        size = ctypes.sizeof(ctypes.c_int)
        base = ctypes.addressof(self._values)
        self._arguments = (ctypes.c_void_p * 6)(*[base + size * i for i in range(6)])
        self.begin(torch.cuda.current_stream())
        torch.cuda.synchronize()

    def begin(self, stream: Any) -> None:
        """The iteration begins."""
        self._run(stream, 1, 32, _BEGIN, 0, 0, 0, 0, 0)

    def reached(self, slot: int, stream: Any) -> None:
        """A call was reached."""
        self._run(stream, 1, 32, _REACHED, slot % _SLOTS, 0, 0, 0, 0)

    def take_part(
        self, slot: int, stream: Any, *, duration_ns: float, peers_ns: float, channels: int, hbm_bytes: float
    ) -> None:
        """Occupy the stream."""
        duration = min(int(duration_ns), 2**31 - 1)
        peers = int(peers_ns)
        high, low = (peers >> 30, peers & (1 << 30) - 1) if peers >= 0 else (-1, 0)
        blocks = max(1, channels)
        kib = min(int(hbm_bytes / blocks / 1024), 2**31 - 1) if channels else 0
        threads = _THREADS if kib else 32
        self._run(stream, blocks, threads, _TAKE_PART, slot % _SLOTS, duration, high, low, kib)

    def _run(self, stream: Any, blocks: int, threads: int, *values: int) -> None:
        self._values[:] = values
        failed = self._launch(
            self._kernel.func, blocks, 1, 1, threads, 1, 1, 0, stream.cuda_stream, self._arguments, None
        )
        if failed:
            raise PrismError(f"the kernel of virtual peers does not start (CUDA error {failed})")


class SleepTimer:
    """Occupies the stream for the predicted duration only: peers are never late, and nothing is moved."""

    name = "sleep"

    def __init__(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        end.synchronize()
        self._cycles_per_ns = 10_000_000 / max(1.0, begin.elapsed_time(end) * 1e6)

    def begin(self, stream: Any) -> None:
        """Nothing to note."""

    def reached(self, slot: int, stream: Any) -> None:
        """Nothing to note."""

    def take_part(
        self, slot: int, stream: Any, *, duration_ns: float, peers_ns: float, channels: int, hbm_bytes: float
    ) -> None:
        """Occupy the stream."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(max(1, int(duration_ns * self._cycles_per_ns)))
