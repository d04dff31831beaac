"""Power and driver facts from NVML. Without ``nvidia-ml-py`` there are none, and the calibration says so."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

_INSTANT_POWER_FIELD = 186
"""NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage averages over a second on Hopper."""
_PERIOD_S = 0.01


class Sensors:
    """Samples board power in a thread. A context manager."""

    def __init__(self, index: int = 0) -> None:
        self.samples: list[tuple[float, float]] = []
        """(time.perf_counter, watts)."""
        self.driver = ""
        self.cap_w = 0.0
        self.max_clock_mhz = 0.0
        self._nvml: Any = None
        self._handle: Any = None
        self._stop = threading.Event()
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._nvml = pynvml
            self.driver = _text(pynvml.nvmlSystemGetDriverVersion())
            self.cap_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3
            self.max_clock_mhz = float(pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        except Exception:  # no driver, no package, or a call this GPU has not: figures then lack power
            self._nvml = None

    @property
    def available(self) -> bool:
        """Whether power can be read."""
        return self._nvml is not None

    def __enter__(self) -> Sensors:
        if self.available:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.available:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def power_w(self, begin: float, end: float) -> float:
        """Median power between two readings of time.perf_counter, 0 when nothing was sampled."""
        values = [watts for at, watts in list(self.samples) if begin <= at <= end]
        return statistics.median(values) if values else 0.0

    def _sample(self) -> None:
        while not self._stop.is_set():
            watts = self._read()
            if watts:
                self.samples.append((time.perf_counter(), watts))
            time.sleep(_PERIOD_S)

    def _read(self) -> float:
        try:
            value = self._nvml.nvmlDeviceGetFieldValues(self._handle, [_INSTANT_POWER_FIELD])[0]
            if value.nvmlReturn == 0 and value.value.uiVal:
                return value.value.uiVal / 1e3
            return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except Exception:  # a reading that fails is left out
            return 0.0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
