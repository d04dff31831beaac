"""NVML through a fake: what it tells, and what happens where it does not answer."""

from __future__ import annotations

import time
import types

from prism_plugins.gpu.sensors import GpuSensors, gpu_identity, hindered
from prism_plugins.program.measured import GpuState


class Nvml:
    nvmlMemory_v2 = 0x02000028
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, reasons: int = 0x4, fails: bool = False) -> None:
        self.reasons = reasons
        self.fails = fails
        self.asked = ""

    def nvmlInit(self) -> None:
        if self.fails:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked = uuid
        return "gpu"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{1 - handle}"

    def nvmlDeviceGetName(self, _):
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self):
        return "580"

    def nvmlDeviceGetEnforcedPowerLimit(self, _):
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, *_):
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetClockInfo(self, *_):
        return 1600

    def nvmlDeviceGetCurrentClocksEventReasons(self, _):
        return self.reasons

    def nvmlDeviceGetTemperature(self, *_):
        return 60

    def nvmlDeviceGetFieldValues(self, *_):
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetPowerUsage(self, _):
        return 690_000

    def nvmlDeviceGetMemoryInfo(self, _, version):
        assert version == self.nvmlMemory_v2, "the older structure counts what the driver keeps"
        return types.SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, _):
        return [
            types.SimpleNamespace(pid=1, usedGpuMemory=None),
            types.SimpleNamespace(pid=77, usedGpuMemory=3),
        ]


def seen(nvml: Nvml) -> GpuState:
    sensors = GpuSensors(nvml, uuid="abc")
    sensors.watch()
    time.sleep(0.15)
    return sensors.stop()


def test_state_is_the_median_of_the_samples() -> None:
    nvml = Nvml()
    state = seen(nvml)
    assert nvml.asked == "GPU-abc"
    assert (state.name, state.driver, state.power_w, state.cap_w, state.clock_mhz) == (
        "NVIDIA H200",
        "580",
        690.0,
        700.0,
        1600.0,
    )
    assert state.max_clock_mhz == 0.0, "what the GPU does not support is left out"
    assert state.samples >= 1
    assert state.throttled == {"power cap": 1.0}
    assert hindered(state) == "", "a job's own power cap is no fault"


def test_heat_is_a_fault() -> None:
    assert "thermal limit (hardware) (100% of the time)" in hindered(seen(Nvml(reasons=0x44)))


def test_without_nvml_nothing_is_read_and_the_reason_is_known() -> None:
    sensors = GpuSensors(Nvml(fails=True))
    assert not sensors.available
    assert "Driver Not Loaded" in sensors.why_not
    sensors.watch()
    assert sensors.stop() == GpuState()
    assert sensors.others() == []
    assert sensors.own_bytes() == 0
    assert sensors.used_bytes() == 0


def test_neighbours_are_told_apart_from_us() -> None:
    assert GpuSensors(Nvml(), uuid="abc").others(own=77) == [(1, 0)]
    assert GpuSensors(Nvml(), uuid="abc").own_bytes(own=77) == 3
    assert GpuSensors(Nvml(), uuid="abc").own_bytes(own=78) == 0
    assert GpuSensors(Nvml(), uuid="abc").used_bytes() == 5 << 30


def test_gpus_are_recognised_by_their_ids() -> None:
    assert gpu_identity(Nvml()) == "driver 580: NVIDIA H200 GPU-0, NVIDIA H200 GPU-1"
    assert gpu_identity(Nvml(fails=True)) == ""
