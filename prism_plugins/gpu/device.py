"""Prepare a slice's process for the real GPU it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prism_plugins.errors import PrismError
from prism_plugins.gpu.sensors import GpuSensors
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import SliceSpec

if TYPE_CHECKING:
    from prism_plugins.integration import SliceContext

GIB = 2**30
USUAL_CONTEXT = 640 << 20
"""What a CUDA context takes at most where other processes hide it: 526 MiB on an H200 (driver 580)."""


def check_gpu() -> None:
    """Raise :class:`PrismError` where torch sees no GPU."""
    if torch.version.cuda is None:
        raise PrismError(
            f"--prism-device cuda needs a CUDA build of torch, but torch {torch.__version__} is a CPU build; use "
            "--prism-device virtual, or install a CUDA build"
        )
    if not torch.cuda.is_available():
        raise PrismError(
            "--prism-device cuda: torch sees no GPU (is the driver there, and CUDA_VISIBLE_DEVICES right?); "
            "use --prism-device virtual"
        )


def prepare_gpu(spec: SliceSpec) -> tuple[GpuSensors, int]:
    """Create the CUDA context and apply the memory cap. Returns the GPU's sensors and what the context takes, bytes.

    Raises:
        PrismError: no GPU, or a cap that leaves nothing.
    """
    check_gpu()
    torch.cuda.init()
    sensors = GpuSensors(uuid=_uuid())
    torch.empty(0, device="cuda")
    free, total = torch.cuda.mem_get_info()
    others = bool(sensors.others())
    context_bytes = 0 if others else total - free
    if spec.gpu_memory_bytes:
        # A process whose own context is just being made is counted, and not yet told.
        own = sensors.own_bytes() or (USUAL_CONTEXT if others else total - free)
        taken = min(total - free, own)
        limit = spec.gpu_memory_bytes - taken
        if limit <= 0:
            raise PrismError(
                f"--prism-gpu-memory {spec.gpu_memory_bytes / GIB:.1f} GiB: the CUDA context alone takes "
                f"{taken / GIB:.1f} GiB"
            )
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    return sensors, context_bytes


def neighbours(sensors: GpuSensors) -> list[Finding]:
    """A warning where other processes use the GPU: neither times nor memory in use are then the slice's own."""
    others = sensors.others()
    if not others:
        return []
    named = ", ".join(f"pid {pid} ({nbytes / GIB:.1f} GiB)" for pid, nbytes in others[:4])
    return [
        Finding(
            kind="shared_gpu",
            severity="warning",
            ranks="",
            phase="",
            message=f"other processes use the GPU that was measured on: {named}; times are too long, memory in use is not told",
        )
    ]


def out_of_memory(error: BaseException, spec: SliceSpec, context: SliceContext | None) -> str:
    """One line for an allocation that failed: where, how much was live and what for."""
    stats = torch.cuda.memory_stats()
    allocated = stats.get("allocated_bytes.all.current", 0) / GIB
    reserved = stats.get("reserved_bytes.all.current", 0) / GIB
    cap = (
        f"the cap of {spec.gpu_memory_bytes / GIB:.1f} GiB (--prism-gpu-memory)"
        if spec.gpu_memory_bytes
        else "the GPU"
    )
    live: dict[str, int] = {}
    recorder = getattr(context, "recorder", None)
    if recorder is not None:
        for _, nbytes, category in recorder.live_blocks():
            live[category] = live.get(category, 0) + nbytes
    held = ", ".join(
        f"{name} {size / GIB:.1f}"
        for name, size in sorted(live.items(), key=lambda i: -i[1])
        if size > GIB // 20
    )
    where = getattr(context, "phase_text", "") or "while the slice was prepared"
    wanted = str(error).split(". ")[0].removeprefix("CUDA out of memory")
    return (
        f"rank {spec.rank} does not fit {cap}: {where}: out of memory{wanted}; {allocated:.1f} GiB allocated, "
        f"{reserved:.1f} GiB reserved by torch" + (f"; live GiB: {held}" if held else "")
    )


def _uuid() -> str:
    return str(getattr(torch.cuda.get_device_properties(0), "uuid", "") or "")
