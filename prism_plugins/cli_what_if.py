"""``prism what-if``: an existing run on another cluster or with faults, without running its slices again."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import msgspec
from rich.table import Table

from prism_plugins import __version__
from prism_plugins.cli_faults import add_fault_arguments, parse_faults, print_report
from prism_plugins.cli_run import add_run_argument, check_finished, load_job, open_run
from prism_plugins.costs.base import CostModel
from prism_plugins.costs.calibration import Calibration
from prism_plugins.costs.cluster import Cluster, check_world, load_cluster
from prism_plugins.costs.model import load_calibration
from prism_plugins.costs.modelled import HOST_ASSUMPTION
from prism_plugins.costs.nccl.settings import NcclSettings, parse_settings
from prism_plugins.emit.console import gib, make_console, milliseconds, show, tightest
from prism_plugins.emit.files import replaced_file
from prism_plugins.emit.prediction_json import read_prediction, write_prediction
from prism_plugins.emit.ranks import format_ranks
from prism_plugins.errors import PrismError
from prism_plugins.predict import Evidence, device_overhead, nvls_groups, predict, predict_memory
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.memory import communicators_of
from prism_plugins.program.prediction import ClassMemory, Finding, Prediction
from prism_plugins.program.slices import SliceReport
from prism_plugins.progress import Progress
from prism_plugins.report.path_ops import PathOp
from prism_plugins.rundir import RunDir
from prism_plugins.simulate.timeline import Timeline

_DESCRIPTION = """\
Price a run on another cluster: the same programs of all ranks, other GPUs, links and network; or with faults: slow ranks
and NICs, jitter, a rank that fails. Nothing runs again, and nothing is saved without --out. Whether it fits is judged by
the other GPU's memory."""

_EPILOG = """\
examples:
  prism what-if latest --cluster dgx-b200
  prism what-if prism_out/RUN --cluster mine.toml --out on_mine.json
  prism what-if latest --cluster dgx-h200 --json | jq .iteration_time_ms
  prism what-if latest --slow-rank 37=1.3 --slow-link node3:nic2=0.5
  prism what-if latest --slow-rank 37=1.3 --replay 0       (of a run with --prism-device cuda, on such a GPU)
  prism what-if latest --jitter 3% --seeds 20
  prism what-if latest --fail rank=100@12ms
`prism cluster list` names the presets."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "what-if", help="a run on another cluster, or with faults", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_run_argument(parser)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="cluster preset, or path of a TOML file; default with faults: the run's own",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the new prediction there, as JSON")
    parser.add_argument(
        "--json", action="store_true", help="print the new prediction instead of the comparison"
    )
    add_fault_arguments(parser)
    parser.add_argument(
        "--replay", metavar="LIST", default="",
        help="also run these ranks again among peers as the faults have them (or, without a fault, as they were): on the GPU that "
        "is here, where slices ran on one, else on a virtual clock. Nothing is sliced again. In the directory and environment "
        "of the launch",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison, or what the faults do."""
    faults = arguments.slow_rank or arguments.slow_link or arguments.jitter or arguments.fail
    if faults or arguments.replay:
        return _run_faults(arguments)
    if arguments.cluster is None:
        raise PrismError(
            "what if what? Give --cluster, or a fault (--slow-rank, --slow-link, --jitter, --fail), or --replay"
        )
    cluster = load_cluster(arguments.cluster)
    rundir = open_run(arguments.run_directory)
    check_finished(rundir, rundir.read_info())
    then = read_prediction(rundir.prediction)
    check_world(cluster, then.world_size)
    now = reprice(rundir, then, cluster)
    info = rundir.read_info()
    if info.prism_version != __version__ and info.cluster is not None:  # priced by another model
        then = reprice(rundir, then, info.cluster)
    if arguments.out:
        write_prediction(arguments.out, now)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(now), indent=1).decode() + "\n")
        return 0
    console = make_console(sys.stdout)
    show(comparison(then, now), console)
    for finding in now.findings:
        if finding not in then.findings:
            console.print(f"{finding.severity}: {finding.message}")
    console.print(f"Assumed: {_recorded_for(then)}")
    for text in now.assumptions:
        if text.startswith(HOST_ASSUMPTION):  # it decides where the other cluster's GPUs are faster
            console.print(f"         {text}")
    return 0


