"""The ``prism`` command: look into a run directory, and at the machine. Each subcommand lives in a ``cli_*`` module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from prism_plugins import __version__
from prism_plugins.errors import PrismError
from prism_plugins.streams import give_up, prepare_streams, visible

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""As a shell reports SIGPIPE."""

_DESCRIPTION = """\
Look into the prediction of a training job that was emulated with --prism-emulate.

A run directory (RUN) is what --prism-out named, by default prism_out/<time>-<script>.
`latest` stands for the newest one under ./prism_out."""

_EXAMPLES = """\
examples:
  prism show                              the summary of the newest run
  prism show prism_out/20260101-120000-pretrain_gpt
  prism ops latest --rank 513 --comm      every collective of rank 513, sliced or inferred
  prism ops latest --rank 0 --phase optimizer --json | jq .duration_us
  prism trace latest --ranks 0-7,512      Kineto traces for Perfetto, HTA and TensorBoard
  prism report latest                     the HTML report again
  prism what-if latest --cluster dgx-b200 the same job on another cluster
  prism diff latest traces/               beside a real run: traces, log or flight recorder
  prism tune --world-size 64 -- train.py … which layout is fastest and fits
  prism cluster list                      clusters that ship with prism
  prism doctor                            is this machine ready to emulate?

To make a prediction, add the flag to a launch (`python -m prism_plugins.run --prism-help` lists all flags):
  torchrun --nproc-per-node 1 pretrain_gpt.py ... --prism-emulate --prism-world-size 1024"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. User mistakes are one line on stderr and status 2."""
    prepare_streams()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except PrismError as error:
        print(f"prism: error: {visible(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader (head, less) went away; nothing more may be written, not even at interpreter exit.
        give_up(sys.stdout)
        return EXIT_BROKEN_PIPE
    except OSError as error:
        give_up(sys.stdout)
        what = error.filename or "the output cannot be written"
        print(f"prism: error: {what}: {error.strerror}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = _Parser(prog="prism", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"prism-plugins {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    from prism_plugins import (
        cli_calibrate,
        cli_cluster,
        cli_diff,
        cli_doctor,
        cli_flight_recorder,
        cli_ops,
        cli_report,
        cli_setup_te,
        cli_show,
        cli_trace,
        cli_tune,
        cli_what_if,
    )

    for module in (
        cli_show,
        cli_report,
        cli_ops,
        cli_trace,
        cli_flight_recorder,
        cli_what_if,
        cli_tune,
        cli_diff,
        cli_cluster,
        cli_calibrate,
        cli_setup_te,
        cli_doctor,
    ):
        module.add_command(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse with verbatim help texts and errors in prism's form."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)

    def error(self, message: str) -> None:
        """One line, status 2."""
        self.exit(EXIT_USER_ERROR, f"prism: error: {message} (`{self.prog} --help` explains)\n")


if __name__ == "__main__":
    sys.exit(main())
