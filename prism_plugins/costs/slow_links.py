"""A cluster in which single NICs are slower than the others: whatever crosses the network through one of them waits for it."""

from __future__ import annotations

from typing import Any

import msgspec

from prism_plugins.costs.base import CostModel, Price
from prism_plugins.costs.cluster import Cluster
from prism_plugins.program.model import CommSignature


class SlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """One NIC of one node."""

    node: int
    nic: int
    factor: float
    """Share of its rate that is left, 0 to 1."""

    def ranks(self, cluster: Cluster) -> range:
        """Ranks whose GPUs use the NIC: GPUs of a node share its NICs evenly, in order."""
        per_nic = max(1, cluster.gpus_per_node // max(cluster.node.num_nics, 1))
        first = self.node * cluster.gpus_per_node + self.nic * per_nic
        return range(first, first + per_nic)


class CostsWithSlowLinks:
    """Another cost model, but calls between nodes that have a member behind a slow NIC are priced as if all NICs were
    that slow: NCCL gives each channel an equal share, and the last channel decides."""

    def __init__(self, base: CostModel, slow: dict[int, CostModel], cluster: Cluster) -> None:
        """``slow``: rank → the model of a cluster whose NICs all have that rank's rate."""
        self._base = base
        self._slow = slow
        self._domain = cluster.gpus_per_domain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def settle(self, job: Any) -> None:
        """Settle all models."""
        self._base.settle(job)
        for model in {id(m): m for m in self._slow.values()}.values():
            model.settle(job)

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """The longest price among the members' NICs."""
        price = self._base.price_comm(comm, ranks, rank)
        crosses = (
            ranks[0] // self._domain != ranks[-1] // self._domain
            or len({r // self._domain for r in ranks}) > 1
        )
        if crosses:
            for r, model in self._slow.items():
                if r in ranks:
                    price = max(price, model.price_comm(comm, ranks, rank), key=lambda p: p.duration_ns)
        return price
