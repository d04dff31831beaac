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
first use.

Assumed, not measured: that the figures of two ranks hold for larger groups and for other paths than NVLink. The
context depends on driver and host: 619 MiB was seen as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from prism_plugins.program.model import EventKind, Program

MIB = 2**20


class DeviceOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes outside the allocator. Defaults: see the module docstring."""

    context_bytes: int = 1236 * MIB
    libraries_bytes: int = 195 * MIB
    """cuBLAS and other modules once loaded: 1.50 GB used minus reserved in a job without NCCL, less the context.
    cuBLAS's workspaces are torch allocations and not part of it."""
    nccl_process_bytes: int = 355 * MIB
    """Once, with the first communicator."""
    channels: int = 32
    """NCCL's channels; ``NCCL_MAX_NCHANNELS`` lowers it."""
    collective_base_bytes: int = 38 * MIB
    collective_channel_bytes: int = 14 * MIB
    single_channel_bytes: int = 11 * MIB
    """In place of ``collective_channel_bytes`` where the communicator has one rank."""
    p2p_channel_bytes: int = 12 * MIB
    """First all_to_all or batched send/recv of a communicator, per channel."""
    pair_base_bytes: int = 6 * MIB
    pair_channel_bytes: int = 8 * MIB
    """The two-rank communicator that torch makes for send/recv outside a batch."""

    def communicator_bytes(self, num_ranks: int) -> int:
        """A communicator that was used for a collective."""
        per_channel = self.collective_channel_bytes if num_ranks > 1 else self.single_channel_bytes
        return self.collective_base_bytes + self.channels * per_channel

    def nccl_bytes(self, uses: Iterable[CommunicatorUse]) -> int:
        """All communicators of a rank."""
        total = 0
        for use in uses:
            if use.collective:
                total += self.communicator_bytes(len(use.ranks))
            if use.p2p:
                total += self.channels * self.p2p_channel_bytes
            total += use.pairs * (self.pair_base_bytes + self.channels * self.pair_channel_bytes)
        return total + self.nccl_process_bytes if total else 0


class CommunicatorUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank uses one communicator in an iteration."""

    ranks: tuple[int, ...]
    collective: bool
    p2p: bool
    """all_to_all, or send/recv in a batch."""
    pairs: int
    """Partners of send/recv outside a batch."""


def communicators(program: Program) -> tuple[CommunicatorUse, ...]:
    """The communicators that a program uses, one per group (groups are communicators of their own also when they
    have the same members, or a single one).

    A group in which any send/recv was batched is taken to batch all of them: a batch of one looks like a single call.
    """
    events = program.events[program.events["kind"] == EventKind.COMM]
    _, inverse, counts = np.unique(events["value"], return_inverse=True, return_counts=True)
    calls = np.unique(np.stack([events["ref"].astype(np.int64), counts[inverse] > 1], axis=1), axis=0)
    collective: set[int] = set()
    p2p: set[int] = set()
    partners: dict[int, set[int]] = {}
    for ref, batched in calls.tolist():
        comm = program.comms[ref]
        if comm.kind not in ("send", "recv"):
            collective.add(comm.group)
            if comm.kind == "all_to_all":
                p2p.add(comm.group)
        else:
            partners.setdefault(comm.group, set()).add(comm.peer)
            if batched:
                p2p.add(comm.group)
    return tuple(
        CommunicatorUse(
            ranks=program.groups[group].ranks,
            collective=group in collective or group in p2p,
            p2p=group in p2p,
            pairs=0 if group in p2p else len(partners.get(group, ())),
        )
        for group in sorted(collective | p2p | partners.keys())
    )
