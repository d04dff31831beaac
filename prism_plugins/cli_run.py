"""Run directories as the ``prism`` command reads them: finding one, and building its job again."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from prism_plugins.emit.job_view import JobView
from prism_plugins.errors import CannotDeriveError, PrismError
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.slices import SliceReport
from prism_plugins.rundir import RunDir, RunInfo
from prism_plugins.slice_plan import check_facts

DEFAULT_PARENT = Path("prism_out")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """The positional RUN."""
    parser.add_argument(
        "run_directory", metavar="RUN", nargs="?", default="latest",
        help="run directory, or `latest` (default): the newest with a prediction under ./prism_out",
    )  # fmt: skip


def open_run(text: str) -> RunDir:
    """The run directory that RUN names. Raises :class:`PrismError` when there is none."""
    if text == "latest" and not Path(text).exists():
        return _latest()
    path = Path(text)
    if not path.exists():
        raise PrismError(f"{path} does not exist; RUN is a run directory or `latest`")
    if not path.is_dir():
        raise PrismError(f"{path} is a file; RUN is a run directory or `latest`")
    return RunDir(path)


def _latest() -> RunDir:
    """The newest run that came to a prediction; the newest of all where none did."""
    files = sorted(DEFAULT_PARENT.glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not files:
        raise PrismError(
            f"no run directory under ./{DEFAULT_PARENT}; name one, or make one with --prism-emulate"
        )
    runs = [RunDir(file.parent) for file in files]
    for rundir in runs:
        with contextlib.suppress(PrismError):
            if rundir.read_info().status == "ok":
                break
    else:
        return runs[0]
    if rundir is not runs[0]:
        print(
            f"prism: note: {rundir.path} is the latest run with a prediction; {runs[0].path}, the latest, has none",
            file=sys.stderr,
        )
    return rundir


def check_finished(rundir: RunDir, info: RunInfo) -> None:
    """Raise :class:`PrismError` for a run that did not come to a prediction."""
    if info.status == "running":
        raise PrismError(
            f"the run in {rundir.path} is still going on, or was killed; start it again to finish it"
        )
    if info.status != "ok":
        raise PrismError(
            f"the run in {rundir.path} has no prediction (status: {info.status}): look into the logs of its slices, "
            f"{rundir.path}/slices/*/log.txt; start it again to finish it"
        )


def load_job(
    rundir: RunDir, *, with_shards: bool = True
) -> tuple[JobPrograms, dict[int, SliceReport], RunInfo]:
    """Programs of all ranks from the slices of a finished run, the reports of those slices, and run.json.

    Raises :class:`PrismError` or :class:`FileFormatError` for a directory that is not, or not all of, a run.
    """
    from prism_plugins.program.derived import DerivedStages
    from prism_plugins.program.infer import infer_job
    from prism_plugins.program.store import load_program

    info = rundir.read_info()
    check_finished(rundir, info)
    if info.facts is None:
        raise PrismError(f"{rundir.run} lacks the facts of the job; start the run again")
    check_facts(info.facts, info.job.options)
    programs = {rank: load_program(rundir.slice(rank).program) for rank in info.slices}
    reports = {rank: rundir.read_report(rank) for rank in info.slices}
    try:
        derived = DerivedStages(rundir.derived)
        job = infer_job(info.facts, reports, programs, with_shards=with_shards, derived=derived)
        return job, reports, info
    except CannotDeriveError as error:
        raise PrismError(
            f"the slices in {rundir.path} are not all that is needed ({error}); start the run again"
        ) from error


def load_view(rundir: RunDir) -> JobView:
    """Build the job of a run again from its slices: infer, price, simulate. Raises as :func:`load_job`."""
    from prism_plugins import stages
    from prism_plugins.costs.cluster import check_values, load_cluster
    from prism_plugins.costs.model import load_calibration
    from prism_plugins.costs.nccl.settings import parse_settings

    job, reports, info = load_job(rundir)
    if info.cluster is not None:
        check_values(info.cluster, source=f"in {rundir.run}")
    cluster = info.cluster or load_cluster(info.job.options.cluster)
    cluster, costs = stages.price(
        cluster,
        job,
        reports,
        rundir,
        device=info.job.options.device,
        nccl=parse_settings(info.nccl_variables),
        calibration=load_calibration(info.job.options.calibration),
    )
    timeline, faults = stages.simulate(job, costs)
    if timeline is None:
        raise PrismError(f"there are no times, the job would not run: {faults[0].message}")
    return JobView(
        job=job,
        costs=costs,
        timeline=timeline,
        gpu=cluster.gpu_facts(),
        gpus_per_node=cluster.gpus_per_node,
    )


def check_rank(rank: int, view: JobView) -> None:
    """Raise :class:`PrismError` for a rank outside the world."""
    if not 0 <= rank < view.world_size:
        raise PrismError(
            f"--rank {rank} is outside the world of {view.world_size} ranks (0-{view.world_size - 1})"
        )
