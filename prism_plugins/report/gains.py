"""What to change first: each gain found by simulating the job without the cost in question, or by the critical path."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from prism_plugins.costs.altered import Altered, without_host
from prism_plugins.costs.base import CostModel, Price
from prism_plugins.emit.job_view import JobView
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import OpSignature
from prism_plugins.program.prediction import Breakdown, Opportunity
from prism_plugins.report.critical_path import CriticalPath, kind_of_op
from prism_plugins.report.groups import dims_of, dims_of_group

MAX_CANDIDATES = 5
RESIMULATE_UP_TO_ROWS = 300_000 * MAX_CANDIDATES
"""The job is simulated again without as many of the candidates as make so many program rows, over all classes: about a second
for 300,000. By size, not by the time it took: what is told must not depend on what else the machine does."""
_ROWS_PER_RANK = 36
_ROWS_PER_VARIANT = 4_000
"""What a rank, and a program that differs from its class's, take of a simulation (0.12 and 14 ms of CPU in 175B on 8,192 GPUs),
as rows that take as long."""
_WORTH = 0.005
"""Of the iteration; less is not shown."""

_HOST = "the host that issues kernels"
_FAMILIES = {
    "softmax": (
        ("softmax_forward", "softmax_backward"),
        "a fused attention kernel (flash attention) keeps it on chip",
    ),
    "softmax of the loss": (("log_softmax",), "a fused cross entropy"),
    "element-wise ops, copies and fills": (
        ("elementwise", "copy", "cat", "fill", "dropout", "fused"),
        "fuse them: Transformer Engine, torch.compile, or the framework's fused kernels",
    ),
    "norms": (("norm_forward", "norm_backward"), "fused or persistent norm kernels"),
    "embedding, routing and sorting": (
        ("gather", "scatter", "sort", "scan"),
        "fused permutation kernels",
    ),
}
_COMMUNICATION = {
    "tp": "overlap of tensor-parallel communication, or a smaller tp",
    "dp": "overlap of gradient reduction and parameter gathering, or more micro-batches an iteration",
    "pp": "overlap of sends with compute, or fewer stages",
    "ep": "overlap of expert communication, or experts inside a node",
    "cp": "overlap of the ring with attention, or a smaller cp",
}


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    advice: str
    on_path_ms: float
    alter: Callable[[CostModel], Altered] | None


def opportunities(view: JobView, path: CriticalPath, breakdown: Breakdown) -> tuple[Opportunity, ...]:
    """What the iteration could save, largest gain first; nothing that saves less than half a per cent."""
    total_ms = view.timeline.iteration_time_ns / 1e6
    candidates = [c for c in _candidates(view, path) if c.on_path_ms > _WORTH * total_ms]
    candidates.sort(key=lambda c: -c.on_path_ms)
    times_again = RESIMULATE_UP_TO_ROWS // max(_rows(view.job), 1)
    found = []
    for candidate in candidates[:MAX_CANDIDATES]:
        gain, method = candidate.on_path_ms, "critical path"
        if times_again and candidate.alter is not None:
            times_again -= 1
            gain, method = total_ms - _simulated_ms(view, candidate.alter(view.costs)), "re-simulated"
        elif candidate.what == _HOST:
            # The path may follow the host for long where the device is hardly behind it: the device's own work is left.
            gain = min(gain, total_ms - breakdown.compute - breakdown.optimizer)
        found.append(Opportunity(what=candidate.what, advice=candidate.advice, gain_ms=gain, method=method))
    if breakdown.bubble > _WORTH * total_ms and view.job.layout.pp > 1:
        found.append(
            Opportunity(
                what="pipeline bubble",
                advice="more micro-batches, interleaved stages (vpp), evenly loaded stages, or fewer of them",
                gain_ms=breakdown.bubble,
                method="breakdown",
            )
        )
    found.sort(key=lambda o: -o.gain_ms)
    return tuple(o for o in found if o.gain_ms > _WORTH * total_ms)


def _rows(job: JobPrograms) -> int:
    """How much work a simulation is."""
    own = sum(len(cls.exemplar.events) + _ROWS_PER_VARIANT * len(cls.variants) for cls in job.classes)
    return own + _ROWS_PER_RANK * job.layout.world_size


def _candidates(view: JobView, path: CriticalPath) -> Iterable[_Candidate]:
    told_apart = _told_apart(view)
    for name, ms in path.by_kind_ms.items():
        kind, _, dims = name.partition(" ")
        if kind == "communication":
            advice = "; ".join(_COMMUNICATION[d] for d in dims.split("+") if d in _COMMUNICATION)
            if dims == "tp" and not _scatters(view, dims):
                advice = f"sequence parallelism, {advice}"
            yield _Candidate(
                what=f"{dims} communication",
                advice=advice or "overlap it with compute",
                on_path_ms=ms,
                alter=(lambda costs, dims=dims: Altered(costs, comm=_free_comm(view, dims)))
                if dims in told_apart
                else None,
            )
        elif kind == "host":
            yield _Candidate(
                what=_HOST,
                advice="fewer, larger kernels: fusion, CUDA graphs, a larger micro-batch; a faster host",
                on_path_ms=ms,
                alter=without_host,
            )
        elif kind == "optimizer":
            yield _Candidate(
                what="optimizer step",
                advice="a distributed or fused optimizer",
                on_path_ms=ms,
                alter=None,
            )
    for what, (families, advice) in _FAMILIES.items():
        ms = sum(path.by_family_ms.get(family, 0.0) for family in families)
        yield _Candidate(
            what=what,
            advice=advice,
            on_path_ms=ms,
            alter=lambda costs, families=families: Altered(costs, op=_free_ops(families)),
        )


def _simulated_ms(view: JobView, costs: Altered) -> float:
    from prism_plugins.simulate.engine import Simulation

    kept = Simulation.last
    try:
        return Simulation(view.job, costs).timeline.iteration_time_ns / 1e6
    finally:
        Simulation.last = kept


def _told_apart(view: JobView) -> set[str]:
    """Dimensions whose groups have ranks that no group of other dimensions has: prices know a group by its ranks."""
    dims_by_ranks: dict[tuple[int, ...], set[str]] = {}
    for symmetric in view.job.classes:
        for group in symmetric.exemplar.groups:
            dims_by_ranks.setdefault(group.ranks, set()).add(dims_of_group(group, view.job.layout))
    shared = set().union(*(dims for dims in dims_by_ranks.values() if len(dims) > 1))
    return set().union(*dims_by_ranks.values()) - shared


def _scatters(view: JobView, dims: str) -> bool:
    """Whether groups of these dimensions reduce-scatter: over tp that is sequence parallelism."""
    program = view.job.classes[view.timeline.slowest_class].exemplar
    scattering = {comm.group for comm in program.comms if comm.kind == "reduce_scatter"}
    return any(dims_of_group(program.groups[i], view.job.layout) == dims for i in scattering)


def _free_comm(view: JobView, dims: str) -> Callable[[tuple[int, ...], Price], Price]:
    known: dict[tuple[int, ...], bool] = {}

    def change(ranks: tuple[int, ...], price: Price) -> Price:
        if ranks not in known:
            known[ranks] = dims_of(ranks, view.job.layout) == dims
        if not known[ranks]:
            return price
        return msgspec.structs.replace(price, duration_ns=0.0, channels=0, link_share=0.0, bytes=0.0)

    return change


def _free_ops(families: tuple[str, ...]) -> Callable[[OpSignature, Price], Price]:
    def change(signature: OpSignature, price: Price) -> Price:
        return (
            msgspec.structs.replace(price, duration_ns=0.0) if kind_of_op(signature.op) in families else price
        )

    return change
