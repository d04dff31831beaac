"""How fast the target's host issues work, from the CPU time that slices took to run the same Python.

A slice runs the user's script, its framework and torch's dispatcher as the target's process does. So its CPU time says
how long that takes, which no constant per op can: ZeRO-3's hooks make a kernel six times as costly to issue as ZeRO-1
does. Two things differ on the target: its CPU, and that calls on the device go through kernels' host code and a driver
where a slice only records. Both are measured by :mod:`prism_plugins.host_benchmark`, in the slice, right after the
iteration that is scaled, and on the machine with the GPU, in a process that trains there; figures of a process of its own
(``prism calibrate --host`` before 2026-12-01) are taken to be as much shorter as they were where both were measured:

    host time = (CPU time - sum over kinds: calls x call in the slice) x dispatch there / dispatch here
                + sum over kinds: calls x call there
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from prism_plugins.costs.calibration import HostCosts
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.host import enqueue_kind
from prism_plugins.costs.in_situ import InSituCosts
from prism_plugins.costs.modelled import ModelledCosts
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.measured import Measured
from prism_plugins.program.model import EventKind, Program
from prism_plugins.program.slices import HostFigures, SliceReport
from prism_plugins.simulate.prices import Pricer

DISPATCH_IN_TRAINING = 1.55
"""How many times as long a step of the benchmark takes in a process that trains as in one of its own: 2,699 us (median after 8
iterations of 1.1 s of a Megatron job, 1,817 to 3,022) against 1,743 us on the same host with an H200, 2026-12-01
(tests/data/megatron_h200_host_in_training.json)."""
ENQUEUE_IN_TRAINING = 1.38
"""The same of calls on the device: median of 15 kinds (1.02 to 1.75; GEMM 18.4 against 12.8 us), same process, same day."""
BUSY = 1.15
"""Slices whose iterations took so many times their CPU time shared their machine: up to 1.1 on an idle one, 1.3 to 2.5 with as
many busy processes as cores."""


def with_host_of_slices(
    cluster: Cluster, job: JobPrograms, reports: Mapping[int, SliceReport], target: HostCosts | None
) -> Cluster:
    """The cluster with its assumed host times scaled to what the slices took and what calls on a device take.

    Unchanged where the cluster's description gives host times. ``reports`` are by sliced rank, of slices on the
    virtual device: elsewhere CPU time is kernels as well. ``target``: the host of the calibration; without one, or
    where it was measured by another version of the benchmark, the target's host is taken as the machine of the slices.
    """
    host = cluster.host
    if not host.from_slices:
        return cluster
    there = _comparable(target, reports.values(), given=bool(host.slice_factor))
    bare = _without_calls(cluster)
    pricer = Pricer(ModelledCosts(bare))
    found = [
        (seconds * ratio, ratio, cls.exemplar)
        for cls in job.classes
        if cls.exemplar.source != "derived" and cls.representative in reports
        for seconds, ratio in _iterations(cls.exemplar, reports[cls.representative], there, host.slice_factor)
    ]
    scaled = _scaled(bare, [(seconds, program) for seconds, _, program in found], pricer)
    if scaled is bare:
        return cluster
    stretch = _stretch(reports.values())
    ratio = statistics.median(ratio for _, ratio, _ in found)
    measured = msgspec.structs.replace(
        scaled.host,
        slice_factor=_rounded(ratio),
        enqueue_us=dict(there.enqueue_us) if there is not None else {},
        stretch=_rounded(stretch),
        source=_source(ratio, host.slice_factor, target if there is not None else None)
        + _doubts(scaled.host.spread, stretch),
    )
    return msgspec.structs.replace(scaled, host=measured)


def with_host_measured(cluster: Cluster, job: JobPrograms, measured: Mapping[int, Measured]) -> Cluster:
    """The same for slices on a real GPU, by rank: they measured what the host takes to issue an iteration, driver
    included, so nothing is left to correct."""
    if not cluster.host.from_slices:
        return cluster
    found = [
        (measured[cls.representative].host_ms / 1e3, cls.exemplar)
        for cls in job.classes
        if cls.exemplar.source != "derived" and cls.representative in measured
    ]
    bare = _without_calls(cluster)
    scaled = _scaled(bare, found, Pricer(InSituCosts(ModelledCosts(bare), bare, measured.values())))
    if scaled is bare:
        return cluster
    source = "measured in the slices on a GPU"
    return msgspec.structs.replace(scaled, host=msgspec.structs.replace(scaled.host, source=source))


def _without_calls(cluster: Cluster) -> Cluster:
    """The cluster with nothing on top of its times per op, which are to be scaled."""
    return msgspec.structs.replace(cluster, host=msgspec.structs.replace(cluster.host, enqueue_us={}))


def _scaled(cluster: Cluster, found: list[tuple[float, Program]], pricer: Pricer) -> Cluster:
    """The cluster's assumed host times scaled to seconds found for iterations of programs."""
    assumed = [(seconds, _assumed_seconds(program, pricer)) for seconds, program in found]
    scales = [seconds / expected for seconds, expected in assumed if seconds and expected]
    if not scales:
        return cluster
    host, scale = cluster.host, statistics.median(scales)
    low, high = np.percentile(scales, (16, 84)).tolist()
    spread = (high - low) / 2 / scale
    times = {name: _rounded(getattr(host, name) * scale) for name in ("op_us", "view_us", "comm_us")}
    return msgspec.structs.replace(
        cluster, host=msgspec.structs.replace(host, measured_in_slices=True, spread=round(spread, 3), **times)
    )


