"""``prism calibrate``: measure what ops cost on the GPU at hand, and look at such files."""

from __future__ import annotations

import argparse
from pathlib import Path

from prism_plugins.costs.calibration import (
    NEAR,
    Calibration,
    count_by_provenance,
    merge,
    read_calibration,
    signature_key,
    write_calibration,
)
from prism_plugins.costs.families import family_of
from prism_plugins.costs.measured import expected_errors
from prism_plugins.costs.nccl.measured import KINDS
from prism_plugins.errors import PrismError
from prism_plugins.streams import visible

_EPILOG = """\
examples, on a machine with a GPU:
  prism calibrate --grid --out h200.json              what transformers are made of, about 4 minutes
  prism calibrate --collectives --out nccl.json       NCCL between all GPUs of this machine
  prism calibrate --from prism_out/RUN --out my.json  exactly the ops of an emulated run, in its own mix
and anywhere:
  prism calibrate --export-signatures prism_out/RUN --out sigs.json   then `--from sigs.json` where the GPU is
  prism calibrate --nccl-tests all_reduce.txt --out nccl.json         what all_reduce_perf printed
  prism calibrate show h200.json
  prism calibrate merge h200.json my.json --out both.json
  prism calibrate diff h200.json my.json
A launch uses a calibration with --prism-calibration FILE."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "calibrate", help="measure op costs on the GPU at hand", epilog=_EPILOG,
        description="Measure what ops cost on the GPU at hand; show, merge and compare such files.",
    )  # fmt: skip
    parser.add_argument(
        "words",
        metavar="show|merge|diff FILE",
        nargs="*",
        help="look at calibration files instead of measuring",
    )
    parser.add_argument("--grid", action="store_true", help="measure a general grid of ops")
    parser.add_argument(
        "--host", action="store_true", help="measure the host alone (always part of --grid and --from)"
    )
    parser.add_argument(
        "--from", dest="sources", metavar="RUN", action="append", default=[],
        help="measure every op of a run directory, or of a list written by --export-signatures; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--export-signatures", metavar="RUN", action="append", default=[],
        help="only write the list of a run's ops; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--collectives", action="store_true", help="measure NCCL between all GPUs of this machine (torchrun)"
    )
    parser.add_argument(
        "--nccl-tests", metavar="OUTPUT", action="append", default=[],
        help="take the times that a program of nccl-tests printed; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--collective", metavar="KIND", default="", choices=("", *KINDS),
        help="what --nccl-tests measured, where the output does not name the program",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", type=Path, help="file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="stop measuring after this long")
    parser.add_argument("--no-host", action="store_true", help="leave the host out")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    if arguments.words:
        return _look(arguments)
    if arguments.out is None:
        raise PrismError("prism calibrate: say where to write: --out FILE (or: prism calibrate show FILE)")
    if arguments.export_signatures:
        return _export(arguments)
    if not (
        arguments.grid or arguments.host or arguments.sources or arguments.collectives or arguments.nccl_tests
    ):
        raise PrismError(
            "prism calibrate: say what to measure: --grid, --host, --from RUN, --collectives, or what to read: --nccl-tests OUTPUT"
        )
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    calibrations = collective_calibrations(arguments)
    lists = []
    if arguments.grid:
        from prism_plugins.calibration.grid import make_grid

        lists.append(make_grid(small=arguments.device == "cpu"))
    if arguments.sources:
        from prism_plugins.calibration.signatures import join

        lists.append(join([_signatures(source) for source in arguments.sources]))
    if lists or arguments.host:
        from prism_plugins.calibration.run import calibrate

        measured = calibrate(
            lists,
            device=arguments.device,
            host=not arguments.no_host,
            budget_s=arguments.budget_s,
            say=lambda line: print(visible(line), flush=True),
        )
        calibrations.append(measured)
    calibration = merge(calibrations)
    write_calibration(calibration, arguments.out)
    counts = f"{len(calibration.figures)} ops and {len(calibration.collectives)} collectives"
    print(f"{counts} measured, written to {visible(str(arguments.out))}")
    return 0


def collective_calibrations(arguments: argparse.Namespace) -> list[Calibration]:
    """What ``--collectives`` measures and ``--nccl-tests`` reads."""
    import datetime

    from prism_plugins.costs.nccl.nccl_tests import read_nccl_tests

    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    found = [read_nccl_tests(path, kind=arguments.collective) for path in arguments.nccl_tests]
    calibrations = [Calibration(gpu=tests.gpu, date=date, collectives=tests.points) for tests in found]
    if arguments.collectives:
        from prism_plugins.calibration.collectives import measure_collectives

        gpu, points = measure_collectives(device=arguments.device, budget_s=arguments.budget_s)
        calibrations.append(Calibration(gpu=gpu, date=date, collectives=points))
    return calibrations


def _signatures(source: str):
    from prism_plugins.calibration.signatures import read_signatures, signatures_of_run

    path = Path(source)
    if not path.exists():
        raise PrismError(f"{source} does not exist; --from takes a run directory or a signature list")
    return signatures_of_run(path) if path.is_dir() else read_signatures(path)


def _export(arguments: argparse.Namespace) -> int:
    from prism_plugins.calibration.signatures import join, signatures_of_run, write_signatures

    signatures = join([signatures_of_run(run) for run in arguments.export_signatures])
    write_signatures(signatures, arguments.out)
    print(f"{len(signatures.signatures)} ops of {len(signatures.mixes)} programs written to {arguments.out}")
    return 0


def _look(arguments: argparse.Namespace) -> int:
    what, *files = arguments.words
    needed = {"show": (1, 1), "merge": (1, 100), "diff": (2, 2)}.get(what)
    if needed is None:
        raise PrismError(f"prism calibrate: {what!r} is not one of show, merge, diff")
    if not needed[0] <= len(files) <= needed[1]:
        raise PrismError(f"prism calibrate {what}: give {'two files' if what == 'diff' else 'a file'}")
    calibrations = [read_calibration(file) for file in files]
    if what == "merge":
        if arguments.out is None:
            raise PrismError("prism calibrate merge: say where to write: --out FILE")
        write_calibration(merge(calibrations), arguments.out)
        return 0
    print(
        "\n".join(
            visible(line) for line in (show(calibrations[0]) if what == "show" else diff(*calibrations))
        )
    )
    return 0


def show(calibration: Calibration) -> list[str]:
    """A calibration as lines."""
    c = calibration
    lines = [
        f"{c.gpu}, driver {c.driver or 'unknown'}, torch {c.torch}, {c.date}",
        f"SM clock {c.clock_range_mhz[0]:.0f}-{c.clock_range_mhz[1]:.0f} MHz while measuring",
    ]
    if c.power:
        lines.append(
            f"power cap {c.power.cap_w:.0f} W, static {c.power.static_w:.0f} W, dynamic ~ clock^{c.power.exponent:g}, "
            f"highest clock {c.power.max_clock_mhz:.0f} MHz"
        )
        lines += [f"mix {mix.name}: ran at {mix.clock_mhz:.0f} MHz" for mix in c.power.mixes]
    if c.host:
        lines.append(
            f"host ({c.host.cpu}): {c.host.op_us:g} us an op, {c.host.dispatch_us:g} us bare, {c.host.view_us:g} us a view, "
            f"{c.host.comm_us:g} us a collective"
        )
        if c.host.benchmark:
            calls = ", ".join(f"{kind} {us:.1f}" for kind, us in sorted(c.host.benchmark.enqueue_us.items()))
            lines.append(
                f"host benchmark {c.host.benchmark.version}: {c.host.benchmark.dispatch_us[0]:.0f} us; us a call: {calls or '-'}"
            )
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(count_by_provenance(c.figures).items()))
    lines.append(f"{len(c.figures)} figures: {counts}")
    by_family: dict[str, int] = {}
    for figure in c.figures:
        family = family_of(figure.signature.op) or "unknown"
        by_family[family] = by_family.get(family, 0) + 1
    lines.append(
        f"{'family':26} {'figures':>7}  leave-one-out error: median, p95; p95 with a neighbour within {NEAR:g} doublings"
    )
    errors = expected_errors(c)
    for family, count in sorted(by_family.items(), key=lambda item: -item[1]):
        error = errors.get(family)
        known = f"{error.median:6.1%} {error.p95:6.1%} ({error.count})" if error else "-"
        near = f"  {error.near_p95:6.1%} ({error.num_near})" if error and error.num_near else ""
        lines.append(f"{family:26} {count:7}  {known}{near}")
    by_call: dict[tuple[str, int], list[int]] = {}
    for point in c.collectives:
        by_call.setdefault((point.kind, point.gpus), []).append(point.nbytes)
    for (kind, gpus), sizes in sorted(by_call.items()):
        lines.append(f"{kind} of {gpus} GPUs: {len(sizes)} sizes, {min(sizes):,} to {max(sizes):,} bytes")
    for reason, count in sorted(c.not_measured.items(), key=lambda item: -item[1]):
        lines.append(f"not measured: {count} x {reason}")
    return lines


def diff(a: Calibration, b: Calibration) -> list[str]:
    """How the second differs from the first, by family and for the ops that differ most."""
    mine = {signature_key(f.signature): f for f in a.figures}
    both = [(mine[key], f) for f in b.figures if (key := signature_key(f.signature)) in mine]
    lines = [
        f"a: {a.gpu}, {a.date}; b: {b.gpu}, {b.date}",
        f"{len(both)} ops in both, {len(a.figures) - len(both)} only in a, {len(b.figures) - len(both)} only in b",
    ]
    ratios: dict[str, list[float]] = {}
    for x, y in both:
        ratios.setdefault(family_of(x.signature.op) or "unknown", []).append(y.us / x.us)
    for family, values in sorted(ratios.items()):
        middle = sorted(values)[len(values) // 2]
        lines.append(
            f"{family:26} {len(values):5} ops, b / a: median {middle:.3f}, {min(values):.3f}-{max(values):.3f}"
        )
    for x, y in sorted(both, key=lambda pair: -abs(pair[1].us / pair[0].us - 1))[:10]:
        shapes = " ".join("x".join(map(str, t.shape)) for t in x.signature.inputs[:3])
        lines.append(f"  {x.signature.op} {shapes}: {x.us:.1f} us, {y.us:.1f} us")
    return lines
