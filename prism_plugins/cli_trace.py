"""``prism trace``: the predicted timeline for other programs."""

from __future__ import annotations

import argparse
import sys

from prism_plugins.cli_run import add_run_argument, load_view, open_run
from prism_plugins.emit.all import write_traces
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.errors import PrismError
from prism_plugins.options import parse_ranks
from prism_plugins.rundir import RunDir

_DESCRIPTION = """\
Write the predicted timeline, of sliced and of inferred ranks alike:

  kineto       RUN/kineto/rank<N>.json.gz, one a rank, for Holistic Trace Analysis, Perfetto and TensorBoard (default)
  perfetto     RUN/trace.pftrace, all ranks by phase with flows between them, the chosen ones op by op, with counters of
               memory and NIC use: open it in https://ui.perfetto.dev
  chakra       RUN/chakra/rank<N>.et, execution traces of MLCommons Chakra (schema 1.0.0)
  memory       RUN/memory/rank<N>.pickle, every allocation of an iteration: open it in https://pytorch.org/memory_viz
  tensorboard  RUN/tensorboard, scalars under Megatron-LM's own names; no ranks"""

_EPILOG = """\
examples:
  prism trace latest --ranks 0
  prism trace latest --ranks 0-15,512
  prism trace latest --format perfetto --ranks 0,8
  prism trace prism_out/20260101-120000-pretrain_gpt --ranks all

with Holistic Trace Analysis:
  from hta.trace_analysis import TraceAnalysis
  TraceAnalysis(trace_dir="RUN/kineto").get_temporal_breakdown()"""

FORMATS = ("kineto", "perfetto", "chakra", "memory", "tensorboard")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "trace", help="traces for Perfetto, HTA, Chakra, TensorBoard", description=_DESCRIPTION, epilog=_EPILOG
    )  # fmt: skip
    add_run_argument(parser)
    parser.add_argument("--ranks", metavar="LIST", help="ranks such as 0-15,512, or all")
    parser.add_argument("--format", choices=FORMATS, default="kineto", help="what to write (default: kineto)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write them; one path a line."""
    rundir = open_run(arguments.run_directory)
    world_size = rundir.read_info().job.options.world_size
    if arguments.ranks is None and arguments.format in ("kineto", "chakra", "memory"):
        raise PrismError("--ranks is needed: ranks such as 0-15,512, or all")
    try:
        ranks = parse_ranks(arguments.ranks, world_size=world_size) if arguments.ranks else ()
    except ValueError as error:
        raise PrismError(f"--ranks {error}") from None
    if arguments.format == "tensorboard":
        from prism_plugins.emit.tensorboard import write_tensorboard

        write_tensorboard(rundir.tensorboard, read_prediction(rundir.prediction))
        _say(f"{rundir.tensorboard}")
        return 0
    view = load_view(rundir)
    if arguments.format == "perfetto":
        _perfetto(rundir, view, ranks)
    elif arguments.format == "chakra":
        _chakra(rundir, view, ranks)
    elif arguments.format == "memory":
        _memory(rundir, view, ranks)
    else:
        for rank in ranks:
            for path in write_traces(rundir, view, [rank]):
                _say(f"{path}")
    return 0


def _perfetto(rundir: RunDir, view: JobView, ranks) -> None:
    from prism_plugins.emit.perfetto import write_perfetto

    written = write_perfetto(rundir.trace, view, detailed=tuple(ranks))
    note = f"{written.ranks} ranks by phase, {written.detailed} op by op"
    if written.left_out:
        note += f"; {written.left_out} more would make it too large"
    if written.by_class:
        note += "; ranks of a class are drawn as its first"
    _say(f"{rundir.trace} ({note})")


def _chakra(rundir: RunDir, view: JobView, ranks) -> None:
    from prism_plugins.emit.chakra import write_chakra

    for rank in ranks:
        path = rundir.chakra / f"rank{rank}.et"
        program, times = view.timed_program(rank)
        write_chakra(path, program, times, view.costs)
        _say(f"{path}")


def _memory(rundir: RunDir, view: JobView, ranks) -> None:
    from prism_plugins.emit.memory_snapshot import write_snapshot

    for rank in ranks:
        path = rundir.memory / f"rank{rank}.pickle"
        write_snapshot(path, *view.timed_program(rank))
        _say(f"{path}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
