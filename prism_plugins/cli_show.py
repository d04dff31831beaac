"""``prism show``: the summary of a run."""

from __future__ import annotations

import argparse
import sys

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism_plugins.cli_run import add_run_argument, check_finished, check_rank, load_view, open_run
from prism_plugins.emit.all import written_files
from prism_plugins.emit.console import make_console, milliseconds, print_summary, show
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.emit.ranks import shorten_ranks
from prism_plugins.emit.spans import device_spans
from prism_plugins.errors import PrismError
from prism_plugins.files import read_regular
from prism_plugins.streams import visible

_MAX_LOG_BYTES = 256 << 20
_EPILOG = """\
examples:
  prism show                  the newest run under ./prism_out
  prism show latest --log     with the predicted training log
  prism show latest --communication
                              each process group: bytes, algorithm, what compute hides and what it does not
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
    form.add_argument(
        "--communication", action="store_true", help="print the slowest rank's process groups instead"
    )
    parser.add_argument("--rank", type=int, help="with --communication: another rank")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    if arguments.rank is not None and not arguments.communication:
        raise PrismError("--rank goes with --communication")
    rundir = open_run(arguments.run_directory)
    info = rundir.read_info()
    check_finished(rundir, info)
    prediction = read_prediction(rundir.prediction)
    if arguments.json:
        sys.stdout.write(rundir.prediction.read_text())
        return 0
    if arguments.communication:
        show(communication(load_view(rundir), arguments.rank), make_console(sys.stdout))
        return 0
    if arguments.log and rundir.predicted_log.exists():
        text = read_regular(rundir.predicted_log, max_bytes=_MAX_LOG_BYTES).decode("utf-8", "replace")
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    print_summary(prediction, files=written_files(rundir), console=make_console(sys.stdout))
    return 0


def communication(view: JobView, rank: int | None) -> RenderableType:
    """The process groups that a rank calls in an iteration, by default the slowest one."""
    from prism_plugins.report.groups import group_uses

    rank = view.timeline.slowest_rank if rank is None else rank
    check_rank(rank, view)
    program, times = view.timed_program(rank)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("group", "calls", "GB", "algorithm", "bus GB/s", "transfer", "hidden", "exposed", "waited"):
        side = "left" if name in ("group", "calls", "algorithm") else "right"
        table.add_column(name, justify=side, overflow="fold", no_wrap=side == "right")
    for use in group_uses(program, device_spans(program, times), view.costs, view.job.layout):
        table.add_row(
            visible(f"{use.dims} {shorten_ranks(use.ranks, max_runs=2)}"),
            ", ".join(f"{kind} {count:,}" for kind, count in use.kinds.items()),
            f"{use.message_bytes / 1e9:,.3f}",
            ", ".join(use.algorithms),
            f"{use.bus_gb_per_s:,.1f}",
            *(milliseconds(ms) for ms in (use.transfer_ms, use.hidden_ms, use.exposed_ms, use.waited_ms)),
        )
    note = (
        "hidden: transferred beside this rank's kernels; exposed: nothing runs meanwhile; waited: for other members, before "
        "anything moved"
    )
    return Group(Text(f"rank {rank}, one iteration", style="bold"), table, Text(note, style="dim"))
