"""Prices collectives and p2p: NCCL's own way of thinking, with measured bandwidths.

A call takes ``latency + bytes / bandwidth``, and NCCL picks the fastest of its algorithms (ring, tree, NVLS) and
protocols (LL, LL128, Simple). Latencies follow NCCL's tuning table (src/graph/tuning.cc); bandwidths are the data
sheet's times fractions measured by nccl-tests and by our own runs (``tests/costs/data``;
``python tests/costs/test_collectives.py`` prints the error of every point). Message sizes and bus bandwidths follow the nccl-tests convention
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).

Topology is two levels: NVLink inside a node, rails between nodes. Rank ``r`` sits on node ``r // gpus_per_node``. A group
owns, on each node, the NICs of its members there (``num_nics / num_gpus`` each), so that sibling groups which
communicate at the same time (the eight data-parallel groups of a tp8 node) share the rails fairly; members of one
group on a node pool theirs.

Limits: no congestion between different kinds of traffic, no rail crossing, no in-network reduction across nodes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import msgspec

from prism_plugins.costs.base import Price
from prism_plugins.costs.cluster import Cluster
from prism_plugins.program.model import DTYPE_BYTES, CommSignature


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of a group sit."""

    size: int
    num_nodes: int
    per_node: int
    """Members on the node that holds fewest of them: the one whose NICs limit a ring."""


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """An NCCL protocol. Latencies in units of the cluster's LL hop."""

    name: str
    base_us: float
    nvlink_hops: float
    nic_hops: float
    efficiency: float
    """Of the Simple protocol's bandwidth."""
    intra_cap: float = math.inf
    """Bus bandwidth, of the NVLink rate, that the protocol cannot exceed inside a node."""
    inter_cap: float = math.inf
    """The same across nodes."""
    ramp_us: float = 0.0
    """Extra time until all channels stream."""


# NCCL src/graph/tuning.cc: baseLat {6.6, 14, 8.4}, hwLat NVLINK ring {0.6, 1.9, 3.4}, NET ring {2.7, 4.0, 14.0},
# llMaxBws Hopper {141, 45, 35} GB/s. The ramp makes LL128 win below about 256 MiB, as two H200s show.
PROTOCOLS = (
    Protocol(
        name="ll", base_us=6.6, nvlink_hops=1.0, nic_hops=1.0, efficiency=0.5, intra_cap=0.31, inter_cap=0.09
    ),
    Protocol(name="ll128", base_us=14.0, nvlink_hops=3.2, nic_hops=1.5, efficiency=0.92),
    Protocol(name="simple", base_us=8.4, nvlink_hops=5.7, nic_hops=5.2, efficiency=1.0, ramp_us=60.0),
)
TREE_NIC_HOP_FACTOR = 1.9
"""A tree's hop over the network against a ring's: {5.0, 8.5, 14} against {2.7, 4.0, 14}."""
TREE_EFFICIENCY = 0.85

RING_EFFICIENCY = {
    # kind: (limit for many members, loss per 1/n), of the NVLink data-sheet rate. two H200s (n = 2): 0.73, 0.59, 0.59;
    # H200 ring all_reduce, n = 4-8: 0.81; XLA's table, n = 8: all_gather 0.78, reduce_scatter 0.73.
    "all_reduce": (0.835, 0.21),
    "all_gather": (0.850, 0.52),
    "reduce_scatter": (0.800, 0.42),
    "broadcast": (0.835, 0.21),
    "reduce": (0.835, 0.21),
}
NVLS_ALGBW = 0.60
"""all_reduce bytes per second through the switch's reduction, of the NVLink rate: 259-272 of 450 GB/s for 5-8 H200s."""
NVLS_MIN_MEMBERS = 5
"""NCCL takes NVLS from five GPUs up on H100 and H200 nodes."""
NVLS_LATENCY_US = 25.0
P2P_EFFICIENCY = 0.82
P2P_LATENCY_US = 10.0
P2P_RAMP_US = 13.0
ALL_TO_ALL_EFFICIENCY = 0.75
"""2, 4, 8 GPUs: 0.73, 0.78, 0.75 of the NVLink rate."""
ALL_TO_ALL_RAMP_US = 70.0
ALL_TO_ALL_RAMP_BYTES = 100e6
NIC_EFFICIENCY = 0.92
"""NDR 400: 46-48 of 50 GB/s per NIC (NVIDIA/nccl-tests#290)."""
ALL_TO_ALL_NIC_EFFICIENCY = 0.78
RAMP_BYTES = 20e6


