"""Assembles the prediction from what slices, inference, simulation and the memory stage gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.communicator_init import communicator_start
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.costs.nccl.tables import NVLS_CHANNELS, P2P_CHANNELS
from prism_plugins.costs.nccl.tables import generation as generation_of
from prism_plugins.emit.ranks import format_ranks, join_ranks
from prism_plugins.options import Options
from prism_plugins.program.host_memory import host_memory_findings, host_memory_of_node
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.memory import (
    communicators_of,
    held_back_bytes,
    memory_findings,
    memory_of_classes,
)
from prism_plugins.program.memory_device import DeviceOverhead
from prism_plugins.program.memory_release import IssueTimes
from prism_plugins.program.model import Program
from prism_plugins.program.prediction import (
    Audit,
    Breakdown,
    ClassMemory,
    ClassSummary,
    CommunicatorStart,
    Finding,
    Prediction,
    SliceSummary,
)
from prism_plugins.program.replay import ReplaySummary
from prism_plugins.program.slices import JobFacts, SliceReport
from prism_plugins.simulate.prices import comm_ranks, used_comms
from prism_plugins.simulate.timeline import Timeline
from prism_plugins.world.classes import captured_stages

LAYOUT_KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the earlier stages gave, all that a prediction is made of."""

    options: Options
    cluster: Cluster
    facts: JobFacts
    reports: dict[int, SliceReport]
    """By sliced rank, audited ranks among them."""
    programs: JobPrograms
    costs: CostModel
    timeline: Timeline | None
    """None when the simulation found a fault: the job would not run."""
    memory: tuple[ClassMemory, ...]
    logging_rank: int = -1
    timers_ms: Mapping[str, tuple[float, ...]] = {}
    findings: tuple[Finding, ...] = ()
    """Of the simulation and the audit."""
    replays: tuple[ReplaySummary, ...] = ()
    audit: Audit = Audit()
    assumptions: tuple[str, ...] = ()
    """Beyond those of the slices and the cost model."""


def predict_memory(
    programs: JobPrograms,
    cluster: Cluster,
    reports: Mapping[int, SliceReport],
    costs: CostModel,
    *,
    timeline: Timeline | None,
    nccl: NcclSettings | None = None,
) -> tuple[ClassMemory, ...]:
    """Memory of every class; that of sliced ones by their slice's own ledger."""

    def held_of(rank_class: RankClass) -> int:
        if timeline is None:
            return 0
        from prism_plugins.program.infer import program_of
        from prism_plugins.simulate.engine import op_times

        rank = rank_class.exemplar.rank
        times = op_times(programs, costs, timeline, rank)
        return held_back_bytes(
            program_of(programs, rank), IssueTimes(times.host_ns, times.start_ns, times.end_ns)
        )

    return memory_of_classes(
        programs.classes,
        ranks=[format_ranks(c.ranks) for c in programs.classes],
        capacity_bytes=cluster.gpu.memory_bytes,
        ledgers=reports,
        overhead=device_overhead(cluster, nccl or NcclSettings()),
        nvls_groups=lambda program: nvls_groups(program, costs),
        held_of=held_of,
    )


def communicator_start_of(
    classes: Sequence[RankClass],
    cluster: Cluster,
    memory: Sequence[ClassMemory],
    reports: Mapping[int, SliceReport],
) -> CommunicatorStart | None:
    """The class that takes longest to open its communicators; of equal ones the first."""
    starts = []
    for rank_class, held in zip(classes, memory, strict=True):
        uses = communicators_of(rank_class, reports, gpus_per_domain=cluster.gpus_per_domain)
        nbytes = sum(size for name, size in held.outside_torch.items() if name.startswith("nccl"))
        if uses:
            starts.append(communicator_start(uses, num_bytes=nbytes, ranks=held.ranks))
    return max(starts, key=lambda start: start.init_seconds, default=None)


