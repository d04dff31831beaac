"""Which algorithm and protocol NCCL picks, and how long the call then takes.

NCCL estimates ``latency + bytes / bandwidth`` for every pair and takes the smallest (``ncclTopoTuneModel``,
``ncclTopoGetAlgoTime`` in src/graph/tuning.cc); :meth:`Tuner.candidates` does the same from the same tables. The time
that is then predicted keeps the latency and replaces the estimate's bandwidth by what the links carry::

    t = latency + T + sqrt(RAMP_US * T),   T = wire bytes * (1 / link + STALL / steps)

The square root stands for the slow saturation of all published tables: a ring of 16 MiB is 40 us late,
one of 1 GiB 200 us. ``STALL`` is time per byte that a ring's last step, which only receives, takes while its outgoing link
idles: it makes groups of two slower than groups of eight. NVLS moves ``(1 + 1/n)`` of the message over each
GPU's links, and a tree the message itself in each direction; both follow from the algorithm.
"""

from __future__ import annotations

import math

import msgspec

from prism_plugins.costs.nccl import tables
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.costs.nccl.topology import Links, Placement

RAMP_US = 14.0
FLAG_RAMP_US = 7.0
"""Of LL and LL128, which carry a flag with every few bytes."""
STALL_US_PER_MB = 0.70
"""The last step of a ring, which only receives."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
_SHARDED = ("all_gather", "reduce_scatter")
_MOST_BYTES_OF_CORRECTION = 23


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm and protocol for one call."""

    algorithm: str
    protocol: str
    estimate_us: float
    """NCCL's own estimate, which decides."""
    microseconds: float
    """Predicted time."""
    latency_us: float
    """The part that does not depend on the size."""
    channels: int
    """Channels, each of which takes an SM."""

    @property
    def name(self) -> str:
        """For reports, e.g. ``Ring/LL128``."""
        return f"{self.algorithm}/{self.protocol}"


