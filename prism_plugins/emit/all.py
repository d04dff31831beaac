"""All outputs of a run, in one call at the end of the conductor."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from prism_plugins.emit.console import make_console, print_summary
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.kineto import write_kineto
from prism_plugins.emit.perfetto import MAX_CELLS, write_perfetto
from prism_plugins.emit.predicted_log import log_text, write_predicted_log
from prism_plugins.emit.prediction_json import write_prediction
from prism_plugins.emit.ranks import format_ranks
from prism_plugins.program.prediction import Prediction
from prism_plugins.rundir import RunDir
from prism_plugins.streams import losing_output

MAX_TRACE_ROWS = 1_000_000
"""Program rows traced by default, over all classes: about 10 s. ``prism trace`` writes any other rank."""
MAX_PERFETTO_ROWS = 3_000_000
"""Rows that are looked at for the default trace.pftrace, a few seconds; larger jobs get one by ``prism trace``."""
MAX_PERFETTO_BYTES = 32 << 20


def emit_all(
    rundir: RunDir,
    prediction: Prediction,
    *,
    view: JobView,
    log_lines: Sequence[str],
    console: Console | None = None,
) -> None:
    """Write prediction.json, predicted.log and the traces of one rank per class; print the log and the summary.

    ``log_lines`` are the framework's lines at target scale (:meth:`Integration.rewrite_log`). Raises
    :class:`PrismError` when the run directory cannot be written.
    """
    console = console or make_console(sys.stdout)
    write_prediction(rundir.prediction, prediction)
    if log_lines:
        write_predicted_log(rundir.predicted_log, log_lines, prediction)
    ranks, left_out = view.ranks_to_trace(max_events=MAX_TRACE_ROWS)
    if ranks:
        write_traces(rundir, view, ranks)
        _write_perfetto(rundir, view)
    files = written_files(rundir)
    if not log_lines:
        files.append(
            ("", "no predicted log: the slices printed no line that is known to tell an iteration's time")
        )
    if ranks and not rundir.trace.exists():
        files.append(
            ("", "no trace.pftrace: too long for a job of this size; prism trace … --format perfetto")
        )
    if left_out:
        files.append(
            (
                "",
                f"{left_out} of {len(view.job.classes)} classes have no trace yet: too long to write them all",
            )
        )
    with losing_output(console.file):
        if log_lines:
            console.print(log_text(log_lines, prediction), markup=False, soft_wrap=True, end="")
        print_summary(prediction, files=files, console=console)


def _write_perfetto(rundir: RunDir, view: JobView) -> None:
    kinds = min(len(np.unique(view.cell_of_rank())), MAX_CELLS)
    rows = sum(len(c.exemplar.events) for c in view.job.classes) / len(view.job.classes)
    if kinds * rows <= MAX_PERFETTO_ROWS:
        write_perfetto(rundir.trace, view, max_bytes=MAX_PERFETTO_BYTES)


def written_files(rundir: RunDir) -> list[tuple[str, str]]:
    """(what, where) of the outputs that exist, and the commands that make more."""
    files = [("prediction", _shown(rundir.prediction))]
    if rundir.report.exists():
        files.append(("report", _shown(rundir.report)))
    if rundir.predicted_log.exists():
        files.append(("predicted log", _shown(rundir.predicted_log)))
    traced = [
        int(path.name.removeprefix("rank").partition(".")[0]) for path in rundir.kineto.glob("rank*.json.gz")
    ]
    if traced:
        files.append(("traces", f"{_shown(rundir.kineto)} (ranks {format_ranks(traced, max_runs=8)})"))
    if rundir.trace.exists():
        files.append(("", f"{_shown(rundir.trace)} (all ranks, for https://ui.perfetto.dev)"))
    run = shlex.quote(_shown(rundir.path))
    files.append(("any rank", f"prism ops {run} --rank R"))
    files.append(("", f"prism trace {run} --ranks R,…"))
    return files


def write_traces(rundir: RunDir, view: JobView, ranks: Sequence[int]) -> list[Path]:
    """Kineto traces of these ranks into the run directory."""
    context = view.trace_context()
    paths = []
    for rank in ranks:
        program, times = view.timed_program(rank)
        path = rundir.kineto_trace(rank)
        write_kineto(path, program, times, context)
        paths.append(path)
    return paths


def _shown(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
