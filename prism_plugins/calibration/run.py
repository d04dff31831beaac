"""One calibration: measure signature lists on a device and gather the file's contents."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence

import torch

from prism_plugins.calibration.host import measure_host
from prism_plugins.calibration.replay import Replay, figure_of
from prism_plugins.calibration.sensors import Sensors
from prism_plugins.calibration.signatures import SignatureList
from prism_plugins.costs.calibration import Calibration, Figure, PowerModel
from prism_plugins.costs.power import power_model
from prism_plugins.errors import PrismError


def calibrate(
    lists: Sequence[SignatureList],
    *,
    device: str = "cuda",
    host: bool = True,
    budget_s: float = 3600.0,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure the signatures, and the host.

    Raises PrismError when the device is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise PrismError(
            "no GPU: `prism calibrate` measures on a real one (torch.cuda.is_available() is False)"
        )
    with Sensors() as sensors:
        host_costs = measure_host(device) if host else None
        if host_costs is not None:
            say(f"host: {host_costs.op_us:.1f} us an op, {host_costs.view_us:.2f} us a view")
        if not sensors.available and device == "cuda":
            say("power is not measured: NVML is not available (pip install nvidia-ml-py)")
        replay = Replay(device, sensors=sensors, say=say, budget_s=budget_s)
        figures: list[Figure] = []
        for signatures in lists:
            figures += replay.measure(signatures)
        power = _power_model(replay, sensors, figures)
    clocks = [f.clock_mhz for f in figures if f.clock_mhz]
    return Calibration(
        gpu=torch.cuda.get_device_name(0) if device == "cuda" else platform.machine(),
        driver=sensors.driver,
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        clock_range_mhz=(min(clocks, default=0.0), max(clocks, default=0.0)),
        power=power,
        host=host_costs,
        figures=figures,
        not_measured=dict(replay.not_measured.most_common()),
    )


def _power_model(replay: Replay, sensors: Sensors, figures: list[Figure]) -> PowerModel | None:
    if not (replay.static_w and sensors.cap_w and any(f.power_w for f in figures)):
        return None
    return power_model(
        figures,
        cap_w=sensors.cap_w,
        static_w=replay.static_w,
        max_clock_mhz=sensors.max_clock_mhz,
        mixes={mix.name: [(figure_of(e), n) for e, n in mix.ops if e.hot and n] for mix in replay.mixes},
    )