def device_overhead(cluster: Cluster, nccl: NcclSettings) -> DeviceOverhead:
    """Memory outside torch's allocator on this cluster."""
    generation = generation_of(cluster.gpu.capability)
    return DeviceOverhead(
        channels=nccl.clamp_channels(P2P_CHANNELS),
        nvls_channels=nccl.clamp_channels(NVLS_CHANNELS[generation]),
        nics_per_gpu=cluster.node.num_nics / cluster.node.num_gpus,
        gpus_per_domain=cluster.gpus_per_domain,
    )


def nvls_groups(program: Program, costs: CostModel) -> set[int]:
    """Indices of the groups in which some collective of the program takes NVLS."""
    groups = set()
    for i in used_comms(program).tolist():
        comm = program.comms[i]
        if comm.group in groups or comm.kind in ("send", "recv"):
            continue
        ranks = comm_ranks(program.rank, program.groups[comm.group], comm)
        if "/NVLS" in costs.price_comm(comm, ranks, program.rank).rule:
            groups.add(comm.group)
    return groups


def predict(evidence: Evidence) -> Prediction:
    """The prediction of the whole job."""
    facts, timeline = evidence.facts, evidence.timeline
    layout = msgspec.structs.asdict(facts.layout)
    world = facts.layout.world_size
    seconds = timeline.iteration_time_ns / 1e9 if timeline is not None else 0.0
    tflops = _rate(model_flops(facts, evidence.reports) / 1e12, seconds * world)
    host = host_memory_of_node(
        evidence.programs.classes,
        evidence.reports,
        gpus_per_node=evidence.cluster.gpus_per_node,
        capacity_bytes=evidence.cluster.host.memory_bytes,
    )
    return Prediction(
        framework=facts.framework,
        world_size=world,
        layout={key: layout[key] for key in LAYOUT_KEYS},
        num_microbatches=facts.layout.num_microbatches,
        cluster=evidence.cluster.name,
        device=evidence.options.device,
        cost_model=evidence.costs.name,
        iteration_time_ms=seconds * 1e3,
        tokens_per_s_per_gpu=_rate(facts.tokens_per_iteration, seconds * world),
        tflops_per_gpu=tflops,
        mfu=_mfu(tflops, evidence.cluster),
        samples_per_s=_rate(facts.samples_per_iteration, seconds),
        timers_ms=dict(evidence.timers_ms),
        logging_rank=evidence.logging_rank,
        breakdown_ms=timeline.breakdown[timeline.slowest_class] if timeline is not None else _NO_TIME,
        slowest_rank=timeline.slowest_rank if timeline is not None else -1,
        memory=evidence.memory,
        communicators=communicator_start_of(
            evidence.programs.classes, evidence.cluster, evidence.memory, evidence.reports
        ),
        host_memory=host,
        slices=tuple(_slice(rank, report) for rank, report in sorted(evidence.reports.items())),
        classes=_classes(evidence),
        findings=(
            *evidence.findings,
            *merged_findings(evidence.reports),
            *memory_findings(evidence.memory, data_parallel=facts.layout.dp * facts.layout.cp),
            *host_memory_findings(host),
            *_unsteady(evidence.reports),
        ),
        unpriced_ops=dict(timeline.unpriced) if timeline is not None else {},
        synthesized_reads=sum(report.synthesized_reads for report in evidence.reports.values()),
        assumptions=_assumptions(evidence),
        replay=evidence.replays,
        audit=evidence.audit,
        simulate_seconds=timeline.seconds if timeline is not None else 0.0,
    )


_NO_TIME = Breakdown(compute=0.0, exposed_communication=0.0, bubble=0.0, host=0.0, optimizer=0.0)


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None


def _mfu(tflops: float | None, cluster: Cluster) -> float | None:
    """Model FLOPs utilisation against the data sheet's dense bf16 peak, whatever precision the job computes in."""
    peak = cluster.gpu.peak_flops.get("bfloat16")
    return tflops * 1e12 / peak if tflops and peak else None