def _run_faults(arguments: argparse.Namespace) -> int:
    from prism_plugins import stages
    from prism_plugins.fault_report import simulate_faults
    from prism_plugins.simulate.faults import SimulationFault

    if arguments.critical_path and (arguments.jitter or arguments.fail):
        raise PrismError("--critical-path: with --jitter or --fail there is none")
    rundir = open_run(arguments.run_directory)
    gc.disable()
    job, reports, info = load_job(rundir, with_shards=False)
    cluster = None if arguments.cluster else info.cluster
    cluster = cluster or load_cluster(arguments.cluster or info.job.options.cluster)
    world_size = job.layout.world_size
    check_world(cluster, world_size)
    faults = parse_faults(arguments, cluster, world_size)
    replayed: tuple[int, ...] = ()
    if arguments.replay:
        from prism_plugins.what_if_replay import check_replay

        replayed = check_replay(arguments.replay, info, faults)
    nccl = parse_settings(info.nccl_variables)
    calibration = load_calibration(info.job.options.calibration)

    def costs_of(other: Cluster) -> CostModel:
        return stages.price(
            other, job, reports, rundir, device=info.job.options.device, nccl=nccl, calibration=calibration
        )[1]

    try:
        report = simulate_faults(
            job,
            costs_of(cluster),
            cluster,
            faults,
            costs_of=costs_of,
            jobs=arguments.jobs,
            on_path=lambda ops: (
                _write_path(arguments.critical_path, ops) if arguments.critical_path else None
            ),
        )
    except SimulationFault as fault:
        raise PrismError(f"there are no times, the job would not run: {fault.message}") from None
    finally:
        gc.enable()
    findings: tuple[Finding, ...] = ()
    if replayed:
        from prism_plugins.what_if_replay import replay_among_faults

        # Standard output is the report's alone.
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext(), Progress() as progress:
            replays, findings = replay_among_faults(
                rundir, replayed, faults, cluster=cluster, calibration=calibration, progress=progress
            )
        report = msgspec.structs.replace(report, replay=replays)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    if arguments.out:
        with replaced_file(arguments.out) as file:
            file.write(encoded + b"\n")
    if arguments.json:
        sys.stdout.write(encoded.decode() + "\n")
    else:
        print_report(report, make_console(sys.stdout), world_size=world_size)
    for finding in findings:
        print(f"{finding.severity}: {finding.message}", file=sys.stderr)
    return 0


def _write_path(path: Path, ops: Iterator[PathOp]) -> None:
    encoder = msgspec.json.Encoder()
    with replaced_file(path) as file:
        file.writelines(encoder.encode(op) + b"\n" for op in ops)


def reprice(rundir: RunDir, then: Prediction, cluster: Cluster) -> Prediction:
    """The prediction of a run's programs on another cluster.

    Ranks whose optimizer shards differ in size are taken as equal: at 175B on 1024 GPUs that is 0.005 % of the iteration
    and a third of the work. The garbage collector rests meanwhile: there are millions of objects and no garbage.

    Raises :class:`PrismError` for a directory that is not, or not all of, a run.
    """
    from prism_plugins import stages

    gc.disable()
    job, reports, info = load_job(rundir, with_shards=False)
    nccl = parse_settings(info.nccl_variables)
    calibration = load_calibration(info.job.options.calibration)
    if isinstance(calibration, Calibration) and cluster != info.cluster:
        calibration.collectives = []  # measured over another network
    cluster, costs = stages.price(
        cluster, job, reports, rundir, device=info.job.options.device, nccl=nccl, calibration=calibration
    )
    timeline, faults = stages.simulate(job, costs)
    gc.enable()
    return predict(
        Evidence(
            options=msgspec.structs.replace(info.job.options, cluster=cluster.name),
            cluster=cluster,
            facts=info.facts,
            reports=reports,
            programs=job,
            costs=costs,
            timeline=timeline,
            memory=_memory(job, reports, then, cluster, costs, timeline, nccl),
            findings=(*faults, *costs.findings()),
            audit=then.audit,
            assumptions=(_recorded_for(then),),
        )
    )


