"""``prism show``: the summary of a run."""

from __future__ import annotations

import argparse
import sys

from prism_plugins.cli_run import add_run_argument, check_finished, open_run
from prism_plugins.emit.all import written_files
from prism_plugins.emit.console import make_console, print_summary
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.streams import visible

_EPILOG = """\
examples:
  prism show                  the newest run under ./prism_out
  prism show latest --log     with the predicted training log
  prism show latest --json    prediction.json itself, for other programs"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "show", help="the summary of a run", description="Show the summary of a run, as printed at its end.",
        epilog=_EPILOG,
    )  # fmt: skip
    add_run_argument(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--log", action="store_true", help="print the predicted training log before the summary"
    )
    form.add_argument("--json", action="store_true", help="print prediction.json instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    rundir = open_run(arguments.run_directory)
    info = rundir.read_info()
    check_finished(rundir, info)
    prediction = read_prediction(rundir.prediction)
    if arguments.json:
        sys.stdout.write(rundir.prediction.read_text())
        return 0
    if arguments.log and rundir.predicted_log.exists():
        text = rundir.predicted_log.read_text()
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    print_summary(prediction, files=written_files(rundir), console=make_console(sys.stdout))
    return 0
