"""``prism report``: the HTML report of a run, again or beside other predictions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prism_plugins.cli_run import add_run_argument, check_finished, load_view, open_run
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.errors import PrismError
from prism_plugins.program.prediction import Prediction

_DESCRIPTION = """\
Write the report of a run: one self-contained HTML file with the pipeline schedule, the critical path, memory over time,
communication, ops, findings and assumptions. Every run writes RUN/report.html; this writes it again, for instance with
what-if results side by side."""

_EPILOG = """\
examples:
  prism report latest
  prism what-if latest --cluster dgx-b200 --out b200.json
  prism report latest --with b200.json --out compared.html"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "report", help="the HTML report of a run", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_run_argument(parser)
    parser.add_argument(
        "--with", dest="others", metavar="FILE", action="append", type=Path, default=[],
        help="another prediction to show beside it (prism what-if --out, or a run's prediction.json); may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: RUN/report.html)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write it; prints the path."""
    from prism_plugins.report.html import write_report
    from prism_plugins.report.insight import look_into, with_insight

    rundir = open_run(arguments.run_directory)
    info = rundir.read_info()
    check_finished(rundir, info)
    prediction = read_prediction(rundir.prediction)
    others = _read_others(arguments.others)
    view = insight = None
    if prediction.iteration_time_ms:
        view = load_view(rundir)
        insight = look_into(view)
        if not prediction.opportunities:  # a run of an earlier version
            prediction = with_insight(prediction, view, insight)
    path = arguments.out or rundir.report
    if path.is_dir():
        raise PrismError(f"--out {path} is a directory; name a file")
    write_report(
        path,
        prediction,
        title=info.job.argv[0],
        view=view,
        insight=insight,
        cluster=info.cluster,
        others=others,
    )
    sys.stdout.write(f"{path}\n")
    return 0


def _read_others(paths: list[Path]) -> dict[str, Prediction]:
    others: dict[str, Prediction] = {}
    for path in paths:
        prediction = read_prediction(path)
        name = (
            prediction.cluster if prediction.cluster not in others else f"{prediction.cluster}, {path.name}"
        )
        others[f"{name} ({path.stem})"] = prediction
    return others
