"""``prism diff``: a prediction beside a real run of the same job."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism_plugins.cli_run import check_finished, load_view, open_run
from prism_plugins.costs.calibration import write_calibration
from prism_plugins.diff.compare import Comparison, Row, calibration_from, compare, compare_calls
from prism_plugins.diff.real import OpKey, OpTotal, RealRank, RealRun
from prism_plugins.emit.console import gib, make_console, milliseconds, show
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.emit.spans import device_spans
from prism_plugins.errors import PrismError
from prism_plugins.program.prediction import ClassMemory, Prediction
from prism_plugins.streams import visible

_DESCRIPTION = """\
Compare a run with a real run of the same job. REAL is a torch.profiler (Kineto) trace or a folder with one trace a rank,
a log of Megatron-LM or DeepSpeed, or a dump of PyTorch's flight recorder (pickle or JSON, or a folder with one a rank).

Traces: iteration time, kernel time by phase, ops ranked by their part in the difference, ops on one side only, and which
cost entries to measure again. Logs: iteration time, the framework's timers, memory. Flight recorder: collectives."""

_EPILOG = """\
examples:
  prism diff latest traces/
  prism diff latest train.log
  prism diff prism_out/RUN traces/ --write-calibration mine.json
A launch then uses the figures with --prism-calibration mine.json."""

