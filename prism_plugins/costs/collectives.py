"""Prices collectives and p2p: what NCCL would do (:mod:`.nccl`), measured points where there are some.

Message sizes and bus bandwidths follow nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). A price is
the time from the arrival of the last member, as nccl-tests reports it; what the host needs is ``host_ns``.
``docs/collectives.md`` describes the model, ``scripts/check_collectives.py`` prints its error on every published point.

Limits: no congestion between different kinds of traffic, no rail crossing, no in-network reduction across nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from prism_plugins.costs.base import Price
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.nccl.measured import CollectivePoint, Corrections
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.costs.nccl.tables import P2P_CHANNELS
from prism_plugins.costs.nccl.topology import Links, Placement
from prism_plugins.costs.nccl.tuner import COLLECTIVES, Tuner, ramped
from prism_plugins.program.model import DTYPE_BYTES, CommSignature

P2P_EFFICIENCY = 0.875
"""One direction, of the NVLink data-sheet rate: 390 of 450 GB/s between two H200s, 396 by plain copies."""
P2P_LATENCY_US = 10.0
P2P_RAMP_US = 2.5
P2P_CHANNEL_BYTES = 64 << 10
P2P_CHANNEL_BW = 15.5
"""GB/s that one channel copies to one peer. 32 of them exceed Hopper's links and not Blackwell's: two B200s exchange 494 GB/s."""
P2P_PEERS_EXPONENT = 1 / 6
"""Several peers keep channels busier: four B200s reach 587 GB/s, eight 671."""
P2P_NET_HOP_US = 14.0
"""``hwLatencies`` NET, Simple."""
ALL_TO_ALL_RAMP_US = 28.0
ALL_TO_ALL_PEER_US = 0.5
ALL_TO_ALL_NIC_EFFICIENCY = 0.97
"""Across nodes an even all_to_all takes as long as if all its bytes left the node (NCCL's rounds of peers do not overlap
what stays with what leaves): 0.90-0.95 of line rate on 4-16 nodes (SimAI), 48 of 50 GB/s on 32 H100s (NVIDIA, GTC 2025)."""

_PAIRWISE = ("p2p", "all_to_all", "gather", "scatter")


class CollectiveModel:
    """Prices communication on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        settings: NcclSettings | None = None,
        measured: Sequence[CollectivePoint] = (),
    ) -> None:
        self.cluster = cluster
        self.settings = settings or NcclSettings()
        self._host_ns = (cluster.host.comm_us + cluster.host.enqueue_us.get("collective", 0.0)) * 1e3
        self.links = Links(cluster)
        self.tuner = Tuner(self.links, self.settings)
        self._measured = {p.kind for p in measured}
        self._corrections = Corrections(measured, self.modelled_us)
        self.placement = functools.lru_cache(maxsize=4096)(self.links.place)

    def price(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price one call from the moment the last member arrived. For send/recv ``ranks`` is (sender, receiver)."""
        place = self.placement(ranks)
        kind, nbytes = comm.kind, float(comm.nbytes)
        if place.size <= 1:
            return self._alone(kind, nbytes)
        name = {"send": "p2p", "recv": "p2p", "barrier": "all_reduce"}.get(kind, kind)
        if kind == "barrier":
            nbytes = 4.0  # torch's barrier reduces one element
        known = name in COLLECTIVES or name in _PAIRWISE
        if name == "all_to_all" and (comm.send_splits or comm.recv_splits):
            us, rule, channels = self._exchange(*self._busiest(comm, ranks, rank, place), place)
        else:
            us, rule, channels = self._even(name if known else "all_reduce", nbytes, place)
        provenance, factor = "unpriced", 1.0
        if known:
            factor, provenance = self._corrections.factor(name, place.size, place.num_nodes, nbytes)
        us *= factor
        wire = nbytes * bus_factor(kind, place.size)
        return Price(
            duration_ns=us * 1e3,
            rule=f"nccl/{rule}" if known else f"nccl/unknown {kind}",
            provenance=provenance,
            host_ns=self._host_ns,
            bytes=wire,
            channels=channels,
            link="nic" if place.num_nodes > 1 else "gpu",
            link_share=self._link_share(name, wire, us, place),
        )

    def modelled_us(self, kind: str, gpus: int, nodes: int, nbytes: int) -> float:
        """An even call of a group spread over so many nodes, without what was measured."""
        return self._even(kind, float(nbytes), Placement(size=gpus, num_nodes=nodes, per_node=gpus // nodes))[
            0
        ]

    def _alone(self, kind: str, nbytes: float) -> Price:
        # NCCL's single-rank kernel copies only out of place; torch's reductions and broadcasts are in place.
        copies = kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
        us = 5.0 + (2 * nbytes / (0.8 * self.cluster.gpu.hbm_bytes_per_s) * 1e6 if copies else 0.0)
        return Price(
            duration_ns=us * 1e3,
            rule="nccl/local",
            provenance="modelled",
            host_ns=self._host_ns,
        )

    def _even(self, kind: str, nbytes: float, place: Placement) -> tuple[float, str, int]:
        """Microseconds, rule and channels of a call that is the same on every member."""
        across = place.num_nodes > 1
        if kind == "p2p":
            return self.p2p_us(nbytes, across=across), "p2p", self._p2p_channels(nbytes, 1, across=across)
        if kind == "all_to_all":
            total = nbytes * (place.size - 1) / place.size
            return self._exchange(total, total if across else 0.0, place)
        if kind in ("gather", "scatter"):
            us = self.p2p_us(nbytes * (place.size - 1) / place.size, across=across)
            return us, "fan", self._p2p_channels(nbytes, place.size - 1, across=across)
        choice = self.tuner.choose(kind, nbytes, place)
        return choice.microseconds, choice.name, choice.channels

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes, and which variables of the launch it took into account."""
        c, node = self.cluster, self.cluster.node
        link = "NVLink" if node.gpu_link == "nvlink" else "PCIe"
        network = (
            f"{node.num_nics} NICs of {node.nic_bytes_per_s / 1e9:g} GB/s, oversubscription {c.fabric.oversubscription:g}"
            if node.num_nics
            else "no network"
        )
        domain = f" ({c.gpus_per_domain} on one NVLink switch)" if node.nvlink_domain_gpus else ""
        lines = [
            f"collectives are priced as NCCL 2.30 would choose and run them on {c.gpus_per_node} GPUs a node{domain}, {link} "
            f"{node.nvlink_bytes_per_s / 1e9:g} GB/s, {network}; rank r runs on node r // {c.gpus_per_node}"
        ]
        if self.settings.variables:
            listed = ", ".join(f"{name}={value}" for name, value in self.settings.variables.items())
            lines.append(f"NCCL and CUDA variables of the launch: {listed}")
        if self._measured:
            lines.append(
                f"measured points correct {', '.join(sorted(self._measured))}; between and beyond them the model's shape holds"
            )
        return (*lines, *self.tuner.ignored.values())

    def p2p_us(self, nbytes: float, *, across: bool) -> float:
        """One message between two GPUs, inside a node or across nodes."""
        kilobytes = nbytes / 1e3
        if across:
            latency = P2P_LATENCY_US + P2P_NET_HOP_US + 2 * self.links.extra_hop
            return latency + ramped(kilobytes / min(self.links.nic, self.links.gpu), P2P_RAMP_US)
        rate = self.links.raw_gpu * P2P_EFFICIENCY if self.links.intra == "nvlink" else self.links.gpu
        return P2P_LATENCY_US + ramped(kilobytes / min(rate, self._copy_rate(1)), P2P_RAMP_US)

    def _copy_rate(self, peers: int) -> float:
        """GB/s that all channels copy to so many peers."""
        channels = self.settings.clamp_channels(P2P_CHANNELS)
        return channels * P2P_CHANNEL_BW * peers**P2P_PEERS_EXPONENT

    def _link_share(self, kind: str, wire: float, us: float, place: Placement) -> float:
        rate = self.links.gpu
        if place.num_nodes > 1:
            rate = self.links.nic * (place.per_node if kind in COLLECTIVES else 1)
        directions = 0.5 if kind == "p2p" else 1.0  # a message leaves the other direction free
        return min(1.0, directions * wire / 1e3 / us / rate)

    def _p2p_channels(self, nbytes: float, peers: int, *, across: bool) -> int:
        """A channel for every 64 KiB of a message, two at most for a peer behind a NIC (NCCL_NCHANNELS_PER_NET_PEER)."""
        per_peer = 2 if across else P2P_CHANNELS
        wanted = peers * min(per_peer, max(1, int(nbytes / max(peers, 1) // P2P_CHANNEL_BYTES)))
        return self.settings.clamp_channels(min(P2P_CHANNELS, wanted))

    def _busiest(
        self, comm: CommSignature, ranks: tuple[int, ...], rank: int, place: Placement
    ) -> tuple[float, float]:
        """Bytes that this rank exchanges in its busier direction: with all others, and what loads the NICs like an even
        all_to_all of as many bytes."""
        here = rank // self.links.gpus_per_domain
        width = DTYPE_BYTES.get(comm.dtype, 0)
        total = across = 0.0
        for splits in (comm.send_splits, comm.recv_splits):
            if len(splits) != len(ranks):
                continue
            sizes = [(s * width, peer) for s, peer in zip(splits, ranks, strict=True) if peer != rank]
            far = sum(size for size, peer in sizes if peer // self.links.gpus_per_domain != here)
            total, across = max(total, float(sum(size for size, _ in sizes))), max(across, float(far))
        return total, across * (place.size - 1) / max(1, place.size - place.per_node)

    def _exchange(self, total: float, across: float, place: Placement) -> tuple[float, str, int]:
        """Every pair exchanges a message."""
        spread = place.num_nodes > 1
        latency = P2P_LATENCY_US + ALL_TO_ALL_PEER_US * (place.size - 1)
        latency += P2P_NET_HOP_US + 2 * self.links.extra_hop if spread else 0.0
        us = total / 1e3 / min(self.links.gpu, self._copy_rate(place.size - 1))
        if across:
            us = max(us, across / 1e3 / (self.links.nic * ALL_TO_ALL_NIC_EFFICIENCY))
        channels = self._p2p_channels(total, place.size - 1, across=spread)
        return latency + ramped(us, ALL_TO_ALL_RAMP_US), "all_to_all", channels


def bus_factor(kind: str, size: int) -> float:
    """Bytes on the busiest link over the message size, for the optimal algorithm (nccl-tests, PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return 1.0
