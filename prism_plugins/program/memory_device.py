"""Device memory that PyTorch's allocator does not see: CUDA context, libraries, NCCL.

Measured on two H200s (NVLink), torch 2.11, NCCL 2.28.9, as NVML's used memory per process, MiB:

=====================================  ===============  ======================
step                                   default (32 ch)  NCCL_MAX_NCHANNELS=8
=====================================  ===============  ======================
context, before NCCL                   1236
first communicator, first collective   840              504
every further one, first collective    484-486          148-150
first all_to_all on a communicator     384-446          96-158
first batched send/recv on one         384              96
unbatched send/recv (its own pair)     262              70
communicator of a single rank          388-390
=====================================  ===============  ======================

Both columns lie on lines in the number of channels; the slopes are below. A communicator takes nothing before its
first use. Beyond two ranks:

* A group of three or more takes about 144 MiB more than a pair (four A100s, 24 channels: 688 against 544 MB,
  github.com/NVIDIA/nccl/issues/964): tree and ring have two neighbours then, however large the group is.
* all_to_all connects every pair inside an NVLink domain by all channels, 10 MiB to receive and 2 to send on each
  (github.com/NVIDIA/nccl/issues/1685: 3.3 GB on eight H100s); peers on other nodes share 16 chunks of 128 KiB a channel
  and direction (NCCL 2.30, src/transport/net.cc, NCCL_SHARED_STEPS), and a group with such peers gives each two channels.
* Between nodes a communicator has two channels for each NIC of its members.
* NVLS buffers: 2 x 8 steps of 128 KiB for each channel and member of the node (src/transport/nvls.cc), where a call takes NVLS.

The table is NVML's, which counts 615 MiB that the driver keeps for itself; CUDA's total memory does not, so against that
capacity the context takes 621 MiB. Twelve Megatron jobs on the same GPUs give the rest: 136 MiB of modules, 171 MiB
for NCCL in a process and 184 more once a group has several ranks (together the 840 of the table), 253 MiB of a communicator
that only ever sends and receives in batches.

Assumed, not measured: that the figures of H200s hold for other GPUs, drivers and hosts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

import msgspec
import numpy as np

from prism_plugins.program.model import EventKind, GroupInfo, Program

MIB = 2**20
NET_PEER_CHANNELS = 2
"""NCCL_NCHANNELS_PER_NET_PEER: all peers of a group that leaves its domain get that many (src/graph/paths.cc,
``ncclTopoComputeP2pChannelsPerPeer``)."""
WORLD_GROUP = "default_pg"
"""torch's description of the group of all ranks, which start-up uses in every job."""


class CommunicatorUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank uses one communicator in an iteration."""

    ranks: tuple[int, ...]
    name: str = ""
    collective: bool
    near_peers: int = 0
    """Partners of all_to_all or batched send/recv in the same NVLink domain."""
    far_peers: int = 0
    """The same, in other domains."""
    pairs: int = 0
    """Partners of send/recv outside a batch."""
    nvls: bool = False
    """Some collective takes NVLS."""


class DeviceOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes outside the allocator. Defaults: see the module docstring."""

    context_bytes: int = 621 * MIB
    libraries_bytes: int = 136 * MIB
    """cuBLAS and other modules once loaded. cuBLAS's workspaces are torch allocations and not part of it."""
    nccl_process_bytes: int = 171 * MIB
    """Once, with the first communicator."""
    nccl_peers_bytes: int = 184 * MIB
    """Once, with the first communicator of several ranks."""
    channels: int = 32
    """NCCL's channels inside a node; ``NCCL_MAX_NCHANNELS`` lowers it."""
    nvls_channels: int = 16
    nics_per_gpu: float = 1.0
    gpus_per_domain: int = 8
    """GPUs that reach each other by NVLink; rank ``r`` sits in domain ``r // gpus_per_domain``."""
    collective_base_bytes: int = 38 * MIB
    collective_channel_bytes: int = 14 * MIB
    third_member_channel_bytes: int = 9 * MIB // 2
    """On top where the group has more than two members: 144 MiB over 32 channels."""
    single_channel_bytes: int = 11 * MIB
    """In place of ``collective_channel_bytes`` where the communicator has one rank."""
    p2p_only_channel_bytes: int = 27 * MIB // 4
    """In place of ``collective_channel_bytes`` where only batched send/recv is used."""
    p2p_channel_bytes: int = 12 * MIB
    """all_to_all or batched send/recv, per channel and partner in the domain."""
    far_p2p_channel_bytes: int = 4 * MIB
    """The same for all partners on other nodes together, per channel: both directions."""
    pair_base_bytes: int = 6 * MIB
    pair_channel_bytes: int = 8 * MIB
    """The two-rank communicator that torch makes for send/recv outside a batch."""
    nvls_channel_bytes: int = 2 * MIB
    """Per NVLS channel and member of the node."""

    def communicator_bytes(self, ranks: tuple[int, ...], *, nvls: bool = False) -> int:
        """A communicator of these global ranks that was used for a collective."""
        if len(ranks) == 1:
            return self.collective_base_bytes + self.channels * self.single_channel_bytes
        channels, local = self._channels(ranks)
        per_channel = self.collective_channel_bytes
        per_channel += self.third_member_channel_bytes if len(ranks) > 2 else 0
        heads = local if nvls else 0
        return (
            self.collective_base_bytes
            + channels * per_channel
            + heads * self.nvls_channels * self.nvls_channel_bytes
        )

    def _channels(self, ranks: tuple[int, ...]) -> tuple[int, int]:
        """Channels of a communicator, and its members in the domain that has fewest."""
        per_domain = Counter(rank // self.gpus_per_domain for rank in ranks)
        local = min(per_domain.values())
        if len(per_domain) == 1:
            return self.channels, local
        return min(self.channels, max(2, 2 * math.ceil(local * self.nics_per_gpu))), local

    def use_bytes(self, use: CommunicatorUse) -> int:
        """One communicator as it is used."""
        total = 0
        if use.collective:
            total = self.communicator_bytes(use.ranks, nvls=use.nvls)
        elif use.near_peers or use.far_peers:
            total = self.collective_base_bytes + self._channels(use.ranks)[0] * self.p2p_only_channel_bytes
        is_local = len({rank // self.gpus_per_domain for rank in use.ranks}) == 1
        per_peer = self.channels if is_local else min(self.channels, NET_PEER_CHANNELS)
        total += per_peer * self.p2p_channel_bytes * use.near_peers
        total += self.channels * self.far_p2p_channel_bytes if use.far_peers else 0
        return total + use.pairs * (self.pair_base_bytes + self.channels * self.pair_channel_bytes)

    def parts(self, uses: Iterable[CommunicatorUse], *, init_communicators: int = 0) -> dict[str, int]:
        """What takes how many bytes: ``cuda_context``, ``libraries``, ``nccl``, and ``nccl <group>`` for each communicator.

        Args:
            uses: Communicators of the rank.
            init_communicators: Ones that only start-up used (a pair's size is taken); none where the iteration uses the
                world's group.
        """
        uses = tuple(uses)
        parts = {"cuda_context": self.context_bytes, "libraries": self.libraries_bytes}
        groups: dict[str, int] = {}
        for use in uses:
            name = f"nccl {use.name or 'group'} ({len(use.ranks)} ranks)"
            groups[name] = groups.get(name, 0) + self.use_bytes(use)
        if groups:
            parts["nccl"] = self.nccl_process_bytes
            parts["nccl"] += self.nccl_peers_bytes if any(len(use.ranks) > 1 for use in uses) else 0
            if init_communicators and not any(use.name == WORLD_GROUP for use in uses):
                groups["nccl start-up"] = init_communicators * self.communicator_bytes((0, 1))
        return {name: size for name, size in (parts | groups).items() if size}


def communicators(
    program: Program, *, gpus_per_domain: int = 8, nvls_groups: Collection[int] = ()
) -> tuple[CommunicatorUse, ...]:
    """The communicators that a program uses, one per group (groups are communicators of their own also when they
    have the same members, or a single one).

    A group in which any send/recv was batched is taken to batch all of them: a batch of one looks like a single call.

    Args:
        program: The program of one rank.
        gpus_per_domain: GPUs that reach each other by NVLink.
        nvls_groups: Indices of groups in which a collective takes NVLS.
    """
    events = program.events[program.events["kind"] == EventKind.COMM]
    _, inverse, counts = np.unique(events["value"], return_inverse=True, return_counts=True)
    calls = np.unique(2 * events["ref"].astype(np.int64) + (counts[inverse] > 1))
    collective: set[int] = set()
    p2p: set[int] = set()
    exchanging: set[int] = set()
    partners: dict[int, set[int]] = {}
    for ref, batched in (divmod(call, 2) for call in calls.tolist()):
        comm = program.comms[ref]
        if comm.kind not in ("send", "recv"):
            collective.add(comm.group)
            if comm.kind == "all_to_all":
                p2p.add(comm.group)
                exchanging.add(comm.group)
        else:
            partners.setdefault(comm.group, set()).add(comm.peer)
            if batched:
                p2p.add(comm.group)
    here = program.rank // gpus_per_domain
    found = []
    for group in sorted(collective | p2p | partners.keys()):
        info = program.groups[group]
        peers: set[int] = set()
        if group in p2p:
            everybody = group in exchanging
            peers = set(info.ranks) if everybody else {info.ranks[p] for p in partners.get(group, ())}
            peers.discard(program.rank)
        near = sum(peer // gpus_per_domain == here for peer in peers)
        found.append(
            CommunicatorUse(
                ranks=info.ranks,
                name=info.desc or info.name,
                collective=group in collective,
                near_peers=near,
                far_peers=len(peers) - near,
                pairs=0 if group in p2p else len(partners.get(group, ())),
                nvls=group in nvls_groups,
            )
        )
    return tuple(found)


def with_groups_outside(
    uses: Iterable[CommunicatorUse], groups: Iterable[GroupInfo]
) -> tuple[CommunicatorUse, ...]:
    """The communicators of the iteration, and those of groups that were used outside of it alone."""
    uses = list(uses)
    known = {(use.ranks, use.name): i for i, use in enumerate(uses)}
    for group in groups:
        name = group.desc or group.name
        at = known.get((group.ranks, name))
        if at is None:
            uses.append(CommunicatorUse(ranks=group.ranks, name=name, collective=True))
        elif not uses[at].collective:
            uses[at] = msgspec.structs.replace(uses[at], collective=True)
    return tuple(uses)
