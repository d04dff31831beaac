"""The conductor: plan → slices → infer → simulate → emit, one stage call after the other."""

from __future__ import annotations

import datetime

import msgspec

from prism_plugins.cache import SliceCache
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.options import Job
from prism_plugins.program.slices import JobFacts
from prism_plugins.progress import Progress
from prism_plugins.rundir import RunInfo, create
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
    options = job.options
    cluster = load_cluster(options.cluster)
    rundir = create(job)
    info = RunInfo(job=job, started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"))
    rundir.write_info(info)
    with Progress() as progress, SlicePool(options.jobs, progress.line) as pool:
        runner = SliceRunner(
            job,
            gpu=cluster.gpu_facts(),
            gpus_per_node=cluster.gpus_per_node,
            rundir=rundir,
            cache=SliceCache() if options.cache else None,
            executors=[pool],
            progress=progress,
        )

        def plan(facts: JobFacts) -> None:
            check_facts(facts, options)
            runner.add(plan_slices(facts, options))

        runner.add({0: ()})
        runner.run(on_facts=plan)
        info = msgspec.structs.replace(
            info, status="ok", facts=runner.reports[0].facts, slices=tuple(sorted(runner.reports))
        )
        rundir.write_info(info)
    return 0
