"""Communication by process group: how much, by which algorithm, and what of it computation hides."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.emit.ranks import format_ranks
from prism_plugins.emit.spans import DeviceSpans, SpanKind
from prism_plugins.program.model import GroupInfo, Program
from prism_plugins.simulate.expand import Interval, measure, overlap, union
from prism_plugins.simulate.prices import comm_ranks
from prism_plugins.world.layout import Layout


class GroupUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does over one process group in an iteration. Times are ms of that rank."""

    dims: str
    """Parallel dimensions in which the members differ: ``tp``, ``dp``, ``pp``, ``dp+pp``, ``ep``, …"""
    desc: str
    ranks: str
    size: int
    calls: int
    kinds: dict[str, int]
    """Collective → calls."""
    message_bytes: int
    """Sum of the message sizes, as nccl-tests counts them."""
    algorithms: dict[str, int]
    """Algorithm and protocol → calls."""
    bus_gb_per_s: float
    """Bytes on the wire over transfer time: nccl-tests' bus bandwidth, GB/s."""
    transfer_ms: float
    exposed_ms: float
    """Transfer beside which this rank computes nothing."""
    hidden_ms: float
    waited_ms: float
    """Time that a call spent waiting for the other members before anything was transferred."""


def dims_of_group(group: GroupInfo, layout: Layout) -> str:
    """:func:`dims_of` a group; its description decides between grids that fit alike (expert and data parallelism over the
    same ranks)."""
    return dims_of(group.ranks, layout, of_experts="expert" in group.desc.lower())


def dims_of(ranks: tuple[int, ...], layout: Layout, *, of_experts: bool = False) -> str:
    """The parallel dimensions in which members of a group differ, joined by ``+``; ``self`` for a group of one.

    Of the dense and the expert grid the one in which fewer dimensions vary names the group; where both fit alike
    ``of_experts`` decides.
    """
    if len(ranks) < 2:
        return "self"
    best: tuple[str, ...] | None = None
    for expert in (False, True) if layout.ep > 1 or layout.etp > 1 else (False,):
        sizes = layout.sizes(expert=expert)
        shape = tuple(reversed(sizes.values()))
        index = np.unravel_index(np.asarray(ranks), shape)
        varying = tuple(
            name for name, axis in zip(reversed(sizes), index, strict=True) if len(np.unique(axis)) > 1
        )
        names = tuple({"tp": "etp", "dp": "edp"}.get(n, n) if expert else n for n in reversed(varying))
        if best is None or len(names) < len(best) or (of_experts and len(names) == len(best)):
            best = names
    return "+".join(best or ())


def compute_time(spans: DeviceSpans) -> Interval:
    """When the device runs any kernel that is not communication."""
    busy = spans.kind != SpanKind.COMMUNICATION
    return union([(spans.start_ns[busy], spans.end_ns[busy])])


def group_uses(program: Program, spans: DeviceSpans, costs: CostModel, layout: Layout) -> list[GroupUse]:
    """Every process group that the program calls, the one with most exposed time first."""
    compute = compute_time(spans)
    of_group: dict[int, list[int]] = {}
    events = program.events
    for i in np.flatnonzero(spans.kind == SpanKind.COMMUNICATION).tolist():
        of_group.setdefault(program.comms[int(events["ref"][spans.row[i]])].group, []).append(i)
    priced = {}
    uses = []
    for group_index, members in of_group.items():
        group: GroupInfo = program.groups[group_index]
        kinds: dict[str, int] = {}
        algorithms: dict[str, int] = {}
        message = calls = 0
        wire = 0.0
        for i in members:
            rows = spans.members.get(i, spans.row[i : i + 1])
            for ref in events["ref"][rows].tolist():
                comm = program.comms[ref]
                if ref not in priced:
                    priced[ref] = costs.price_comm(comm, comm_ranks(program.rank, group, comm), program.rank)
                rule = priced[ref].rule.removeprefix("nccl/")
                kinds[comm.kind] = kinds.get(comm.kind, 0) + 1
                algorithms[rule] = algorithms.get(rule, 0) + 1
                message += comm.nbytes
                wire += priced[ref].bytes
                calls += 1
        at = np.array(members)
        moving = union([(spans.transfer_start_ns[at], spans.end_ns[at])])
        waiting = union([(spans.start_ns[at], spans.transfer_start_ns[at])])
        transfer = measure(moving)
        hidden = overlap(moving, compute)
        uses.append(
            GroupUse(
                dims=dims_of_group(group, layout),
                desc=group.desc or group.name,
                ranks=format_ranks(group.ranks),
                size=len(group.ranks),
                calls=calls,
                kinds=kinds,
                message_bytes=message,
                algorithms=algorithms,
                bus_gb_per_s=wire / transfer if transfer else 0.0,
                transfer_ms=transfer / 1e6,
                exposed_ms=(transfer - hidden) / 1e6,
                hidden_ms=hidden / 1e6,
                waited_ms=measure(waiting) / 1e6,
            )
        )
    return sorted(uses, key=lambda use: -use.exposed_ms)
