"""``prism flight-recorder``: an iteration of virtual ranks as dumps that ``torchfrtrace`` reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prism_plugins.cli_run import add_run_argument, load_job, open_run
from prism_plugins.errors import PrismError

MAX_RANKS = 1024

_DESCRIPTION = """\
Write one steady iteration of every rank as dumps of PyTorch's flight recorder, one file a rank. Also for a job that
would hang: PyTorch's own analyzer says then what prism's checks say. Durations are not in the dumps."""
_EPILOG = """\
example:
  prism flight-recorder latest --out dumps && torchfrtrace --prefix rank_ dumps"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "flight-recorder",
        help="dumps of PyTorch's flight recorder",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_run_argument(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the dumps go")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the dumps."""
    from prism_plugins.emit.flight_recorder import PREFIX, write_dumps

    job, _, _ = load_job(open_run(arguments.run_directory), with_shards=False)
    world_size = job.layout.world_size
    if world_size > MAX_RANKS:
        raise PrismError(
            f"the analyzer wants a dump of every rank; {world_size} are too many (at most {MAX_RANKS})"
        )
    paths = write_dumps(job, range(world_size), arguments.out)
    print(
        f"{len(paths)} dumps in {arguments.out}; torchfrtrace --prefix {PREFIX} {arguments.out}",
        file=sys.stdout,
    )
    return 0
