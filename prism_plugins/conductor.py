"""The conductor: plan → slices → infer → simulate → emit, one stage call after the other."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from prism_plugins import stages
from prism_plugins.cache import SliceCache
from prism_plugins.costs.cluster import Cluster, check_world, load_cluster
from prism_plugins.costs.model import load_calibration
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.emit import JobView, emit_all
from prism_plugins.errors import PrismError
from prism_plugins.gpu.sensors import gpu_identity
from prism_plugins.local_rank import check_local_rank
from prism_plugins.options import LOGGING_RANK, Job
from prism_plugins.physical import (
    Launch,
    Leadership,
    launch_from_environment,
    led_elsewhere,
    runs_for_real,
    serve,
    serve_store,
)
from prism_plugins.predict import Evidence, predict, predict_memory
from prism_plugins.program.slices import JobFacts
from prism_plugins.progress import Progress
from prism_plugins.replays import replay_ranks
from prism_plugins.report.html import write_report
from prism_plugins.report.insight import look_into, with_insight
from prism_plugins.rundir import RunDir, create
from prism_plugins.script import check_script
from prism_plugins.slice_plan import check_facts, plan_audited, plan_slices
from prism_plugins.slice_pool import SlicePool
from prism_plugins.slice_runner import Executor, SliceRunner, late_failures
from prism_plugins.world.classes import dependencies


def conduct(job: Job) -> int:
    """Run the whole emulation; returns the exit status, 1 when an audited rank differs from what was inferred or the script
    failed after the iterations that are predicted.

    Raises:
        PrismError: a mistake the user can act on.
        SliceFailed: a slice crashed.
        Interrupted: Ctrl-C or SIGTERM; children were ended, finished slices are kept.
    """
    check_script(job.run_as, job.argv[0])
    check_local_rank(job.argv, os.environ)
    if (leader := led_elsewhere()) is not None:
        print(f"prism: {leader}", file=sys.stderr, flush=True)
        return 0
    launch = launch_from_environment()
    options = job.options
    cluster = load_cluster(options.cluster)
    calibration = load_calibration(options.calibration)
    check_world(cluster, options.world_size)
    nccl = parse_settings(os.environ)
    if not launch.leads:
        return serve(launch, jobs=options.jobs)
    rundir = create(job)
    with (
        rundir.recording(
            job, cluster=cluster, nccl_variables=nccl.variables, launch_world=launch.world
        ) as record,
        Progress() as progress,
    ):
        with slices_of(job, launch, cluster, rundir, progress) as runner:
            facts = runner.facts
            progress.stage("inferring the programs of all ranks")

            def slice_more(ranks: tuple[int, ...], again: tuple[int, ...]) -> None:
                runner.forget(again)
                known = runner.sliced
                runner.add({rank: dependencies(facts, rank, sliced=known) for rank in (*ranks, *again)})
                runner.run()

            programs = stages.infer(
                facts, lambda: runner.sliced, rundir, slice_more=slice_more, note=progress.note
            )
            audit, differences = stages.audit(programs, runner.audited, rundir)
            if differences:  # what really runs is what is checked and simulated
                programs = stages.with_audited(programs, facts, lambda: runner.reports, rundir, slice_more)
        cluster, costs = stages.price(
            cluster,
            programs,
            runner.sliced,
            rundir,
            device=options.device,
            nccl=nccl,
            calibration=calibration,
        )
        record(
            cluster=cluster,
            facts=facts,
            slices=tuple(sorted(runner.reports if differences else runner.sliced)),
            audited=tuple(sorted(runner.audited)),
        )
        progress.stage(f"simulating {options.world_size} ranks")
        timeline, faults = stages.simulate(programs, costs)
        if options.strict and timeline is not None:
            stages.check_strict(timeline)
        logging_rank = stages.logging_rank(runner.sliced)
        replays, doubts = (), ()
        if options.replay and timeline is not None:
            replays, doubts = replay_ranks(
                tuple(max(logging_rank, 0) if rank == LOGGING_RANK else rank for rank in options.replay),
                programs=programs,
                costs=costs,
                timeline=timeline,
                rundir=rundir,
                spec_of=lambda rank: runner.spec(rank, tuple(sorted(runner.sliced))),
                progress=progress,
            )
        progress.stage("memory of all ranks")
        memory = predict_memory(programs, cluster, runner.reports, costs, timeline=timeline, nccl=nccl)
        findings = stages.check(
            programs,
            facts,
            runner.reports,
            cluster=cluster,
            timeline=timeline,
            faults=faults,
            memory=memory,
            environment=os.environ,
            moe_load=options.moe_load,
        )
        prediction = predict(
            Evidence(
                options=options,
                cluster=cluster,
                facts=facts,
                reports=runner.reports,
                programs=programs,
                costs=costs,
                timeline=timeline,
                logging_rank=logging_rank,
                timers_ms=stages.timer_spans(
                    programs, costs, timeline, logging_rank, runner.sliced.get(logging_rank)
                ),
                memory=memory,
                findings=(*findings, *differences, *costs.findings(), *doubts),
                replays=replays,
                audit=audit,
            )
        )

        progress.stage("writing the run directory")
        log_lines = stages.rewrite_log(facts, runner.reports, prediction)
        progress.close()
        view = JobView(
            job=programs,
            costs=costs,
            timeline=timeline,
            gpu=cluster.gpu_facts(),
            gpus_per_node=cluster.gpus_per_node,
        )
        insight = look_into(view) if timeline is not None else None
        if insight is not None:
            prediction = with_insight(prediction, view, insight)
        write_report(
            rundir.report, prediction, title=job.argv[0], view=view, insight=insight, cluster=cluster
        )
        emit_all(rundir, prediction, view=view, log_lines=log_lines)
    failures = late_failures(runner.reports, rundir)
    for text in failures:
        print(f"\n{text}", file=sys.stderr, flush=True)
    return 1 if differences or failures else 0


@contextlib.contextmanager
def slices_of(
    job: Job, launch: Launch, cluster: Cluster, rundir: RunDir, progress: Progress
) -> Iterator[SliceRunner]:
    """Run the lead slice, plan from its facts, run the others. The runner takes further ranks in the block."""
    options = job.options
    for_real = runs_for_real(options, launch)
    if for_real and options.device == "cuda":
        raise PrismError(
            "--prism-device cuda with every rank of the world launched and of interest is the job itself: leave out the flag "
            "to run it, or leave out --prism-ranks to share the slices"
        )
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(SlicePool(options.jobs, progress.output))
        executors: list[Executor] = [pool]
        if launch.world > 1:
            executors += stack.enter_context(Leadership(launch, rundir)).workers
            if not for_real:
                progress.note(f"{launch.world} launched processes share the slices; one is enough")
        runner = SliceRunner(
            job,
            gpu=cluster.gpu_facts(),
            gpus_per_node=cluster.gpus_per_node,
            rundir=rundir,
            cache=SliceCache() if options.cache and not for_real and _recognised(options.device) else None,
            executors=executors,
            progress=progress,
        )
        if for_real:
            _store, address = serve_store()  # Lives as long as this block.
            runner.run_for_real(address)
        else:

            def plan_rest(facts: JobFacts) -> None:
                check_facts(facts, options)
                plan = plan_slices(facts, options)
                runner.add(plan)
                runner.add(plan_audited(facts, options, sliced=plan), audit=True)

            runner.add({0: ()})
            runner.run(on_facts=plan_rest)
        yield runner


def _recognised(device: str) -> bool:
    """Whether a later launch can tell that slices would run on the same GPU."""
    return device != "cuda" or bool(gpu_identity())
