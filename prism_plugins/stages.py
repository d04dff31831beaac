"""The stages after the slices, as the conductor and the ``prism`` command call them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.in_situ import InSituCosts
from prism_plugins.costs.model import build_cost_model, host_of
from prism_plugins.costs.nccl.settings import NcclSettings
from prism_plugins.errors import CannotDeriveError, PrismError, SliceFailed
from prism_plugins.host_speed import with_host_measured, with_host_of_slices
from prism_plugins.integration import Integration
from prism_plugins.program.derived import DerivedStages
from prism_plugins.program.infer import infer_job
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.measured import Measured
from prism_plugins.program.prediction import Audit, ClassMemory, Finding, Prediction
from prism_plugins.program.slices import JobFacts, SliceReport
from prism_plugins.program.store import load_program
from prism_plugins.rundir import RunDir, read_json
from prism_plugins.simulate.timeline import Timeline
from prism_plugins.world.audit import audit_ranks, summarize


def infer(
    facts: JobFacts,
    reports: Callable[[], Mapping[int, SliceReport]],
    rundir: RunDir,
    *,
    slice_more: Callable[[tuple[int, ...], tuple[int, ...]], None],
    note: Callable[[str], None] = lambda text: None,
) -> JobPrograms:
    """Programs of all ranks; what cannot be derived is sliced with ``slice_more`` and tried again (its second
    argument: ranks whose slices have to be repeated), and why is said by ``note``.

    Raises:
        PrismError: it cannot, and ranks made other groups or called other collectives before training.
        SliceFailed: it cannot be derived from the slices of the very ranks that were asked for.
    """
    repeated: set[int] = set()
    while True:
        sliced = reports()
        programs = {rank: load_program(rundir.slice(rank).program) for rank in sliced}
        derived = DerivedStages(rundir.derived)
        try:
            job = infer_job(facts, sliced, programs, derived=derived)
            derived.save()
            return job
        except CannotDeriveError as error:
            missing = tuple(rank for rank in error.ranks if rank not in sliced)
            again = tuple(rank for rank in error.again if rank not in repeated)
            if not missing and not again:
                from prism_plugins.checks.startup import startup_findings

                if wrong := [f for f in startup_findings(sliced) if f.severity == "error"]:
                    raise PrismError(f"ranks do not set up the same job: {wrong[0].message}") from error
                raise SliceFailed(
                    f"prism: error: the programs of all ranks cannot be derived: {error}"
                ) from error
            repeated.update(again)
            more = len({*missing, *again})
            note(f"{more} more {'rank is' if more == 1 else 'ranks are'} sliced: {error}")
            slice_more(missing, again)


def audit(programs: JobPrograms, ranks: Collection[int], rundir: RunDir) -> tuple[Audit, tuple[Finding, ...]]:
    """Compare the inferred programs of audited ranks with their slices; a finding for each that differs."""
    audits = audit_ranks(programs, {rank: load_program(rundir.slice(rank).program) for rank in ranks})
    findings = tuple(
        Finding(kind="audit", severity="error", ranks=str(a.rank), phase="", message=a.message)
        for a in audits
        if not a.matched
    )
    return summarize(audits), findings


def with_audited(
    programs: JobPrograms,
    facts: JobFacts,
    reports: Callable[[], Mapping[int, SliceReport]],
    rundir: RunDir,
    slice_more: Callable[[tuple[int, ...], tuple[int, ...]], None],
) -> JobPrograms:
    """The programs again, with audited ranks (among ``reports``) as they really are; as they were, where that cannot be
    derived."""
    try:
        return infer(facts, reports, rundir, slice_more=slice_more)
    except SliceFailed:
        return programs


def simulate(programs: JobPrograms, costs: CostModel) -> tuple[Timeline | None, tuple[Finding, ...]]:
    """The timeline, or None and the finding that tells why the job would not run."""
    from prism_plugins.simulate import engine
    from prism_plugins.simulate.faults import SimulationFault

    try:
        return engine.simulate(programs, costs), ()
    except SimulationFault as fault:
        return None, (fault.finding(),)


def price(
    cluster: Cluster,
    programs: JobPrograms,
    reports: Mapping[int, SliceReport],
    rundir: RunDir,
    *,
    device: str,
    nccl: NcclSettings,
    calibration: Calibration | Literal["none"] | None,
) -> tuple[Cluster, CostModel]:
    """The cluster with the host's speed as slices on ``device`` found it, and the cost model: what slices on a real GPU
    measured counts before any calibration."""
    known = cluster.host.measured_in_slices  # a run's own cluster, read again
    if device == "virtual" and not known:
        cluster = with_host_of_slices(cluster, programs, reports, host_of(calibration, cluster))
    if device != "cuda":
        return cluster, build_cost_model(cluster, nccl=nccl, calibration=calibration)
    measured = {rank: read_json(rundir.slice(rank).measured, Measured) for rank in reports}
    if not known:
        cluster = with_host_measured(cluster, programs, measured)
    base = build_cost_model(cluster, nccl=nccl, calibration=calibration)
    return cluster, InSituCosts(base, cluster, measured.values())


def check(
    programs: JobPrograms,
    facts: JobFacts,
    reports: Mapping[int, SliceReport],
    *,
    cluster: Cluster,
    timeline: Timeline | None,
    faults: tuple[Finding, ...],
    memory: Collection[ClassMemory],
    environment: Mapping[str, str],
    moe_load: str,
) -> tuple[Finding, ...]:
    """What is wrong or doubtful about the job, ``faults`` of the simulation among it."""
    from prism_plugins.checks.job import check_job

    return check_job(
        programs,
        facts,
        reports,
        cluster=cluster,
        timeline=timeline,
        faults=faults,
        memory=memory,
        environment=environment,
        moe_load=moe_load,
    )


def check_strict(timeline: Timeline) -> None:
    """Raise :class:`PrismError` naming the ops that no rule prices."""
    if timeline.unpriced:
        worst = sorted(timeline.unpriced.items(), key=lambda item: -item[1])[:5]
        names = ", ".join(f"{name} ({count})" for name, count in worst)
        raise PrismError(f"--prism-strict: {len(timeline.unpriced)} ops have no cost rule: {names}")


def logging_rank(reports: Mapping[int, SliceReport]) -> int:
    """The sliced rank that printed most of the framework's log lines, the last of several; -1 when none did."""
    rank, report = max(reports.items(), key=lambda item: (len(item[1].log_lines), item[0]))
    return rank if report.log_lines else -1


def timer_spans(
    programs: JobPrograms, costs: CostModel, timeline: Timeline | None, rank: int, report: SliceReport | None
) -> dict[str, tuple[float, ...]]:
    """What the framework's own timers would show on a sliced rank, ms; empty when the job would not run."""
    if timeline is None or report is None or not report.timers:
        return {}
    from prism_plugins.program.infer import program_of
    from prism_plugins.simulate.clocks import timer_spans_ms
    from prism_plugins.simulate.engine import op_times

    return timer_spans_ms(
        program_of(programs, rank), op_times(programs, costs, timeline, rank), report.timers
    )


def rewrite_log(facts: JobFacts, reports: Mapping[int, SliceReport], prediction: Prediction) -> list[str]:
    """The framework's own log lines at target scale, from the rank that printed them."""
    if prediction.logging_rank < 0:
        return []
    lines = reports[prediction.logging_rank].log_lines
    return integration_named(facts.framework).rewrite_log(lines, prediction)


def integration_named(framework: str) -> Integration:
    """The integration of a framework by the name it gave in its facts."""
    for point in importlib.metadata.entry_points(group="prism_plugins.integrations"):
        if point.name == framework:
            return point.load()()
    raise PrismError(f"no integration for {framework} is installed")