def _slice(rank: int, report: SliceReport) -> SliceSummary:
    return SliceSummary(
        rank=rank,
        seconds=report.seconds,
        ops=report.num_ops,
        collectives=report.num_comms,
        cached=report.cached,
    )


def _classes(evidence: Evidence) -> tuple[ClassSummary, ...]:
    """One line per class; ``inferred`` where members follow a sliced one by symmetry."""
    summaries = []
    for c in evidence.programs.classes:
        source = c.exemplar.source
        if source != "derived":
            source = "sliced" if set(c.ranks.tolist()) <= set(evidence.reports) else "inferred"
        summaries.append(
            ClassSummary(
                name=c.name,
                ranks=format_ranks(c.ranks),
                num_ranks=len(c.ranks),
                representative=c.representative,
                source=source,
            )
        )
    return tuple(summaries)


def merged_findings(reports: Mapping[int, SliceReport]) -> list[Finding]:
    """What slices found, once each, with the ranks of all slices that found it."""
    found: dict[Finding, list[str]] = {}
    for _, report in sorted(reports.items()):
        for finding in report.findings:
            found.setdefault(msgspec.structs.replace(finding, ranks=""), []).append(finding.ranks)
    return [
        msgspec.structs.replace(finding, ranks=join_ranks(ranks) if all(ranks) else "")
        for finding, ranks in found.items()
    ]


def model_flops(facts: JobFacts, reports: Mapping[int, SliceReport]) -> float:
    """Model FLOPs of an iteration, 0 if unknown: the lead's, or the sum over pipeline stages where each slice tells
    its own."""
    if facts.model_flops_per_iteration:
        return facts.model_flops_per_iteration
    of_stage: dict[int, float] = {}
    for rank, report in reports.items():
        if report.facts is not None:
            stage = facts.layout.coords(rank)["pp"]
            of_stage[stage] = report.facts.stages[stage].flops_per_token
    per_stage = [of_stage.get(s, of_stage.get(c, 0.0)) for s, c in enumerate(captured_stages(facts.stages))]
    return sum(per_stage) * facts.tokens_per_iteration if all(per_stage) else 0.0


def _unsteady(reports: dict[int, SliceReport]) -> list[Finding]:
    ranks = sorted(rank for rank, report in reports.items() if not report.steady)
    if not ranks:
        return []
    return [
        Finding(
            kind="unsteady",
            severity="warning",
            ranks=format_ranks(ranks),
            phase="",
            message="no two iterations in a row were equal; the prediction is for the last one run "
            "(more --prism-iterations may settle it)",
        )
    ]


def _overlap(timeline: Timeline | None) -> list[str]:
    """What overlap costs, where it costs something."""
    lines = []
    if timeline is not None and timeline.slowdown_ns:
        lines.append(
            f"kernels beside collectives and other streams take up to {timeline.slowdown_ns / 1e6:.1f} ms longer an iteration: "
            "each NCCL channel holds an SM, HBM is shared, kernels of several streams take turns; modelled, not measured"
        )
    if timeline is not None and timeline.crowding_ns:
        lines.append(
            f"concurrent transfers on one link share it fairly: up to {timeline.crowding_ns / 1e6:.1f} ms longer an iteration"
        )
    return lines


def _approximations(programs: JobPrograms) -> Iterator[str]:
    """Ranks that run a similar rank's program."""
    for c in programs.classes:
        if c.approximated:
            yield (
                f"{c.name}: {len(c.approximated)} of {len(c.ranks)} ranks own parameter fragments that no slice owns; "
                "they run the most similar slice's program (communication equal, sizes of copies differ)"
            )


def _assumptions(evidence: Evidence) -> tuple[str, ...]:
    """In order, once each: of the slices, of the inference, of the cost model."""
    lines: Sequence[str] = [
        *(line for _, report in sorted(evidence.reports.items()) for line in report.assumptions),
        *evidence.assumptions,
        *_approximations(evidence.programs),
        *evidence.costs.assumptions(),
        *_overlap(evidence.timeline),
    ]
    return tuple(dict.fromkeys(lines))
