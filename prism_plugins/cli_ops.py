"""``prism ops``: the program of one rank, one op a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import msgspec

from prism_plugins.cli_run import add_run_argument, check_rank, load_view, open_run
from prism_plugins.emit.op_table import OpRow, matching_phases, op_rows
from prism_plugins.emit.ranks import format_ranks
from prism_plugins.emit.trace_names import phase_name
from prism_plugins.errors import PrismError

_DESCRIPTION = """\
Print what one rank does in one iteration, in the order its host issues it: phase, stream, kind, name, group, bytes,
dtype, predicted start and duration. The rank may be one that no slice ran: its program is inferred.

A communication's duration includes the wait for the other members (column wait). Ops that launch no kernel last 0."""

_EPILOG = """\
examples:
  prism ops latest --rank 0
  prism ops latest --rank 513 --comm                  collectives and p2p only
  prism ops latest --rank 0 --phase "forward mb 0"    one phase (any part of its name)
  prism ops latest --rank 0 --json | jq 'select(.wait_us > 1000)'"""

_COLUMNS = (
    ("row", ">8"), ("start us", ">13"), ("dur us", ">11"), ("wait us", ">11"), ("stream", "<9"), ("kind", "<6"),
    ("name", "<38"), ("bytes", ">13"), ("dtype", "<9"), ("phase", "<30"), ("group", ""),
)  # fmt: skip
_FORMAT = " ".join(f"{{:{spec}}}" for _, spec in _COLUMNS)


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "ops", help="what any rank does, one op a line", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_run_argument(parser)
    parser.add_argument(
        "--rank", type=int, required=True, metavar="R", help="global rank, sliced or inferred"
    )
    parser.add_argument("--comm", action="store_true", help="collectives and p2p only")
    parser.add_argument("--phase", default="", metavar="P", help="only phases whose name contains P")
    parser.add_argument("--json", action="store_true", help="one JSON object a line (times in microseconds)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    view = load_view(open_run(arguments.run_directory))
    check_rank(arguments.rank, view)
    program, times = view.timed_program(arguments.rank)
    if arguments.phase and not matching_phases(program, arguments.phase):
        names = list(dict.fromkeys(phase_name(phase).partition(" ")[0] for phase in program.phases))
        raise PrismError(
            f"--phase {arguments.phase!r}: rank {arguments.rank} has no such phase; it has {', '.join(names)}"
        )
    rows = op_rows(program, times, only_comm=arguments.comm, phase=arguments.phase)
    lines = _json_lines(rows) if arguments.json else _text_lines(rows, program.rank, program.source)
    for line in lines:
        sys.stdout.write(line + "\n")
    return 0


def _json_lines(rows: Iterable[OpRow]) -> Iterable[str]:
    encoder = msgspec.json.Encoder()
    return (encoder.encode(row).decode() for row in rows)


def _text_lines(rows: Iterable[OpRow], rank: int, source: str) -> Iterable[str]:
    yield f"# rank {rank}, program {source}; times from the start of the iteration"
    yield _FORMAT.format(*(name for name, _ in _COLUMNS)).rstrip()
    for row in rows:
        name = row.name
        if row.peer >= 0:
            name += {"send": f" → {row.peer}", "recv": f" ← {row.peer}"}.get(row.name, f" root {row.peer}")
        if row.is_async:
            name += " async"
        group = f"{row.group} [{format_ranks(row.group_ranks, max_runs=4)}]" if row.group_ranks else ""
        yield _FORMAT.format(
            row.index, f"{row.start_us:.1f}", f"{row.duration_us:.1f}", f"{row.wait_us:.1f}" if row.wait_us else "",
            row.stream, row.kind, name, row.bytes, row.dtype, row.phase or "-", group,
        ).rstrip()  # fmt: skip
