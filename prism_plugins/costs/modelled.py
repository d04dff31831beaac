"""The modelled costs: roofline for compute, NCCL's behaviour for communication, with a cache by signature."""

from __future__ import annotations

from collections.abc import Sequence

from prism_plugins.costs.base import Interference, Price, SteadyClock
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.collectives import CollectiveModel
from prism_plugins.costs.nccl.measured import CollectivePoint
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.costs.roofline import Roofline
from prism_plugins.program.model import CommSignature, OpSignature

HOST_ASSUMPTION = "the host takes"
"""How the assumption about the host's speed begins."""
HBM_SHARED = 0.92
"""Of the data-sheet bandwidth: what the fastest streaming kernels reach on an H200 (costs/efficiency.py)."""


class ModelledCosts(SteadyClock):
    """Prices from formulas alone; a measured model wraps this one and overrides what it has measured."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        nccl: NcclSettings | None = None,
        collectives: Sequence[CollectivePoint] = (),
    ) -> None:
        self.cluster = cluster
        self.name = f"roofline + NCCL model on {cluster.name}"
        self.interference = Interference(
            num_sms=cluster.gpu.num_sms, hbm_bytes_per_s=HBM_SHARED * cluster.gpu.hbm_bytes_per_s
        )
        self._roofline = Roofline(cluster)
        self._collectives = CollectiveModel(cluster, nccl, collectives)
        self._op_prices: dict[tuple, Price] = {}
        self._comm_prices: dict[tuple, Price] = {}

    def price_op(self, signature: OpSignature) -> Price:
        """Price a device op; unknown ops are estimated by their bytes and marked ``unpriced``."""
        s = signature
        key = (s.op, s.inputs, s.outputs, s.scalars, tuple(s.attrs.items()))
        price = self._op_prices.get(key)
        if price is None:
            price = self._op_prices[key] = self._roofline.price(s)
        return price

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price a collective or p2p call from the arrival of the last member."""
        place = self._collectives.placement(ranks)
        key = (
            comm.kind,
            comm.dtype,
            comm.in_numel,
            comm.out_numel,
            comm.send_splits,
            comm.recv_splits,
            (ranks, rank) if comm.send_splits or comm.recv_splits else place,
        )
        price = self._comm_prices.get(key)
        if price is None:
            price = self._comm_prices[key] = self._collectives.price(comm, ranks, rank)
        return price

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes."""
        c = self.cluster
        return (
            f"compute is priced by a roofline on {c.gpu.name} with efficiencies fitted on one H200 training iteration; "
            "no measurement of this job was made",
            *self._collectives.assumptions(),
            f"{HOST_ASSUMPTION} {c.host.op_us:g} us per launched op, {c.host.view_us:g} us per view, "
            f"{c.host.comm_us:g} us per collective, {c.host.source or 'whatever the framework'}",
            "float32 GEMMs run without TF32; GPUs are equal",
        )