class Tuner:
    """NCCL's choice on one cluster."""

    def __init__(self, links: Links, settings: NcclSettings) -> None:
        self.links = links
        self.settings = settings
        self.ignored: dict[str, str] = {}
        """Collective → why the user's restriction could not be applied."""

    def choose(self, kind: str, nbytes: float, place: Placement) -> Choice:
        """The pair NCCL takes for a collective of :data:`COLLECTIVES`."""
        allowed = self.candidates(kind, nbytes, place)
        algorithms = self.settings.algorithms.get(kind, tables.ALGORITHMS)
        protocols = self.settings.protocols.get(kind, tables.PROTOCOLS)
        asked = [c for c in allowed if c.algorithm in algorithms and c.protocol in protocols]
        if not asked:
            self.ignored[kind] = (
                f"NCCL_ALGO and NCCL_PROTO leave no way to do {kind} (recent NCCL refuses such a call); "
                "priced without them"
            )
        return min(asked or allowed, key=lambda c: c.estimate_us)

    def candidates(self, kind: str, nbytes: float, place: Placement) -> list[Choice]:
        """All pairs that NCCL considers for a call of ``nbytes`` (full buffer) in a group of two or more."""
        found = []
        for protocol in tables.PROTOCOLS:
            if protocol == "LL128" and place.num_nodes > 1 and not self.links.ll128_across:
                continue
            found.append(self._ring(kind, protocol, nbytes, place))
            if kind == "all_reduce":
                found.append(self._tree(protocol, nbytes, place))
        if self.links.nvls and self.settings.nvls and place.per_node > 1:
            if kind == "all_reduce":
                found += self._nvls_all_reduce(nbytes, place)
            elif kind in _SHARDED and place.num_nodes == 1:
                found += self._nvls_sharded(kind, nbytes, place)
        if kind in _SHARDED and place.num_nodes == place.size:
            found.append(self._pat(nbytes, place))
        return found

    # ── algorithms ───────────────────────────────────────────────────────────────────────────────────────────

    def _ring(self, kind: str, protocol: str, nbytes: float, place: Placement) -> Choice:
        links, n, nodes = self.links, place.size, place.num_nodes
        steps = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(kind, n)
        channels = self._channels(place)
        cap = channels * tables.RING_CHANNEL_BW[links.generation]
        link = min(links.gpu, cap)
        across = place.per_node * links.nic if nodes > 1 else math.inf
        estimated = min(link if nodes <= 2 else min(link, across), cap)
        real = min(link, across)
        if protocol == "LL":
            most = (
                tables.LL_MAX_BW_ACROSS[min(nodes, 3) - 2]
                if nodes > 1
                else tables.LL_MAX_BW[links.generation]
            )
            estimated, real = min(most, 0.5 * estimated), min(most, 0.5 * real)
        elif protocol == "LL128":
            estimated, real = 0.92 * estimated, 0.92 * real
        base = tables.BASE_LATENCY_US["Ring"][protocol]
        hop = links.hop("Ring", protocol)
        if kind in ("broadcast", "reduce"):
            latency = base + (links.net_hop("Ring", protocol) if nodes > 1 else hop)
        else:
            crossings = 0 if nodes == 1 else (2 if kind == "all_reduce" else 1) * (nodes - 1)
            if nodes > 1:
                hop = max(hop, tables.NET_OVERHEAD_US * (3.0 if protocol == "Simple" else 1.0))
                net = links.net_hop("Tree" if place.per_node == 1 else "Ring", protocol)
            else:
                net = 0.0
            latency = base + (steps - crossings) * hop + crossings * net
        moved = nbytes * steps / n / 1e3  # GB/s are 1e3 bytes/us
        guess = latency
        if protocol == "Simple" and nodes > 1 and kind == "all_reduce" and nbytes / (channels * n) >= 64:
            guess *= tables.RING_PLATEAU[links.generation]
        stall = STALL_US_PER_MB * 1e-3 / steps if kind not in ("broadcast", "reduce") else 0.0
        return Choice(
            algorithm="Ring",
            protocol=protocol,
            estimate_us=guess + moved / estimated,
            microseconds=latency + _on_wire(moved * (1 / real + stall), protocol),
            latency_us=latency,
            channels=_used(channels, protocol, nbytes, ring_of=n),
        )

    def _tree(self, protocol: str, nbytes: float, place: Placement) -> Choice:
        links, nodes = self.links, place.num_nodes
        row = min(nodes, 3) - 1
        channels = self._channels(place)
        generation = links.generation
        total = place.per_node * links.nic
        # Bus bandwidth as NCCL counts it: twice what the algorithm reaches.
        estimated = links.gpu if nodes <= 2 else min(links.gpu, total)
        # Inside a node each link carries the message up and down; between two nodes each side sends it once.
        real = min(links.gpu, 2 * total if nodes == 2 else total) if nodes > 1 else links.gpu
        latency = tables.BASE_LATENCY_US["Tree"][protocol]
        latency += 2 * (place.size / nodes - 1) * links.hop("Tree", protocol)
        if nodes > 1:
            latency += 2 * _log2(nodes) * links.net_hop("Tree", protocol)
        rates = []
        for bus in (estimated, real):
            bus = min(0.92 * bus, channels * tables.TREE_CHANNEL_BW[generation][row])
            if protocol == "LL":
                most = (
                    tables.LL_MAX_BW_ACROSS[min(nodes, 3) - 2] if nodes > 1 else tables.LL_MAX_BW[generation]
                )
                bus = min(bus / 3.8, most)
            elif protocol == "LL128":
                share = 7 / 9 if nodes == 1 else 120 / 128
                bus = min(bus * share, channels * tables.TREE_LL128_CHANNEL_BW[generation][row])
            rates.append(bus / 2)
        guess = nbytes / 1e3 / (rates[0] * _tree_correction(protocol, nbytes))
        return Choice(
            algorithm="Tree",
            protocol=protocol,
            estimate_us=latency + guess,
            microseconds=latency + _on_wire(nbytes / 1e3 / rates[1], protocol),
            latency_us=latency,
            channels=_used(channels, protocol, nbytes),
        )

    def _nvls_all_reduce(self, nbytes: float, place: Placement) -> list[Choice]:
        links, n, nodes = self.links, place.size, place.num_nodes
        heads = place.per_node
        speed, efficiency = self._nvls_speed(heads), tables.NVLS_EFFICIENCY[links.generation]
        inside = speed * efficiency * (heads - 1) / heads * 2
        # The switch reads the message from every GPU and writes a share of it back through each.
        real = self._nvls_rate() / (1 + 1 / heads)
        latency = links.hop("NVLS", "Simple")
        algorithm = "NVLS"
        if nodes > 1:
            algorithm = "NVLSTree"
            latency += 2 * _log2(nodes) * links.net_hop("NVLSTree", "Simple")
            most = tables.NVLS_TREE_CHANNEL_BW[links.generation][min(nodes, 3) - 1]
            inside = min(inside, links.nic * (2 if nodes == 2 else 1), most)
            total = heads * links.nic
            real = min(real, total if nodes == 2 else total / 2)
        estimated = heads * inside * n / (2 * (n - 1))
        return (
            [
                Choice(
                    algorithm=algorithm,
                    protocol="Simple",
                    estimate_us=latency + nbytes / 1e3 / estimated,
                    microseconds=latency + ramped(nbytes / 1e3 / real, RAMP_US),
                    latency_us=latency,
                    channels=self._nvls_channels(),
                )
            ]
            if heads > 1 and estimated > 0
            else []
        )

    def _nvls_sharded(self, kind: str, nbytes: float, place: Placement) -> list[Choice]:
        """all_gather multicasts, reduce_scatter reads through the switch: the whole message passes each GPU's link."""
        del kind
        links, n = self.links, place.size
        efficiency = tables.NVLS_EFFICIENCY[links.generation]
        estimated = n * self._nvls_speed(n) * efficiency * ((n - 1) / n) ** 2
        latency = links.hop("NVLS", "Simple")
        return [
            Choice(
                algorithm="NVLS",
                protocol="Simple",
                estimate_us=latency + nbytes / 1e3 / estimated,
                microseconds=latency + ramped(nbytes / 1e3 / self._nvls_rate(), RAMP_US),
                latency_us=latency,
                channels=self._nvls_channels(),
            )
        ]

    def _pat(self, nbytes: float, place: Placement) -> Choice:
        links, n = self.links, place.size
        latency = tables.BASE_LATENCY_US["PAT"]["Simple"]
        latency += _log2(n) * links.net_hop("PAT", "Simple") / 3.5 + n * 2.8
        bus = 0.75 * min(links.gpu, links.nic)
        moved = nbytes / 1e3
        return Choice(
            algorithm="PAT",
            protocol="Simple",
            estimate_us=latency + moved / bus,
            microseconds=latency + ramped(moved * (n - 1) / n / min(links.gpu, links.nic), RAMP_US),
            latency_us=latency,
            channels=self._channels(place),
        )

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _nvls_speed(self, heads: int) -> float:
        """GB/s of each of ``heads`` NVLS channels: the fastest the graph search finds room for."""
        speeds = tables.CHANNEL_SPEEDS[self.links.generation]
        return next((s for s in speeds if s <= self.links.gpu / heads), speeds[-1])

    def _nvls_channels(self) -> int:
        return self.settings.clamp_channels(tables.NVLS_CHANNELS[self.links.generation])

    def _nvls_rate(self) -> float:
        """GB/s through the switch's reduction or multicast, per GPU."""
        generation = self.links.generation
        most = self._nvls_channels() * tables.RING_CHANNEL_BW[generation]
        return min(self.links.gpu * tables.NVLS_EFFICIENCY[generation], most)

    def _channels(self, place: Placement) -> int:
        channels = tables.CHANNELS[self.links.generation]
        if place.num_nodes > 1:
            nics = max(1, math.ceil(place.per_node * self.links.nics_per_gpu))
            channels = max(2, min(channels, tables.CHANNELS_PER_NIC * nics))
        return self.settings.clamp_channels(channels)


