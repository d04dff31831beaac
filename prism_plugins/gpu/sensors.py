"""Clocks, power, throttling, memory and neighbours of a GPU, by NVML (``pip install nvidia-ml-py``).

Everything is optional: without NVML there are no readings, and whoever asked says so.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections import Counter
from typing import Any

from prism_plugins.program.measured import GpuState

_PERIOD_S = 0.4
"""Reading takes time of the host, which small jobs wait for: each of four calls into NVML
gives the interpreter's lock away and wants it back."""
_POWER_INSTANT = 186
"""NVML_FI_DEV_POWER_INSTANT; the plain reading averages over a second on Hopper."""
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons."""
EXPECTED = ("power cap",)
"""Not a fault: large GPUs are held at their power cap by any dense job, the target's too."""


class GpuSensors:
    """Samples one GPU in a thread while :meth:`watch` is on. Never raises where NVML does not answer."""

    def __init__(self, nvml: Any = None, *, uuid: str = "", index: int = 0) -> None:
        """``nvml``: the module; imported if not given. ``uuid``: as CUDA tells it (without ``GPU-``); wins over the
        index, which CUDA_VISIBLE_DEVICES changes."""
        self.why_not = ""
        self._nvml: Any = None
        self._handle: Any = None
        self._rows: list[tuple[float, float, int, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            if nvml is None:
                import pynvml as nvml
            nvml.nvmlInit()
            self._handle = (
                nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                if uuid
                else nvml.nvmlDeviceGetHandleByIndex(index)
            )
            self._nvml = nvml
        except ImportError:
            self.why_not = "NVML is not available (pip install nvidia-ml-py)"
        except Exception as error:  # no driver, no such GPU, no permission: NVML's own words
            self.why_not = f"NVML does not answer ({error})"

    @property
    def available(self) -> bool:
        """Whether NVML answers for this GPU."""
        return self._nvml is not None

    def watch(self) -> None:
        """Begin to sample."""
        if self.available and self._thread is None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def stop(self) -> GpuState:
        """End sampling; what was seen."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self.available:
            return GpuState()
        rows = self._rows
        reasons = Counter(name for row in rows for bit, name in _REASONS.items() if row[2] & bit)
        nvml, handle = self._nvml, self._handle
        return GpuState(
            name=_text(self._ask(nvml.nvmlDeviceGetName, handle, default="")),
            driver=_text(self._ask(nvml.nvmlSystemGetDriverVersion, default="")),
            power_w=_median([r[0] for r in rows]),
            cap_w=self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle, default=0) / 1e3,
            clock_mhz=_median([r[1] for r in rows]),
            max_clock_mhz=float(
                self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM, default=0)
            ),
            temperature_c=_median([r[3] for r in rows]),
            throttled={name: count / len(rows) for name, count in reasons.items()},
            samples=len(rows),
        )

    def used_bytes(self) -> int:
        """Memory in use on the GPU, everybody's; 0 when unknown. What the driver keeps for itself is no part of it, as in
        ``nvidia-smi`` and ``torch.cuda.mem_get_info``; NVML's older structure counts it (615 MiB on an H200)."""
        if not self.available:
            return 0
        nvml = self._nvml
        return int(
            self._ask(
                lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2).used, default=0
            )
        )

    def others(self, own: int | None = None) -> list[tuple[int, int]]:
        """(pid, bytes) of other processes that compute on the GPU; in a container their ids may be of the host."""
        own = os.getpid() if own is None else own
        return [(pid, nbytes) for pid, nbytes in self._processes() if pid != own]

    def own_bytes(self, own: int | None = None) -> int:
        """Memory of this process on the GPU; 0 where NVML does not tell."""
        return dict(self._processes()).get(os.getpid() if own is None else own, 0)

    def _processes(self) -> list[tuple[int, int]]:
        if not self.available:
            return []
        processes = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle, default=[])
        return [(p.pid, int(p.usedGpuMemory or 0)) for p in processes]

    def _sample(self) -> None:
        nvml, handle = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        while not self._stop.is_set():
            with contextlib.suppress(Exception):  # a reading that fails is left out
                self._rows.append(
                    (
                        self._power(),
                        float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                        int(reasons(handle)) if reasons else 0,
                        float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                    )
                )
            self._stop.wait(_PERIOD_S)

    def _power(self) -> float:
        with contextlib.suppress(Exception):  # an older GPU has no such field
            field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [_POWER_INSTANT])[0]
            if field.nvmlReturn == 0 and field.value.uiVal:
                return field.value.uiVal / 1e3
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3

    @staticmethod
    def _ask(function: Any, *arguments: Any, default: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:  # not supported on this GPU
            return default


def gpu_identity(nvml: Any = None) -> str:
    """Names and ids of this machine's GPUs and their driver; empty without NVML. Makes no CUDA context. ``nvml``: the module;
    imported if not given."""
    try:
        if nvml is None:
            import pynvml as nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = sorted(
            f"{_text(nvml.nvmlDeviceGetName(handle))} {_text(nvml.nvmlDeviceGetUUID(handle))}"
            for handle in handles
        )
        return f"driver {_text(nvml.nvmlSystemGetDriverVersion())}: {', '.join(gpus)}" if gpus else ""
    except Exception:  # no NVML, no driver, no permission
        return ""


def hindered(state: GpuState) -> str:
    """What held the clocks down beyond what a job like this one does everywhere; empty when nothing did."""
    worst = [
        f"{name} ({share:.0%} of the time)"
        for name, share in sorted(state.throttled.items(), key=lambda item: -item[1])
        if name not in EXPECTED and share > 0.02
    ]
    return ", ".join(worst)


def _median(values: list[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
