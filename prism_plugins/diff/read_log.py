"""Reads training logs of Megatron-LM and DeepSpeed: iteration times, timers, memory."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from prism_plugins.diff.real import RealRun
from prism_plugins.errors import FileFormatError
from prism_plugins.files import read_regular

WARM_UP = 3
"""Iterations left out where there are more than twice as many: allocation, compilation, NCCL's start."""
_MAX_BYTES = 256 << 20

MEGATRON_TIME = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)")
MEGATRON_TIMER = re.compile(r"^\s*([\w.-]+) \.{2,}:\s*(?:\(([\d.]+), ([\d.]+)\)|([\d.]+))\s*$")
MEGATRON_MEMORY = re.compile(
    r"\[Rank (\d+)\].*memory \(MB\) \| allocated: [\d.]+ \| max allocated: ([\d.]+) \| reserved: [\d.]+ \| max reserved: ([\d.]+)"
)
DEEPSPEED_TIMERS = re.compile(r"\btime \(ms\) \|(.*)")
DEEPSPEED_TIMER = re.compile(r"([\w./-]+): (\d+\.\d+)")
DEEPSPEED_RATE = re.compile(r"CurrSamplesPerSec=([\d.]+), MemAllocated=[\d.]+GB, MaxMemAllocated=([\d.]+)GB")
DEEPSPEED_ITER = re.compile(r"^.*steps: \d+ loss: .*iter time \(s\): ([\d.]+)")


def read_log(path: Path) -> RealRun:
    """Read a log.

    Raises :class:`FileFormatError` when no line of it tells a time.
    """
    data = read_regular(path, max_bytes=_MAX_BYTES)
    times: list[float] = []
    rates: list[float] = []
    timers: dict[str, list[float]] = {}
    allocated: dict[int, int] = {}
    reserved: dict[int, int] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        if match := MEGATRON_TIME.search(line):
            times.append(float(match[1]))
        elif match := MEGATRON_MEMORY.search(line):
            rank = int(match[1])
            allocated[rank] = max(allocated.get(rank, 0), round(float(match[2]) * 2**20))
            reserved[rank] = max(reserved.get(rank, 0), round(float(match[3]) * 2**20))
        elif match := DEEPSPEED_RATE.search(line):
            rates.append(float(match[1]))
            allocated[0] = max(allocated.get(0, 0), round(float(match[2]) * 2**30))
        elif match := DEEPSPEED_ITER.search(line):
            times.append(1e3 * float(match[1]))
        elif match := DEEPSPEED_TIMERS.search(line):
            for name, value in DEEPSPEED_TIMER.findall(match[1]):
                timers.setdefault(name, []).append(float(value))
        elif match := MEGATRON_TIMER.match(line):
            timers.setdefault(match[1], []).append(float(match[3] or match[4]))
    if not (times or rates or timers):
        raise FileFormatError(
            f"{path} is neither a Kineto trace, nor a log of Megatron-LM or DeepSpeed that tells times, nor a flight "
            "recorder's dump (Hugging Face's Trainer logs no iteration's time: record some with torch.profiler, or let DeepSpeed "
            'log them with "steps_per_print": 1)'
        )
    return RealRun(
        source=f"log {path}",
        iteration_ms=_steady(times),
        iterations=max(len(times), len(rates)),
        timers_ms={name: _steady(values) for name, values in timers.items()},
        samples_per_s=_steady(rates),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
    )


def _steady(values: list[float]) -> float:
    return statistics.median(values[WARM_UP:] if len(values) > 2 * WARM_UP else values) if values else 0.0
