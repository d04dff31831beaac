"""What the host takes to issue work, and what copies over PCIe reach, measured on the machine at hand."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from prism_plugins.costs.calibration import HostCosts
from prism_plugins.costs.families import family_of
from prism_plugins.host_benchmark import (
    AFTER_ITERATION_S,
    DispatchBenchmark,
    enqueue_calls,
    measure_enqueue_us,
)
from prism_plugins.program.slices import BENCHMARK_VERSION, HostFigures

_CALLS = 2000
_STEPS = 12
_COPY_BYTES = 256 << 20
_ITERATIONS = 8
_ITERATION_S = 0.5
"""Long enough that an iteration leaves the caches as that of a real job does."""


def measure_host(device: str) -> HostCosts:
    """Measure the issuing thread's time per op, view and c10d call, and the bandwidth of copies."""
    x = torch.randn(64, 64, device=device)
    dispatch = _per_call(lambda: torch.add(x, x), device)
    view = _per_call(lambda: x.view(4096), device)
    op = _training_step_us(device, view_us=view)
    cuda = device.startswith("cuda")
    collective = round(_collective_us(device), 3) if cuda else 0.0
    return HostCosts(
        op_us=round(op, 3),
        dispatch_us=round(dispatch, 3),
        view_us=round(view, 3),
        comm_us=collective,
        h2d_bytes_per_s=_copy_rate(device, "h2d") if cuda else 0.0,
        d2h_bytes_per_s=_copy_rate(device, "d2h") if cuda else 0.0,
        cpu=_cpu_name(),
        benchmark=_benchmark(device, collective),
    )


def _benchmark(device: str, collective_us: float) -> HostFigures:
    """What slices measure of their machine after each of their iterations and at their end, measured here in the same way."""
    training, dispatch = _Training(device), DispatchBenchmark()
    training.iterate()
    steps = []
    for _ in range(_ITERATIONS):
        training.iterate(seconds=_ITERATION_S)
        steps.append(dispatch.measure_us(budget_s=AFTER_ITERATION_S))
    enqueue = measure_enqueue_us(enqueue_calls(device)) if device.startswith("cuda") else {}
    if collective_us:
        enqueue["collective"] = collective_us
    return HostFigures(
        version=BENCHMARK_VERSION,
        dispatch_us=(round(statistics.median(steps), 1),),
        enqueue_us=enqueue,
        in_training=True,
    )


def _per_call(call: Callable[[], object], device: str, *, calls: int = _CALLS) -> float:
    """Median over ten batches of the issuing thread's time, microseconds a call."""
    times = []
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        for _ in range(calls // 10):
            call()
        times.append((time.perf_counter() - began) / (calls // 10))
    _wait(device)
    return statistics.median(times) * 1e6


class _Count(TorchDispatchMode):
    """Counts aten calls that launch work, and those that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if family_of(str(func.name())) == "free":
            self.views += 1
        else:
            self.launched += 1
        return func(*args, **(kwargs or {}))


class _Block(nn.Module):
    """A transformer block small enough that the GPU always waits for the host."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        b, s, w = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, s, w))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class _Training:
    """An eager training loop of small blocks with AdamW, whose every op is short.

    ``foreach``: of the optimizer; None for torch's own choice.
    """

    def __init__(self, device: str, *, blocks: int = 24, foreach: bool | None = None) -> None:
        self._model = nn.Sequential(*(_Block() for _ in range(blocks))).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=foreach)
        self._x = torch.randn(2, 16, 64, device=device)

    def iterate(self, *, seconds: float = 0.0) -> None:
        """One optimizer step, of at least one micro-batch and as many as begin within ``seconds``."""
        until = time.monotonic() + seconds
        self._optimizer.zero_grad()
        while True:
            self._model(self._x).square().mean().backward()
            if time.monotonic() >= until:
                break
        self._optimizer.step()


def _training_step_us(device: str, *, view_us: float) -> float:
    """Host time per launched op of an eager forward, backward and AdamW step."""
    training = _Training(device, blocks=4, foreach=False)
    for _ in range(3):
        training.iterate()
    _wait(device)
    with _Count() as counted:
        training.iterate()
    times = []
    for _ in range(_STEPS):
        _wait(device)
        began = time.perf_counter()
        training.iterate()
        times.append(time.perf_counter() - began)
    _wait(device)
    us = statistics.median(times) * 1e6
    return max(0.0, us - counted.views * view_us) / counted.launched


def _collective_us(device: str) -> float:
    """Host time of an asynchronous all_reduce on a group of one; 0 where NCCL cannot be used."""
    import torch.distributed as dist

    if dist.is_initialized() or not dist.is_nccl_available():
        return 0.0
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(1024, device=device)
        dist.all_reduce(x)
        return _per_call(lambda: dist.all_reduce(x, async_op=True), device, calls=500)
    except RuntimeError:
        return 0.0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _copy_rate(device: str, direction: str) -> float:
    """Bytes per second of a large pinned copy."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    source, target = (host, there) if direction == "h2d" else (there, host)
    times = []
    for _ in range(6):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(device)
        times.append(time.perf_counter() - began)
    return round(_COPY_BYTES / statistics.median(times[1:]), -6)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
