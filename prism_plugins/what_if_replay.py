"""Ranks of an existing run run again, among virtual peers that are slow or behind slow links."""

from __future__ import annotations

from typing import Literal

from prism_plugins import stages
from prism_plugins.cli_run import load_job
from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.errors import PrismError
from prism_plugins.fault_report import Faults, disturbed
from prism_plugins.options import parse_ranks
from prism_plugins.program.prediction import Finding
from prism_plugins.program.replay import ReplaySummary
from prism_plugins.progress import Progress
from prism_plugins.replays import replay_ranks
from prism_plugins.rundir import RunDir, RunInfo
from prism_plugins.slice_runner import slice_spec


def check_replay(text: str, info: RunInfo, faults: Faults) -> tuple[int, ...]:
    """The ranks of ``--replay``, as ``0,5-7``. Raises :class:`PrismError` for what cannot be replayed, here or at all."""
    options = info.job.options
    try:
        ranks = parse_ranks(text, world_size=options.world_size)
    except ValueError as error:
        raise PrismError(f"--replay {error}") from None
    if options.device == "cpu":
        raise PrismError("--replay: the ranks of this run really ran on the CPU (--prism-device cpu)")
    if faults.jitter or faults.failure is not None:
        raise PrismError(
            "--replay: ranks are replayed among slow ranks and links, not with --jitter or --fail"
        )
    if options.device == "virtual":
        return ranks
    slow = [rank for rank in ranks if rank in faults.slow_ranks]
    if slow:
        raise PrismError(
            f"--replay {slow[0]}: a replay runs at the speed of the GPU that is there, so the slow rank itself cannot be "
            "replayed; take one that waits for it"
        )
    from prism_plugins.gpu.device import check_gpu

    check_gpu()
    return ranks


def replay_among_faults(
    rundir: RunDir,
    ranks: tuple[int, ...],
    faults: Faults,
    *,
    cluster: Cluster,
    calibration: Calibration | Literal["none"] | None,
    progress: Progress,
) -> tuple[tuple[ReplaySummary, ...], tuple[Finding, ...]]:
    """Replay ranks with the simulation of the faults, in ``RUN/what-if/replay``; slices are those of the run. The script is
    started again as it was, so the directory and the environment must be those of the launch.

    Raises SimulationFault.
    """
    rundir = RunDir(rundir.path.resolve())
    job, reports, info = load_job(rundir)
    nccl = parse_settings(info.nccl_variables)

    def costs_of(other: Cluster) -> CostModel:
        return stages.price(
            other, job, reports, rundir, device=info.job.options.device, nccl=nccl, calibration=calibration
        )[1]

    simulation = disturbed(job, costs_of(cluster), cluster, faults, costs_of=costs_of)
    return replay_ranks(
        ranks,
        programs=job,
        costs=simulation.costs,
        timeline=simulation,
        rundir=RunDir(rundir.what_if),
        spec_of=lambda rank: slice_spec(
            info.job,
            rundir,
            rank,
            tuple(sorted(reports)),
            gpu=cluster.gpu_facts(),
            gpus_per_node=cluster.gpus_per_node,
        ),
        progress=progress,
    )
