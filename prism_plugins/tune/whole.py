"""Points that are probed as whole jobs: what a rank does with a few micro-batches, extended to all of them.

Where every rank runs the same program (ZeRO, tensor parallelism by DeepSpeed), one slice tells the whole job: it is simulated
with every rank as rank 0. An iteration is linear in its micro-batches from the second one on, so two short ones give a long one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.errors import PrismError
from prism_plugins.integration.tuning import Whole
from prism_plugins.predict import nvls_groups
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.memory import memory_of_classes
from prism_plugins.program.memory_device import DeviceOverhead
from prism_plugins.program.model import EventKind, Program
from prism_plugins.program.slices import JobFacts, SliceReport
from prism_plugins.simulate.engine import simulate
from prism_plugins.simulate.faults import SimulationFault
from prism_plugins.tune.compose import Estimate, estimate_of_parts

_ARITHMETIC_INTENSITY = 16
"""FLOPs a byte from which on an op counts as a matrix product or attention."""


class WholeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A point with few micro-batches."""

    by_microbatches: dict[int, Estimate]


def estimate_whole(
    program: Program, report: SliceReport, facts: JobFacts, costs: CostModel, overhead: DeviceOverhead
) -> Estimate:
    """Time and memory of the job in which every rank runs this slice's program.

    Raises :class:`PrismError` where such a job would not run.
    """
    ranks = np.arange(facts.layout.world_size)
    cls = RankClass(name="all", ranks=ranks, representative=program.rank, exemplar=program)
    try:
        timeline = simulate(JobPrograms(layout=facts.layout, classes=(cls,)), costs)
    except SimulationFault as fault:
        raise PrismError(fault.finding().message) from None
    memory = memory_of_classes(
        (cls,),
        ranks=("all",),
        capacity_bytes=0,
        ledgers={program.rank: report},
        overhead=overhead,
        nvls_groups=lambda program: nvls_groups(program, costs),
    )[0]
    used = memory.peak_allocated_bytes + memory.device_used_bytes - memory.peak_reserved_bytes
    return estimate_of_parts(
        timeline.iteration_time_ns * 1e-6, timeline.breakdown[0], used, source="composed"
    )


def extended(whole: Whole, costs: WholeCosts) -> Estimate:
    """The point with all its micro-batches."""
    known: Mapping[int, Estimate] = costs.by_microbatches
    wanted = whole.num_microbatches
    if wanted in known:
        return msgspec.structs.replace(known[wanted], source="composed")
    (few, short), (more, long) = sorted(known.items())
    factor = (wanted - few) / (more - few)

    def line(field: str) -> float:
        a, b = getattr(short, field), getattr(long, field)
        return max(0.0, a + (b - a) * factor)

    times = {field: line(field) for field in Estimate.__struct_fields__ if field.endswith("_ms")}
    return Estimate(**times, memory_bytes=max(short.memory_bytes, long.memory_bytes), source="composed")


def matrix_flops(program: Program, costs: CostModel, num_microbatches: int) -> float:
    """FLOPs of the matrix products and the attention in forward and backward of a program, by micro-batch."""
    total = 0.0
    flops = _flops_of(program, costs)
    for phase, lo, hi in program.iter_phases():
        if phase.kind in ("forward", "backward"):
            events = program.events[lo:hi]
            total += float(flops[events["ref"][events["kind"] == EventKind.KERNEL]].sum())
    return total / num_microbatches


def _flops_of(program: Program, costs: CostModel) -> np.ndarray:
    prices = [costs.price_op(signature) for signature in program.signatures]
    return np.array([p.flops if p.flops > _ARITHMETIC_INTENSITY * p.bytes else 0.0 for p in prices])