MAX_ROWS = 15


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "diff", help="a prediction beside a real run", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("run_directory", metavar="RUN", help="run directory, or `latest`")
    parser.add_argument("real", metavar="REAL", type=Path, help="trace, folder of traces, log, or dump")
    parser.add_argument("--rank", type=int, help="compare this rank only (default: each that REAL holds)")
    parser.add_argument("--rows", type=int, default=MAX_ROWS, help=f"rows of each table (default {MAX_ROWS})")
    parser.add_argument(
        "--write-calibration", metavar="FILE", type=Path,
        help="write the ops' real times as a calibration (traces only)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    rundir = open_run(arguments.run_directory)
    check_finished(rundir, rundir.read_info())
    prediction = read_prediction(rundir.prediction)
    real = read_real(arguments.real)
    ranks = [r for r in real.ranks if arguments.rank in (None, r.rank)]
    if arguments.rank is not None and not ranks and real.ranks:
        raise PrismError(
            f"--rank {arguments.rank}: {arguments.real} has ranks {[r.rank for r in real.ranks]}"
        )
    outside = [r.rank for r in ranks if not 0 <= r.rank < prediction.world_size]
    if outside:
        raise PrismError(
            f"{arguments.real} holds rank {outside[0]}, the run has {prediction.world_size} ranks"
        )
    if arguments.write_calibration and not (ranks and real.has_durations and ranks[0].iterations):
        raise PrismError("--write-calibration needs traces of torch.profiler")
    console = make_console(sys.stdout)
    show(overview(prediction, real), console)
    if not ranks:
        return 0
    view = load_view(rundir)
    for rank in ranks:
        show(_of_rank(view, rank, real, arguments.rows), console)
    if arguments.write_calibration:
        _write_calibration(view, ranks[0], arguments.write_calibration)
    return 0


def read_real(path: Path) -> RealRun:
    """Read whatever the path holds. Raises :class:`PrismError` when it is none of what can be read."""
    from prism_plugins.diff.read_flight_recorder import looks_like_dump, read_flight_recorder
    from prism_plugins.diff.read_kineto import find_traces, read_kineto
    from prism_plugins.diff.read_log import read_log

    if not path.exists():
        raise PrismError(f"{path} does not exist; REAL is a trace, a folder of traces, a log, or a dump")
    if (path / "run.json").is_file():
        raise PrismError(
            f"{path} is a run of prism's, not a real one; two predictions go side by side with "
            f"prism report RUN --with {path}/prediction.json"
        )
    try:
        if path.is_dir():
            files = [p for p in sorted(path.iterdir()) if p.is_file()]
            if not files:
                raise PrismError(
                    f"{path} holds no files; REAL is a trace, a folder of traces, a log, or a dump"
                )
            if find_traces(path) and not looks_like_dump(find_traces(path)[0]):
                return read_kineto(path)
            if looks_like_dump(files[0]):
                return read_flight_recorder(path)
            raise PrismError(
                f"{path} holds neither Kineto traces (*.json, *.json.gz) nor flight recorder dumps"
            )
        if looks_like_dump(path):
            return read_flight_recorder(path)
        if path.name.endswith((".json", ".json.gz")):
            return read_kineto(path)
        return read_log(path)
    except OSError as error:
        raise PrismError(f"{path} cannot be read: {error.strerror}") from error


def overview(prediction: Prediction, real: RealRun) -> RenderableType:
    """Iteration time, timers and memory."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for column in ("predicted", "real", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    profiled = any(r.iteration_ms for r in real.ranks)
    if real.iteration_ms and prediction.iteration_time_ms:
        name = "iteration, profiled" if profiled else f"iteration, median of {real.iterations}"
        table.add_row(name, *_both(prediction.iteration_time_ms, real.iteration_ms, milliseconds))
    if real.samples_per_s and prediction.samples_per_s:
        table.add_row(
            "samples/s", *_both(prediction.samples_per_s, real.samples_per_s, lambda x: f"{x:,.2f}")
        )
    for name in (name for name in prediction.timers_ms if name in real.timers_ms):
        predicted = sum(prediction.timers_ms[name])
        table.add_row(f"timer {visible(name)}", *_both(predicted, real.timers_ms[name], milliseconds))
    for what, peaks, field in (
        ("peak allocated", real.peak_allocated_bytes, "peak_allocated_bytes"),
        ("peak reserved", real.peak_reserved_bytes, "peak_reserved_bytes"),
    ):
        for rank, nbytes in sorted(peaks.items()):
            memory = _memory_of(prediction.memory, rank)
            if memory is not None and nbytes:
                table.add_row(f"{what}, rank {rank}", *_both(getattr(memory, field), nbytes, gib))
    notes = [f"# {visible(real.source)}"]
    if profiled:
        notes.append(
            "# the profiler slows the host: compare kernel times below, and iteration times by a log"
        )
    if not table.row_count:
        if not real.ranks:
            notes.append("# nothing in it that the prediction tells too")
        return Text("\n".join(notes), style="dim")
    return Group(Text("\n".join(notes), style="dim"), table)


def _of_rank(view: JobView, real: RealRank, run: RealRun, limit: int) -> RenderableType:
    program, times = view.timed_program(real.rank)
    spans = device_spans(program, times)
    if not run.has_durations or not real.iterations:
        return _calls_only(compare_calls(real.rank, program, real), limit)
    comparison = compare(real.rank, program, spans, view.costs, real)
    parts: list[RenderableType] = [Text(f"\nrank {real.rank}: kernel time of one iteration", style="bold")]
    head = _table("", "predicted", "real", "error", "")
    head.add_row("all kernels", *_both(comparison.predicted_ms, comparison.real_ms, milliseconds), "")
    for name, (predicted, measured) in comparison.phases.items():
        if predicted or measured:
            head.add_row(f"  {name}, without communication", *_both(predicted, measured, milliseconds), "")
    groups = sorted({row.key.group for row in comparison.rows if row.key.group})
    for group in groups:
        mine = [row for row in comparison.rows if row.key.group == group]
        both = (
            sum(row.predicted.ms for row in mine if row.predicted),
            sum(row.real.ms for row in mine if row.real),
        )
        head.add_row(f"  {visible(group)}", *_both(*both, milliseconds), "waiting included")
        if group in comparison.transfers:
            head.add_row(
                "    transfer alone",
                *_both(*comparison.transfers[group], milliseconds),
                "of the last to come",
            )
    parts += [head, *_rows("largest differences", comparison.matched(), limit, comparison.real_ms)]
    parts += _rows("predicted, not in the real run", comparison.missing(), limit, comparison.real_ms)
    parts += _rows("in the real run, not predicted", comparison.extra(), limit, comparison.real_ms)
    worst = comparison.to_measure()
    if worst:
        parts.append(
            Text("\nmeasure again (prism calibrate --from RUN, or --write-calibration):", style="bold")
        )
        parts.append(
            Text(
                "\n".join(
                    f"  {_name(r.key)}: price off by {r.price_error_ms:+z.2f} ms, {r.provenance}"
                    for r in worst[:limit]
                )
            )
        )
    else:
        parts.append(Text("\nno price is off by 10 % and 0.2 % of the iteration", style="green"))
    return Group(*parts)


def _calls_only(comparison: Comparison, limit: int) -> RenderableType:
    """A flight recorder's buffer: calls by group and kind, and the iterations that they make."""
    mine = [row for row in comparison.rows if row.key.group]
    both = [row for row in mine if row.predicted and row.real and row.predicted.calls]
    ratios = sorted(row.real.calls / row.predicted.calls for row in both)
    iterations = ratios[len(ratios) // 2] if ratios else 0.0
    table = _table("", "calls an iteration", "calls in the dump", "iterations", "")
    for row in sorted(both, key=lambda row: -row.predicted.calls)[:limit]:
        ratio = row.real.calls / row.predicted.calls
        odd = "other than most" if iterations and abs(ratio / iterations - 1) > 0.5 else ""
        table.add_row(
            _name(row.key), f"{row.predicted.calls:,.0f}", f"{row.real.calls:,.0f}", f"{ratio:.2f}", odd
        )
    parts: list[RenderableType] = [Text(f"\nrank {comparison.rank}: collectives", style="bold"), table]
    for title, rows in (
        ("predicted, not in the dump", [r for r in mine if r.real is None]),
        ("in the dump, not predicted", [r for r in mine if r.predicted is None]),
    ):
        if rows:
            parts.append(Text(f"\n{title}: " + "; ".join(_name(row.key) for row in rows[:limit])))
    return Group(*parts)


def _rows(title: str, rows: Sequence[Row], limit: int, total_ms: float) -> Iterable[RenderableType]:
    if not rows:
        return
    yield Text(f"\n{title}", style="bold")
    table = _table("", "predicted", "real", "difference", "of all kernels", "calls", "priced")
    for row in rows[:limit]:
        table.add_row(
            _name(row.key) + (" (all shapes)" if row.by_name and not row.key.group else ""),
            *(f"{side.ms:,.2f} ms" if side else "–" for side in (row.predicted, row.real)),
            f"{row.delta_ms:+z,.2f} ms",
            f"{100 * row.delta_ms / max(total_ms, 1e-9):+z.1f} %",
            _calls(row.predicted, row.real),
            row.provenance + (f", {row.alone_ms:,.2f} ms alone" if row.stretched else ""),
        )
    yield table
    if len(rows) > limit:
        rest = sum(row.delta_ms for row in rows[limit:])
        yield Text(f"… {len(rows) - limit} more, together {rest:+z,.2f} ms", style="dim")


def _write_calibration(view: JobView, real: RealRank, path: Path) -> None:
    program, times = view.timed_program(real.rank)
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    calibration = calibration_from(program, device_spans(program, times), view.costs, real, date=date)
    if not calibration.gpu:
        raise PrismError("the trace does not name its GPU; nothing was written")
    if not calibration.figures:
        raise PrismError("no op is the same on both sides; nothing was written")
    write_calibration(calibration, path)
    print(f"{len(calibration.figures)} ops of rank {real.rank} written to {visible(str(path))}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i == 0 else "right", overflow="fold" if i == 0 else "ellipsis"
        )
    return table


def _both(predicted: float, real: float, text) -> tuple[str, str, str]:
    error = f"{100 * (predicted / real - 1):+z.1f} %" if real else ""
    return text(predicted), text(real), error


def _calls(predicted: OpTotal | None, real: OpTotal | None) -> str:
    a, b = (f"{side.calls:,.0f}" if side else "–" for side in (predicted, real))
    return a if a == b else f"{a} / {b}"


def _name(key: OpKey) -> str:
    shapes = " ".join("x".join(map(str, shape)) for shape in key.shapes[:3])
    return visible(f"{key.name} {shapes}".strip() + (f" in {key.group}" if key.group else ""))


def _memory_of(memory: Sequence[ClassMemory], rank: int) -> ClassMemory | None:
    for each in memory:
        for run_ in each.ranks.split(","):
            first, _, last = run_.partition("-")
            if first and int(first) <= rank <= int(last or first):
                return each
    return None
