"""Constants of NCCL's own tuning model, copied from github.com/NVIDIA/nccl, version 2.30.7 (commit 5067397c).

``src/graph/tuning.cc``: base and hardware latencies, bandwidth limits, NVLS efficiency, tree correction factors.
``src/graph/topo.h``: NVLink bandwidth per link. ``src/graph/search.cc``: channel speeds that the graph search tries.
Latencies in microseconds, bandwidths in GB/s, as there.
"""

from __future__ import annotations

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "NVLS", "NVLSTree", "PAT")

BASE_LATENCY_US = {
    "Tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
    "Ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
    "NVLS": {"Simple": 0.0},
    "NVLSTree": {"Simple": 0.0},
    "PAT": {"Simple": 8.0},
}
"""``baseLatencies``."""

HOP_LATENCY_US = {
    "nvlink": {
        "Tree": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
        "Ring": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
        "NVLS": {"Simple": 25.0},
        "NVLSTree": {"Simple": 25.0},
        "PAT": {"Simple": 4.0},
    },
    "pcie": {
        "Tree": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0},
        "Ring": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7},
        "PAT": {"Simple": 4.0},
    },
    "net": {
        "Tree": {"LL": 5.0, "LL128": 8.5, "Simple": 14.0},
        "Ring": {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
        "NVLSTree": {"Simple": 20.9},
        "PAT": {"Simple": 14.0},
    },
}
"""``hwLatencies``."""

NVLINK_LL_HOP_US = HOP_LATENCY_US["nvlink"]["Ring"]["LL"]
NET_LL_HOP_US = HOP_LATENCY_US["net"]["Ring"]["LL"]

NET_OVERHEAD_US = 1.0
"""``getNetOverhead`` on Intel hosts; three times that for Simple."""

GENERATIONS = ("volta", "ampere", "hopper", "blackwell")

NVLINK_EFFICIENCY = {
    "volta": 20.0 / 25.0,
    "ampere": 20.0 / 25.0,
    "hopper": 20.6 / 25.0,
    "blackwell": 40.1 / 50.0,
}
"""``SM*_NVLINK_BW`` over the data-sheet rate of one link and direction: what the NVLink protocol leaves."""
PCIE_EFFICIENCY = 12.0 / 15.75
"""``PCI_BW`` over the rate of PCIe 3.0 x16."""

LL_MAX_BW = {"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
"""``llMaxBws`` of one node."""
LL_MAX_BW_ACROSS = (39.0, 20.4)
"""``llMaxBws`` of two nodes and of more, with Intel CPUs."""

RING_CHANNEL_BW = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
"""``perChMaxRingLL128Bws``."""
TREE_LL128_CHANNEL_BW = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
"""``perChMaxTreeLL128Bws`` by nodes: 1, 2, more."""
TREE_CHANNEL_BW = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
"""``perChMaxTreeBws``."""
NVLS_TREE_CHANNEL_BW = {
    "volta": (0.0, 0.0, 0.0), "ampere": (0.0, 0.0, 0.0), "hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0),
}  # fmt: skip
"""``perChMaxNVLSTreeBws``."""

NVLS_EFFICIENCY = {"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74}
"""``nvlsEfficiency``."""

CHANNEL_SPEEDS = {
    "volta": (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
    "ampere": (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
    "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
"""``speedArrayIntra``, ``sm90SpeedArrayIntra``, ``sm100SpeedArrayIntra``."""

TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1),
    "Simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9),
}  # fmt: skip
"""``treeCorrectionFactor``: factors on the bandwidth for 64 B, 128 B, … 256 MiB, in the tuner's estimate only."""

RING_PLATEAU = {"volta": 1.9, "ampere": 1.4, "hopper": 1.4, "blackwell": 1.4}
"""Factor on the latency of a Simple ring across nodes ("plateau effect"), in the tuner's estimate only."""

CHANNELS = {"volta": 24, "ampere": 24, "hopper": 24, "blackwell": 32}
"""Channels of a communicator inside a node, as ``NCCL_DEBUG=INFO`` prints them for NVSwitch nodes ("24 coll channels")."""
NVLS_CHANNELS = {"volta": 0, "ampere": 0, "hopper": 16, "blackwell": 24}
CHANNELS_PER_NIC = 2
P2P_CHANNELS = 32
"""``MAXCHANNELS`` of 2.28 and before: what p2p uses on NVSwitch nodes."""


def generation(capability: tuple[int, int]) -> str:
    """Row of the tables for a compute capability."""
    major = capability[0]
    if major >= 10:
        return "blackwell"
    return {9: "hopper", 8: "ampere"}.get(major, "volta")
