"""Where the members of a group sit, and what the links between them carry.

Two levels: GPUs joined by NVLink or PCIe (a node, or the NVLink domain of several trays), and the network between
domains. Rank ``r`` sits in domain ``r // gpus_per_domain``. A group owns, on each domain, the NICs of its members
there: sibling groups that communicate at the same time (the eight data-parallel groups of a node with TP8)
share the rails fairly, members of one group pool theirs.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.nccl import tables

NIC_EFFICIENCY = 0.965
"""Of line rate. NDR 400: 46-48 of 50 GB/s (NVIDIA/nccl-tests#290); SimAI's table levels off at 0.96."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of a group sit."""

    size: int
    num_nodes: int
    """Nodes (NVLink domains) with members."""
    per_node: int
    """Members on the node that holds fewest of them: the one whose NICs limit a ring."""


class Links:
    """Rates (GB/s, per GPU and direction) and latencies (us) of a cluster as NCCL sees them."""

    def __init__(self, cluster: Cluster) -> None:
        node = cluster.node
        self.generation = tables.generation(cluster.gpu.capability)
        self.intra = node.gpu_link
        """``nvlink`` or ``pcie``."""
        efficiency = (
            tables.NVLINK_EFFICIENCY[self.generation] if self.intra == "nvlink" else tables.PCIE_EFFICIENCY
        )
        self.raw_gpu = node.nvlink_bytes_per_s / 1e9
        self.gpu = self.raw_gpu * efficiency
        self.nic = node.nic_bytes_per_s * node.num_nics / node.num_gpus / 1e9 * NIC_EFFICIENCY
        self.nic /= cluster.fabric.oversubscription
        """One GPU's share of its node's NICs."""
        self.nics_per_gpu = node.num_nics / node.num_gpus
        self.hop_scale = node.nvlink_latency_us / tables.NVLINK_LL_HOP_US if self.intra == "nvlink" else 1.0
        self.extra_hop = max(0.0, node.nic_latency_us - tables.NET_LL_HOP_US)
        """What a hop of this network takes beyond NCCL's table."""
        self.nvls = node.nvls and self.intra == "nvlink"
        self.ll128_across = cluster.fabric.ll128
        self.gpus_per_domain = cluster.gpus_per_domain

    def place(self, ranks: tuple[int, ...]) -> Placement:
        """Placement of a group."""
        per_node = Counter(r // self.gpus_per_domain for r in ranks)
        return Placement(size=len(ranks), num_nodes=len(per_node), per_node=min(per_node.values()))

    def hop(self, algorithm: str, protocol: str) -> float:
        """Latency of a step inside a node, us."""
        latency = tables.HOP_LATENCY_US[self.intra].get(algorithm, {}).get(protocol, 0.0)
        return latency * self.hop_scale

    def net_hop(self, algorithm: str, protocol: str) -> float:
        """Latency of a step between nodes, us. Simple pays the network's own latency twice (flush)."""
        return tables.HOP_LATENCY_US["net"][algorithm][protocol] + self.extra_hop * (
            2.0 if protocol == "Simple" else 1.0
        )
