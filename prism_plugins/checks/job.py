"""All checks of a job, in the order in which the report shows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prism_plugins.checks.calls import calls_of_job
from prism_plugins.checks.communicators import communicator_findings
from prism_plugins.checks.expert_load import expert_load_findings
from prism_plugins.checks.layout import layout_findings
from prism_plugins.checks.matching import matching_findings
from prism_plugins.checks.ordering import ordering_findings
from prism_plugins.checks.startup import startup_findings
from prism_plugins.costs.cluster import Cluster
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.prediction import ClassMemory, Finding
from prism_plugins.program.slices import JobFacts, SliceReport
from prism_plugins.simulate.timeline import Timeline


def check_job(
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
    """Findings of the programs of all ranks, of their start, their layout and their communicators.

    ``faults`` are what the simulation found. Where calls do not match, the simulation stops at the first that does not;
    the comparison of all groups tells more and takes its place.
    """
    calls = calls_of_job(programs)
    wrong = matching_findings(calls)
    return (
        *(wrong or faults),
        *(() if wrong else ordering_findings(calls)),
        *startup_findings(reports),
        *layout_findings(facts, programs, cluster, timeline, environment),
        *expert_load_findings(facts.layout, list(memory), moe_load),
        *communicator_findings(list(memory)),
    )