def _recorded_for(then: Prediction) -> str:
    return f"programs were recorded for {then.cluster}; what a script decides by the kind of GPU is as it was there"


def _memory(
    job: JobPrograms,
    reports: dict[int, SliceReport],
    then: Prediction,
    cluster: Cluster,
    costs: CostModel,
    timeline: Timeline | None,
    nccl: NcclSettings,
) -> tuple[ClassMemory, ...]:
    """What torch's allocator holds is as it was; what lies outside it, and the capacity, are the other cluster's."""
    kept = {memory.ranks: memory for memory in then.memory}
    if any(format_ranks(c.ranks) not in kept for c in job.classes):  # by a version with other classes
        return predict_memory(job, cluster, reports, costs, timeline=timeline, nccl=nccl)
    overhead = device_overhead(cluster, nccl)
    found = []
    for rank_class in job.classes:
        memory = kept[format_ranks(rank_class.ranks)]
        uses = communicators_of(
            rank_class,
            reports,
            gpus_per_domain=overhead.gpus_per_domain,
            nvls_groups=nvls_groups(rank_class.exemplar, costs),
        )
        outside = overhead.parts(uses, init_communicators=1)
        taken = sum(outside.values())
        found.append(
            msgspec.structs.replace(
                memory,
                outside_torch=outside,
                device_used_bytes=memory.peak_reserved_bytes + taken,
                sliced=tuple(
                    msgspec.structs.replace(own, device_used_bytes=own.peak_reserved_bytes + taken)
                    for own in memory.sliced
                ),
                capacity_bytes=cluster.gpu.memory_bytes,
            )
        )
    return tuple(found)


def comparison(then: Prediction, now: Prediction) -> Table:
    """Both predictions side by side, and the ratio of the new to the old."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in (then.cluster, now.cluster, "ratio"):
        table.add_column(column, justify="right", no_wrap=True)

    def add(name: str, old: float | None, new: float | None, text: Callable[[float], str]) -> None:
        if old is not None and new is not None and (old or new):
            table.add_row(name, text(old), text(new), f"{new / old:.3f}" if old else "")

    add("iteration", then.iteration_time_ms, now.iteration_time_ms, milliseconds)
    for part in then.breakdown_ms.__struct_fields__:
        old, new = getattr(then.breakdown_ms, part), getattr(now.breakdown_ms, part)
        add(f"  {part.replace('_', ' ')}", old, new, milliseconds)
    add("tokens/s/GPU", then.tokens_per_s_per_gpu, now.tokens_per_s_per_gpu, lambda x: f"{x:,.0f}")
    add("TFLOP/s/GPU", then.tflops_per_gpu, now.tflops_per_gpu, lambda x: f"{x:,.1f}")
    if then.memory and now.memory:
        old, new = tightest(then.memory), tightest(now.memory)
        add("used of the device", old.device_used_bytes, new.device_used_bytes, gib)
        add("capacity", old.capacity_bytes, new.capacity_bytes, gib)
        table.add_row("fits", *(_fits(p) for p in (then, now)), "")
    return table


def _fits(prediction: Prediction) -> str:
    severities = {f.severity for f in prediction.findings if f.kind == "oom"}
    return "no" if "error" in severities else "hardly" if severities else "yes"
