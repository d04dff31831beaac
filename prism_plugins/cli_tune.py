"""``prism tune``: which parallel layout of a launch is fastest and fits."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from prism_plugins.errors import Interrupted, PrismError, SliceFailed
from prism_plugins.options import Job, parse_command, parse_time
from prism_plugins.physical import launch_from_environment, led_elsewhere
from prism_plugins.tune.executors import EXECUTORS
from prism_plugins.tune.result import TuneDir, TuneResult
from prism_plugins.tune.settings import Settings

_DESCRIPTION = """\
Search over the parallel layouts of a Megatron launch, or the configurations of a DeepSpeed one. Bounds rule most out,
the rest is composed from small slices, the best few are emulated in full. The global batch is kept. Run it again with the
same --out to go on after Ctrl-C or a budget that was over."""

_EPILOG = """\
examples:
  prism tune --world-size 1024 -- pretrain_gpt.py --num-layers 96 ...      the launch as it is, without torchrun
  prism tune --world-size 64 --budget 10m --knob tp=2,4,8 --knob micro_batch=1 -- pretrain_gpt.py ...
  torchrun --nproc-per-node 1 pretrain_gpt.py ... --prism-emulate --prism-world-size 64 --prism-tune 10m"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "tune", help="search for the best layout", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--world-size", required=True, metavar="N", help="GPUs")
    parser.add_argument("--cluster", metavar="PRESET|FILE", help="the target cluster")
    parser.add_argument("--calibration", metavar="FILE|none", help="as --prism-calibration")
    parser.add_argument("--budget", default="", metavar="TIME", help="end after this long: 90s, 10m, 1h")
    parser.add_argument(
        "--knob", action="append", default=[], metavar="NAME=V[,V…]",
        help="only these values; repeatable. Megatron: tp, cp, ep, etp, pp, vpp, stages, micro_batch, sp, recompute, optimizer, order; "
        "DeepSpeed: zero, micro_batch, offload, bucket, overlap, tp, pp",
    )  # fmt: skip
    parser.add_argument(
        "--emulate",
        type=int,
        default=Settings().emulations,
        metavar="K",
        help="layouts to emulate in full at most (3)",
    )
    parser.add_argument(
        "--all", action="store_true", help="emulate every legal layout: checks the search itself, slow"
    )
    parser.add_argument(
        "--executor", choices=EXECUTORS, default="local",
        help="where full emulations run: here, as a Slurm array (submitit), or as Ray tasks",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="emulations at a time there (4)")
    parser.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=V",
        help="parameter of submitit, e.g. slurm_partition=cpu",
    )
    parser.add_argument(
        "--vary", action="append", default=[], metavar="WHAT=V[,V…]",
        help="also the best layout with other GPU counts (gpus=64,128), NIC rates (nic=0.5,2) or sequence lengths "
        "(sequence=4096); repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--verify", type=int, default=0, metavar="K", help="run the best K as slices on a GPU"
    )
    parser.add_argument(
        "--out", default="", metavar="DIR", help="directory of the search; an earlier one goes on"
    )
    parser.add_argument("--jobs", metavar="N", help="slices at a time (number of cores)")
    parser.add_argument("--json", action="store_true", help="print tune.json instead of the table")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT …", help="the launch")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search and print."""
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        raise PrismError("name the launch after the options: prism tune --world-size N -- SCRIPT …")
    flags = ["--prism-emulate", f"--prism-world-size={arguments.world_size}"]
    for name in ("cluster", "calibration", "jobs"):
        if getattr(arguments, name):
            flags.append(f"--prism-{name}={getattr(arguments, name)}")
    job = parse_command([*flags, *words])
    if job is None:
        raise PrismError("name the launch after the options: prism tune --world-size N -- SCRIPT …")
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        settings = Settings(
            budget_s=_budget(arguments.budget),
            chosen=parse_knobs(arguments.knob),
            emulations=arguments.emulate,
            variants=parse_variants(arguments.vary),
            verify=arguments.verify,
            executor=arguments.executor,
            workers=arguments.workers,
            slurm=tuple(arguments.slurm),
            everything=arguments.all,
            out=arguments.out,
        )
        result, directory = tune(job, settings)
    except SliceFailed as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    except Interrupted as stop:
        print(
            "prism: stopped; the same command with the same --out goes on where it was",
            file=sys.stderr,
            flush=True,
        )
        return 128 + stop.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    report(result, directory, as_json=arguments.json)
    return 0


