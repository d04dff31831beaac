"""``prism trace``: Kineto traces of any ranks."""

from __future__ import annotations

import argparse
import sys

from prism_plugins.cli_run import add_run_argument, load_view, open_run
from prism_plugins.emit.all import write_traces
from prism_plugins.errors import PrismError
from prism_plugins.options import parse_ranks

_DESCRIPTION = """\
Write the predicted timeline of any ranks, sliced or inferred, as Kineto traces (gzipped Chrome JSON) into
RUN/kineto/rank<N>.json.gz. Open them in https://ui.perfetto.dev, or point Holistic Trace Analysis at the folder."""

_EPILOG = """\
examples:
  prism trace latest --ranks 0
  prism trace latest --ranks 0-15,512
  prism trace prism_out/20260101-120000-pretrain_gpt --ranks all

with Holistic Trace Analysis:
  from hta.trace_analysis import TraceAnalysis
  TraceAnalysis(trace_dir="RUN/kineto").get_temporal_breakdown()"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "trace", help="Kineto traces of any ranks", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_run_argument(parser)
    parser.add_argument("--ranks", required=True, metavar="LIST", help="ranks such as 0-15,512, or all")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write them; one path a line."""
    rundir = open_run(arguments.run_directory)
    world_size = rundir.read_info().job.options.world_size
    try:
        ranks = parse_ranks(arguments.ranks, world_size=world_size)
    except ValueError as error:
        raise PrismError(f"--ranks {error}") from None
    view = load_view(rundir)
    for rank in ranks:
        for path in write_traces(rundir, view, [rank]):
            sys.stdout.write(f"{path}\n")
            sys.stdout.flush()
    return 0
