"""Host memory of a node, from what its ranks' slices counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prism_plugins.program.job import RankClass
from prism_plugins.program.prediction import Finding, HostMemory
from prism_plugins.program.slices import SliceReport

_GIB = 2**30


def host_memory_of_node(
    classes: Sequence[RankClass],
    reports: Mapping[int, SliceReport],
    *,
    gpus_per_node: int,
    capacity_bytes: int,
) -> HostMemory | None:
    """The node whose ranks hold most, each as the sliced rank of its class; ranks of a class without one count as
    the sliced rank that holds most."""
    if not any(report.host_peak_bytes for report in reports.values()):
        return None
    counts = {
        rank: (report.host_pinned_bytes, report.host_pageable_bytes, report.host_peak_bytes)
        for rank, report in reports.items()
    }
    most = tuple(max(column) for column in zip(*counts.values(), strict=True))
    nodes = 1 + max(int(c.ranks.max()) for c in classes) // gpus_per_node
    totals = np.zeros((nodes, len(most)), dtype=np.int64)
    for c in classes:
        sliced = [counts[rank] for rank in set(c.ranks.tolist()) & set(counts)]
        each = tuple(max(column) for column in zip(*sliced, strict=True)) if sliced else most
        members = np.bincount(c.ranks // gpus_per_node, minlength=nodes)
        totals += members[:, None] * np.array(each, dtype=np.int64)
    pinned, pageable, peak = totals[int(totals[:, 2].argmax())].tolist()
    return HostMemory(
        pinned_bytes=pinned,
        pageable_bytes=pageable,
        peak_bytes=peak,
        capacity_bytes=capacity_bytes,
        untouched_bytes=max(report.untouched_bytes for report in reports.values()),
    )


def host_memory_findings(host: HostMemory | None) -> list[Finding]:
    """Nodes that have less memory than their ranks take."""
    if host is None or host.peak_bytes <= host.capacity_bytes:
        return []
    return [
        Finding(
            kind="host memory",
            severity="error",
            ranks="",
            phase="",
            message=f"the ranks of a node hold {host.peak_bytes / _GIB:.0f} GiB of host tensors at once, of which "
            f"{host.pinned_bytes / _GIB:.0f} GiB stay pinned; the node has {host.capacity_bytes / _GIB:.0f} GiB",
        )
    ]