def ramped(microseconds: float, ramp_us: float) -> float:
    """Time on the wire with the slow saturation added."""
    return microseconds + math.sqrt(ramp_us * microseconds)


def _on_wire(microseconds: float, protocol: str) -> float:
    """LL and LL128 move small pieces from the start and saturate sooner than Simple, which fills a pipeline."""
    return ramped(microseconds, RAMP_US if protocol == "Simple" else FLAG_RAMP_US)


def _used(channels: int, protocol: str, nbytes: float, *, ring_of: int = 1) -> int:
    """Channels that a call of this size gets: NCCL takes fewer while one would have less than a threshold to do
    (``topoGetAlgoInfo`` in src/enqueue.cc: bytes per thread 8, 8, 64; threads 512, 640, 512)."""
    per_channel = {"LL": 512 * 8 * ring_of, "LL128": 640 * 8, "Simple": 512 * 64}[protocol]
    return max(1, min(channels, int(nbytes // per_channel)))


def _log2(n: int) -> int:
    return max(0, n.bit_length() - 1)


def _tree_correction(protocol: str, nbytes: float) -> float:
    index = _log2(int(nbytes) >> 6) if nbytes >= 64 else -1
    return tables.TREE_CORRECTION[protocol][index] if 0 <= index < _MOST_BYTES_OF_CORRECTION else 1.0
