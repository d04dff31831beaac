"""How fast the host issues work, from the CPU time that slices took to run the same Python.

A slice runs the user's script, its framework and torch's dispatcher as the target's process does; kernels cost it
next to nothing. So the CPU time of a steady iteration in a slice says how long the host needs to issue it, which no
constant per op can: ZeRO-3's hooks make a kernel six times as costly to issue as ZeRO-1 does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec
import numpy as np

from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.in_situ import InSituCosts
from prism_plugins.costs.modelled import ModelledCosts
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.measured import Measured
from prism_plugins.program.model import EventKind, Program
from prism_plugins.program.slices import SliceReport
from prism_plugins.simulate.prices import Pricer


def with_host_of_slices(cluster: Cluster, job: JobPrograms, reports: Mapping[int, SliceReport]) -> Cluster:
    """The cluster with its assumed host times scaled to what the slices took, times ``host.slice_factor``.

    Unchanged where the cluster's description gives host times. ``reports`` are by sliced rank, of slices on the
    virtual device: elsewhere CPU time is kernels as well.
    """
    host = cluster.host
    if not host.from_slices:
        return cluster
    # The first iteration builds what later ones reuse. Of the others the least disturbed one counts.
    seconds = {
        rank: min(report.cpu_seconds_per_iteration[1:], default=0.0) for rank, report in reports.items()
    }
    return _scaled(cluster, job, seconds, Pricer(ModelledCosts(cluster)), factor=host.slice_factor)


def with_host_measured(cluster: Cluster, job: JobPrograms, measured: Mapping[int, Measured]) -> Cluster:
    """The same for slices on a real GPU, by rank: they measured what the host takes to issue an iteration, driver
    included, so nothing is left for a factor to correct."""
    if not cluster.host.from_slices:
        return cluster
    seconds = {rank: one.host_ms / 1e3 for rank, one in measured.items()}
    costs = InSituCosts(ModelledCosts(cluster), cluster, measured.values())
    return _scaled(cluster, job, seconds, Pricer(costs), factor=1.0)


def _scaled(
    cluster: Cluster, job: JobPrograms, seconds: Mapping[int, float], pricer: Pricer, *, factor: float
) -> Cluster:
    host = cluster.host
    ratios = []
    for cls in job.classes:
        if cls.exemplar.source == "derived":
            continue
        steady = seconds.get(cls.representative, 0.0)
        assumed = _assumed_seconds(cls.exemplar, pricer)
        if steady and assumed:
            ratios.append(steady / assumed)
    if not ratios:
        return cluster
    scale = statistics.median(ratios) * factor
    measured = msgspec.structs.replace(
        host,
        op_us=_rounded(host.op_us * scale),
        view_us=_rounded(host.view_us * scale),
        comm_us=_rounded(host.comm_us * scale),
        measured_in_slices=True,
    )
    return msgspec.structs.replace(cluster, host=measured)


def _assumed_seconds(program: Program, pricer: Pricer) -> float:
    """Host time of an iteration by the cluster's constants: kernels, views and collectives."""
    prices, events = pricer.price(program), program.events
    total = 0.0
    for kind, host_ns in ((EventKind.KERNEL, prices.op_host_ns), (EventKind.COMM, prices.comm_host_ns)):
        counts = np.bincount(events["ref"][events["kind"] == kind], minlength=len(host_ns))
        total += float(counts @ host_ns) if len(host_ns) else 0.0
    return total * 1e-9


def _rounded(us: float) -> float:
    """Three significant digits: CPU times are no better."""
    return float(f"{us:.3g}")
