"""Layouts that waste the cluster: groups across nodes, pipelines that idle or are out of balance, overlap that cannot
happen."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from prism_plugins.checks.calls import few
from prism_plugins.costs.cluster import Cluster
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import EventFlag, EventKind, Program
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import JobFacts
from prism_plugins.simulate.timeline import Timeline
from prism_plugins.world.layout import Layout

_UNBALANCED = 1.10
"""Compute of the busiest stage over the mean, from where it is worth a word."""


def layout_findings(
    facts: JobFacts,
    job: JobPrograms,
    cluster: Cluster,
    timeline: Timeline | None,
    environment: Mapping[str, str],
) -> list[Finding]:
    """Warnings about the layout."""
    found = [*_across_nodes(facts.layout, cluster), *_few_microbatches(facts.layout)]
    if timeline is not None:
        found += _balance(facts, job, timeline)
    return [*found, *_connections(job, cluster, environment)]


def _across_nodes(layout: Layout, cluster: Cluster) -> list[Finding]:
    """Tensor-parallel groups whose members do not share an NVLink domain."""
    if layout.tp == 1 or layout.world_size <= cluster.gpus_per_domain:
        return []
    axes = list(reversed(layout.sizes()))
    groups = (
        np.moveaxis(layout.grid(), axes.index("tp"), -1).reshape(-1, layout.tp) // cluster.gpus_per_domain
    )
    broken = np.flatnonzero((groups != groups[:, :1]).any(axis=1))
    if not len(broken):
        return []
    return [
        Finding(
            kind="layout",
            severity="warning",
            message=f"tensor parallelism of {layout.tp} crosses nodes of {cluster.gpus_per_domain} GPUs in {len(broken)} of "
            f"{len(groups)} groups: its collectives, several a layer, go over the network; choose a tp that divides "
            f"{cluster.gpus_per_domain}",
        )
    ]


def _few_microbatches(layout: Layout) -> list[Finding]:
    pp, m = layout.pp, layout.num_microbatches
    if pp == 1 or m >= pp:
        return []
    return [
        Finding(
            kind="layout",
            severity="warning",
            message=f"{m} micro-batches for {pp} pipeline stages: at least {(pp - 1) / (m + pp - 1):.0%} of the iteration is "
            f"pipeline bubble; use {pp} or more (a larger global batch, or a smaller micro-batch or dp)",
        )
    ]


def _balance(facts: JobFacts, job: JobPrograms, timeline: Timeline) -> list[Finding]:
    """Stages that compute much more than others; with a better split where layers can be moved."""
    layout = facts.layout
    if layout.pp == 1:
        return []
    busy = np.zeros(layout.pp)
    for cls, breakdown in zip(job.classes, timeline.breakdown, strict=True):
        stage = layout.coords(int(cls.ranks[0]))["pp"]
        busy[stage] = max(busy[stage], breakdown.compute)
    idle = [s for s, stage in enumerate(facts.stages) if stage.fingerprint == "nothing"]
    found = []
    if idle:
        found.append(
            Finding(
                kind="layout",
                severity="warning",
                message=f"pipeline stages {few(idle)} hold no layers and idle; use fewer stages or another split",
            )
        )
    mean = float(busy.mean())
    if mean <= 0 or busy.max() < _UNBALANCED * mean:
        return found
    worst = int(busy.argmax())
    text = (
        f"stage {worst} ({held(facts.stages[worst].fingerprint)}) computes {busy[worst]:.0f} ms an iteration, the mean of the "
        f"{layout.pp} stages is {mean:.0f} ms: the others wait for it"
    )
    split = better_split([stage.layers for stage in facts.stages], busy)
    if split is not None and layout.vpp == 1:
        layers, expected = split
        text += (
            f"; {'-'.join(map(str, layers))} layers would bring the busiest stage to about {expected:.0f} ms"
        )
    found.append(Finding(kind="layout", severity="info", message=text))
    return found


def held(fingerprint: str) -> str:
    """A stage's fingerprint for people: ``12x Block, loss f`` of ``12x Block-3f2a91, loss f:147tuple(None, list())``."""
    named = re.sub(r"(\bloss [\w.<>]+):\d+tuple\(.*?\)(?= \||$)", r"\1", fingerprint)
    return re.sub(r"-[0-9a-f]{6}\b", "", named)


def better_split(layers: list[int], busy: np.ndarray) -> tuple[list[int], float] | None:
    """Layers per stage that lower the busiest stage's time, and that time; None when there is none.

    A layer costs what it costs on the stage where it is cheapest (no embedding, no loss beside it); what a stage
    takes beyond its layers stays where it is.
    """
    if min(layers) < 1:
        return None
    per_layer = float((busy / np.array(layers)).min())
    extra = busy - per_layer * np.array(layers)
    split = [1] * len(layers)
    for _ in range(sum(layers) - len(layers)):
        cheapest = int(np.argmin(extra + per_layer * (np.array(split) + 1)))
        split[cheapest] += 1
    expected = float((extra + per_layer * np.array(split)).max())
    return (split, expected) if expected < 0.97 * float(busy.max()) else None


def _connections(job: JobPrograms, cluster: Cluster, environment: Mapping[str, str]) -> list[Finding]:
    """Asynchronous tensor-parallel calls overlap only if the GPU takes kernels in the order of their launch."""
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if value == "1" or cluster.gpu.capability >= (10, 0) or job.layout.tp == 1:
        return []
    for cls in job.classes:
        site = _async_tensor_parallel(cls.exemplar)
        if site is not None:
            return [
                Finding(
                    kind="layout",
                    severity="warning",
                    message="tensor-parallel collectives are started asynchronously"
                    + (f" ({site})" if site else "")
                    + f", but CUDA_DEVICE_MAX_CONNECTIONS is {value or 'not set'}: before Blackwell their overlap with "
                    "compute needs it to be 1",
                )
            ]
    return []


def _async_tensor_parallel(program: Program) -> str | None:
    events = program.events
    rows = (events["kind"] == EventKind.COMM) & ((events["flags"] & EventFlag.ASYNC) != 0)
    for i in np.unique(events["ref"][rows]).tolist():
        comm = program.comms[i]
        desc = program.groups[comm.group].desc.upper()
        if "TENSOR" in desc and "MODEL_PARALLEL" in desc and comm.kind not in ("send", "recv", "barrier"):
            return comm.site
    return None