def tune(job: Job, settings: Settings) -> tuple[TuneResult, TuneDir]:
    """Search around a launch. Raises what :class:`prism_plugins.tune.search.Search` raises."""
    from prism_plugins.slice import load_integrations
    from prism_plugins.tune.page import write_page
    from prism_plugins.tune.progress import TuneProgress
    from prism_plugins.tune.search import Search

    if job.options.device != "virtual":
        raise PrismError(
            "a search runs on the virtual device; --verify K runs the best K on this machine's GPU"
        )
    if settings.verify:
        from prism_plugins.gpu.device import check_gpu

        try:
            check_gpu()
        except PrismError as error:
            raise PrismError(f"--verify runs slices on this machine's GPU: {error}") from None
    tuners = {i.name: i.tuner() for i in load_integrations() if hasattr(i, "tuner")}
    if not tuners:
        raise PrismError("no integration that is installed can change layouts")
    if not settings.out:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = os.path.join("prism_out", f"{stamp}-tune-{Path(job.argv[0]).stem}")
        settings = msgspec.structs.replace(settings, out=out)
    with TuneProgress() as progress:
        search = Search(job, tuners, settings, progress=progress)
        result = search.run()
    directory = TuneDir(Path(settings.out).absolute())
    write_page(directory.page, result)
    return result, directory


def report(result: TuneResult, directory: TuneDir, *, as_json: bool = False) -> None:
    """Print what was found."""
    from prism_plugins.emit.console import make_console
    from prism_plugins.tune.show import print_result

    if as_json:
        sys.stdout.write(directory.result.read_text())
        return
    print_result(result, directory, make_console(sys.stdout))


def tune_launch(job: Job) -> int:
    """``--prism-tune`` on a launch: the first physical rank searches, the others have nothing to do."""
    if not launch_from_environment().leads or led_elsewhere() is not None:
        return 0
    options = msgspec.structs.replace(job.options, tune_s=0.0, tune_knobs=(), out="")
    settings = Settings(
        budget_s=job.options.tune_s, chosen=parse_knobs(job.options.tune_knobs), out=job.options.out
    )
    result, directory = tune(msgspec.structs.replace(job, options=options), settings)
    report(result, directory)
    return 0


def parse_knobs(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """``tp=2,4`` as {"tp": ("2", "4")}. Raises :class:`PrismError`."""
    chosen: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        parts = tuple(v.strip() for v in values.split(",") if v.strip())
        if not equals or not parts:
            raise PrismError(f"--knob expects NAME=VALUE[,VALUE…], not {text!r}")
        if name in chosen and chosen[name] != parts:
            raise PrismError(f"--knob {name} is given twice, with other values")
        chosen[name.strip()] = parts
    return chosen


def parse_variants(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """``gpus=64,128`` as (("gpus", 64.0), ("gpus", 128.0)). Raises :class:`PrismError`."""
    found: list[tuple[str, float]] = []
    for text in texts:
        what, equals, values = text.partition("=")
        try:
            numbers = [float(v) for v in values.split(",")]
        except ValueError:
            numbers = []
        if (
            what not in ("gpus", "nic", "sequence")
            or not equals
            or not all(n > 0 for n in numbers)
            or not numbers
        ):
            raise PrismError(f"--vary expects gpus=N,…, nic=FACTOR,… or sequence=N,…, not {text!r}")
        found += [(what, n) for n in numbers]
    return tuple(found)


def _budget(text: str) -> float:
    try:
        return parse_time(text) if text else float("inf")
    except ValueError as error:
        raise PrismError(f"--budget {error}") from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise Interrupted(number)