class CollectiveModel:
    """Prices communication on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        node = cluster.node
        self.nvlink = node.nvlink_bytes_per_s
        self.nic = node.nic_bytes_per_s * node.num_nics / node.num_gpus / cluster.fabric.oversubscription
        """Bytes per second of one GPU's share of the node's NICs."""
        self.placement = functools.lru_cache(maxsize=4096)(self._placement)

    def price(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price one call from the moment the last member arrived. For send/recv ``ranks`` is (sender, receiver)."""
        del rank  # every member of a collective is busy equally long
        place = self.placement(ranks)
        nbytes = float(comm.nbytes)
        kind = comm.kind
        if place.size <= 1:
            # NCCL's single-rank kernel copies only out of place; torch's reductions and broadcasts are in place.
            copied = (
                nbytes if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else 0.0
            )
            seconds, rule = self._local_copy(copied), "local"
        elif kind in ("send", "recv"):
            seconds, rule = self.p2p_seconds(nbytes, inter=place.num_nodes > 1), "p2p"
        elif kind == "all_to_all":
            seconds, rule = self._all_to_all(comm, nbytes, place), "all_to_all"
        elif kind in ("gather", "scatter"):
            seconds = self.p2p_seconds(nbytes * (place.size - 1) / place.size, inter=place.num_nodes > 1)
            rule = "fan"
        elif kind == "barrier":
            seconds, rule = self._best("all_reduce", 4.0, place)
        elif kind in RING_EFFICIENCY:
            seconds, rule = self._best(kind, nbytes, place)
        else:
            seconds, rule = self._best("all_reduce", nbytes, place)
            return Price(
                duration_ns=seconds * 1e9,
                rule=f"alpha-beta/unknown {kind}",
                provenance="unpriced",
                host_ns=self.cluster.host.comm_us * 1e3,
                bytes=nbytes,
            )
        return Price(
            duration_ns=seconds * 1e9,
            rule=f"alpha-beta/{rule}",
            provenance="modelled",
            host_ns=self.cluster.host.comm_us * 1e3,
            bytes=nbytes * bus_factor(kind, place.size),
        )

    def p2p_seconds(self, nbytes: float, *, inter: bool) -> float:
        """One message between two GPUs, inside a node or across nodes."""
        if inter:
            hop = self.cluster.node.nic_latency_us * PROTOCOLS[-1].nic_hops
            return (P2P_LATENCY_US + hop) * 1e-6 + nbytes / (self.nic * NIC_EFFICIENCY)
        return (P2P_LATENCY_US + _ramp(P2P_RAMP_US, nbytes)) * 1e-6 + nbytes / (self.nvlink * P2P_EFFICIENCY)

    def _placement(self, ranks: tuple[int, ...]) -> Placement:
        per_node = Counter(r // self.cluster.gpus_per_node for r in ranks)
        return Placement(size=len(ranks), num_nodes=len(per_node), per_node=min(per_node.values()))

    def _local_copy(self, nbytes: float) -> float:
        return 5e-6 + 2 * nbytes / (0.8 * self.cluster.gpu.hbm_bytes_per_s)

    def _bus_bandwidth(self, kind: str, place: Placement) -> float:
        """Of the Simple protocol on a ring, bytes/s."""
        limit, loss = RING_EFFICIENCY[kind]
        inside = self.nvlink * (limit - loss / min(place.size, self.cluster.gpus_per_node))
        if place.num_nodes == 1:
            return inside
        across = place.per_node * self.nic * NIC_EFFICIENCY
        return min(self.nvlink * limit, across) if place.per_node > 1 else across

    def _best(self, kind: str, nbytes: float, place: Placement) -> tuple[float, str]:
        """The fastest algorithm and protocol, in seconds."""
        inter = place.num_nodes > 1
        bus = self._bus_bandwidth(kind, place)
        moved = nbytes * bus_factor(kind, place.size)
        passes = 2 if kind == "all_reduce" else 1
        steps = passes * (place.size - 1)
        # A ring leaves each node once per pass; a broadcast or reduce is a chain over the same links.
        net_steps = (
            passes * (place.num_nodes - 1 if kind == "all_reduce" else place.num_nodes) if inter else 0
        )
        best, rule = math.inf, ""
        for p in PROTOCOLS:
            nvlink_hop = self.cluster.node.nvlink_latency_us * p.nvlink_hops
            nic_hop = self.cluster.node.nic_latency_us * p.nic_hops
            bandwidth = min(bus * p.efficiency, self.nvlink * (p.inter_cap if inter else p.intra_cap))
            latency = p.base_us + (steps - net_steps) * nvlink_hop + net_steps * nic_hop
            seconds = (latency + _ramp(p.ramp_us, nbytes)) * 1e-6 + moved / bandwidth
            if seconds < best:
                best, rule = seconds, f"ring-{p.name}"
            if kind == "all_reduce":
                depth = math.ceil(math.log2(place.num_nodes)) if inter else 0
                latency = p.base_us + 2 * (
                    (place.per_node - 1) * min(nvlink_hop, 1.25 if p.name == "ll128" else nvlink_hop)
                    + depth * min(nic_hop * TREE_NIC_HOP_FACTOR, 14.0)
                )
                seconds = (latency + _ramp(p.ramp_us, nbytes)) * 1e-6 + moved / (bandwidth * TREE_EFFICIENCY)
                if seconds < best:
                    best, rule = seconds, f"tree-{p.name}"
        if kind == "all_reduce" and not inter and self.cluster.node.nvls and place.size >= NVLS_MIN_MEMBERS:
            seconds = (NVLS_LATENCY_US + _ramp(PROTOCOLS[-1].ramp_us, nbytes)) * 1e-6
            seconds += nbytes / (self.nvlink * NVLS_ALGBW)
            if seconds < best:
                best, rule = seconds, "nvls"
        return best, rule

    def _all_to_all(self, comm: CommSignature, nbytes: float, place: Placement) -> float:
        """Every pair exchanges a message; the slower of NVLink and the NICs decides."""
        splits = comm.send_splits or comm.recv_splits
        if splits:
            # The busiest direction of this rank; where the heavy members sit is not known from sizes alone.
            width = DTYPE_BYTES.get(comm.dtype, 0)
            nbytes = float(max(sum(comm.send_splits), sum(comm.recv_splits)) * width)
        inside = nbytes * (min(place.size, place.per_node) - 1) / place.size
        across = nbytes * (place.size - place.per_node) / place.size if place.num_nodes > 1 else 0.0
        latency_us = (
            P2P_LATENCY_US + 0.5 * (place.size - 1) + _ramp(ALL_TO_ALL_RAMP_US, nbytes, ALL_TO_ALL_RAMP_BYTES)
        )
        if place.num_nodes > 1:
            latency_us += self.cluster.node.nic_latency_us * PROTOCOLS[-1].nic_hops
        return latency_us * 1e-6 + max(
            inside / (self.nvlink * ALL_TO_ALL_EFFICIENCY), across / (self.nic * ALL_TO_ALL_NIC_EFFICIENCY)
        )


def bus_factor(kind: str, size: int) -> float:
    """Bytes on the busiest link over the message size, for the optimal algorithm (nccl-tests, PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return 1.0


def _ramp(limit_us: float, nbytes: float, scale_bytes: float = RAMP_BYTES) -> float:
    """Extra time of messages too short for all channels to stream, microseconds; grows to a limit."""
    return limit_us * (1 - math.exp(-nbytes / scale_bytes))
