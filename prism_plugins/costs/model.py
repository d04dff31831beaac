"""The cost model of a described cluster: by calibration, or by formulas alone."""

from __future__ import annotations

from typing import Literal

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration, HostCosts, read_calibration
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.measured import build_measured, shipped_calibration
from prism_plugins.costs.modelled import ModelledCosts
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.program.slices import BENCHMARK_VERSION, HostFigures

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


def host_of(calibration: Calibration | Literal["none"] | None, cluster: Cluster) -> HostCosts | None:
    """The host a calibration was measured on; where the user gave none that tells, that of the cluster's description, else that
    of the shipped calibration."""
    told = None if calibration == NO_CALIBRATION or calibration is None else calibration.host
    if told is not None and told.benchmark is not None:
        return told
    if (host := cluster.host).dispatch_us:
        figures = HostFigures(
            version=BENCHMARK_VERSION,
            dispatch_us=(host.dispatch_us,),
            enqueue_us=host.enqueue_us,
            in_training=True,
        )
        return HostCosts(
            op_us=host.op_us,
            dispatch_us=0.0,
            view_us=host.view_us,
            cpu=f"the host of {cluster.name}",
            benchmark=figures,
        )
    return None if calibration == NO_CALIBRATION else shipped_calibration().host


def load_calibration(name: str) -> Calibration | Literal["none"] | None:
    """What ``--prism-calibration`` names: a file, ``none``, or nothing. Raises PrismError for a file that is none."""
    if name == NO_CALIBRATION:
        return NO_CALIBRATION
    return read_calibration(name) if name else None