def _comparable(
    target: HostCosts | None, reports: Iterable[SliceReport], *, given: bool
) -> HostFigures | None:
    """The target's figures, where every slice has such of its own machine, or a factor was given."""
    there = _in_training(target.benchmark) if target is not None and target.benchmark is not None else None
    if there is None or given:
        return there
    same = all(r.host is not None and r.host.version == there.version for r in reports)
    return there if same else None


def _in_training(figures: HostFigures) -> HostFigures:
    if figures.in_training:
        return figures
    return msgspec.structs.replace(
        figures,
        dispatch_us=tuple(us * DISPATCH_IN_TRAINING for us in figures.dispatch_us),
        enqueue_us={kind: round(us * ENQUEUE_IN_TRAINING, 3) for kind, us in figures.enqueue_us.items()},
        in_training=True,
    )


def _iterations(
    program: Program, report: SliceReport, there: HostFigures | None, factor: float
) -> Iterator[tuple[float, float]]:
    """Of each iteration: seconds without the calls on the device, and how many times as long the target takes for them.

    The first iteration builds what later ones reuse. Where the slice ran no benchmark the least disturbed one counts.
    """
    here = report.host
    steady = report.cpu_seconds_per_iteration[1:]
    calls = seconds_of_calls(program, here.enqueue_us) if here is not None and there is not None else 0.0
    if here is None or there is None or factor:
        if steady:
            yield max(0.0, min(steady) - calls), factor or 1.0
        return
    for cpu, before, after in zip(steady, here.dispatch_us, here.dispatch_us[1:], strict=False):
        yield max(0.0, cpu - calls), there.dispatch_us[0] / ((before + after) / 2)


def seconds_of_calls(program: Program, enqueue_us: Mapping[str, float]) -> float:
    """What a program's calls on the device cost by a table of microseconds by kind."""
    events = program.events
    used = np.bincount(events["ref"][events["kind"] == EventKind.KERNEL], minlength=len(program.signatures))
    us = sum(
        int(n) * enqueue_us.get(enqueue_kind(s.op), 0.0)
        for n, s in zip(used, program.signatures, strict=False)
        if n
    )
    us += int((events["kind"] == EventKind.COMM).sum()) * enqueue_us.get("collective", 0.0)
    return us * 1e-6


def _source(ratio: float, factor: float, target: HostCosts | None) -> str:
    if factor:
        text = f"CPU time of the slices times host.slice_factor = {factor:g}"
    elif target is None:
        return "CPU time of the slices on this machine; what the CUDA driver takes is not in it"
    else:
        text = f"CPU time of the slices times {ratio:.2f}, by which the host benchmark takes longer on {target.cpu or 'the calibrated host'}"
    return text if target is None else f"{text}; calls on the device as measured there"


def _stretch(reports: Iterable[SliceReport]) -> float:
    """How many times their CPU time iterations took; 1 where that is not known."""
    of_iterations = [
        wall / cpu
        for report in reports
        for wall, cpu in zip(
            report.seconds_per_iteration[1:], report.cpu_seconds_per_iteration[1:], strict=False
        )
        if cpu
    ]
    return statistics.median(of_iterations) if of_iterations else 1.0


def _doubts(spread: float, stretch: float) -> str:
    text = f" (iterations differ by ±{100 * spread:.0f} %)"
    if stretch > BUSY:
        text += (
            f"; this machine was busy: iterations took {stretch:.1f} times their CPU time, which makes host times rough "
            "(emulate on a quiet machine, or give [host] op_us)"
        )
    return text


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
