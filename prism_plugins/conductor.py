"""The conductor: plan → slices → infer → simulate → emit, one stage call after the other."""

from __future__ import annotations

import contextlib

from prism_plugins.cache import SliceCache
from prism_plugins.costs.cluster import Cluster, load_cluster
from prism_plugins.options import Job
from prism_plugins.physical import (
    Launch,
    Leadership,
    launch_from_environment,
    runs_for_real,
    serve,
    serve_store,
)
from prism_plugins.program.slices import JobFacts
from prism_plugins.progress import Progress
from prism_plugins.rundir import RunDir, create
from prism_plugins.slice_plan import check_facts, plan_slices
from prism_plugins.slice_pool import SlicePool
from prism_plugins.slice_runner import SliceRunner


def conduct(job: Job) -> int:
    """Run the whole emulation; returns the exit status.

    Raises:
        PrismError: a mistake the user can act on.
        SliceFailed: a slice crashed.
        Interrupted: Ctrl-C or SIGTERM; children were ended, finished slices are kept.
    """
    launch = launch_from_environment()
    cluster = load_cluster(job.options.cluster)
    if not launch.leads:
        return serve(launch, jobs=job.options.jobs)
    rundir = create(job)
    with rundir.recording(job, launch_world=launch.world) as record, Progress() as progress:
        runner = run_slices(job, launch, cluster, rundir, progress)
        record(facts=runner.facts, slices=tuple(sorted(runner.reports)))
    return 0


def run_slices(job: Job, launch: Launch, cluster: Cluster, rundir: RunDir, progress: Progress) -> SliceRunner:
    """Run the lead slice, plan from its facts, run the others."""
    options = job.options
    for_real = runs_for_real(options, launch)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(SlicePool(options.jobs, progress.line))
        executors = [pool]
        if launch.world > 1:
            executors += stack.enter_context(Leadership(launch, rundir)).workers
        runner = SliceRunner(
            job,
            gpu=cluster.gpu_facts(),
            gpus_per_node=cluster.gpus_per_node,
            rundir=rundir,
            cache=SliceCache() if options.cache and not for_real else None,
            executors=executors,
            progress=progress,
        )
        if for_real:
            store, address = serve_store()
            runner.run_for_real(address)
            del store
        else:

            def plan(facts: JobFacts) -> None:
                check_facts(facts, options)
                runner.add(plan_slices(facts, options))

            runner.add({0: ()})
            runner.run(on_facts=plan)
    return runner
