"""The cost model of a described cluster: by calibration, or by formulas alone."""

from __future__ import annotations

from typing import Literal

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration, HostCosts, read_calibration
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.measured import build_measured, shipped_calibration
from prism_plugins.costs.modelled import ModelledCosts
from prism_plugins.costs.nccl.settings import NcclSettings

NO_CALIBRATION: Literal["none"] = "none"
"""What a user says instead of a file for formulas alone."""


def build_cost_model(
    cluster: Cluster,
    *,
    nccl: NcclSettings | None = None,
    calibration: Calibration | Literal["none"] | None = None,
) -> CostModel:
    """The cost model for a described cluster and the NCCL variables of a launch.

    ``calibration``: one that the user gave, ``none`` for formulas alone; by default the shipped one.
    """
    if calibration == NO_CALIBRATION:
        return ModelledCosts(cluster, nccl=nccl)
    return build_measured(cluster, calibration, nccl=nccl)


def host_of(calibration: Calibration | Literal["none"] | None) -> HostCosts | None:
    """The host a calibration was measured on; the shipped one's where the user gave none that tells."""
    if calibration == NO_CALIBRATION:
        return None
    if calibration is not None and calibration.host is not None and calibration.host.benchmark is not None:
        return calibration.host
    return shipped_calibration().host


def load_calibration(name: str) -> Calibration | Literal["none"] | None:
    """What ``--prism-calibration`` names: a file, ``none``, or nothing. Raises PrismError for a file that is none."""
    if name == NO_CALIBRATION:
        return NO_CALIBRATION
    return read_calibration(name) if name else None
