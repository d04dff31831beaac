"""The stage after the simulation: ranks of interest run again, on a real GPU among timed virtual participants, without one on
a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from prism_plugins.costs.base import CostModel
from prism_plugins.errors import FileFormatError
from prism_plugins.gpu.timing import steady_ms
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.prediction import Finding
from prism_plugins.program.replay import VIRTUAL_CLOCK, ClockPlan, ReplayPlan, ReplayResult, ReplaySummary
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.progress import Progress
from prism_plugins.replay.plan import make_clock_plan, make_plan
from prism_plugins.rundir import RunDir, read_json, write_json
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.timeline import Timeline
from prism_plugins.slice_pool import SlicePool

_WARM_UP = 4
"""Iterations of a replay that are not counted."""
DISAGREEMENT = 0.03
"""Replay and simulation that differ by more are worth a finding."""


def replay_ranks(
    ranks: tuple[int, ...],
    *,
    programs: JobPrograms,
    costs: CostModel,
    timeline: Simulation | Timeline,
    rundir: RunDir,
    spec_of: Callable[[int], SliceSpec],
    progress: Progress,
) -> tuple[tuple[ReplaySummary, ...], tuple[Finding, ...]]:
    """Replay ranks one after the other, in ``rundir/replay``. A replay that fails is a finding: the simulation stands without
    it."""
    summaries, findings = [], []
    for rank in ranks:
        folder = rundir.replay(rank)
        folder.path.mkdir(parents=True, exist_ok=True)
        spec = msgspec.structs.replace(spec_of(rank), slice_dir=str(folder.path), replay=str(folder.plan))
        plan: ReplayPlan | ClockPlan
        if spec.device == "cuda":
            plan = make_plan(programs, costs, timeline, rank)
            how = f"among {len(plan.calls)} calls with virtual peers"
        else:
            plan = make_clock_plan(programs, costs, timeline, rank)
            how = "on a virtual clock"
        write_json(folder.plan, plan)
        progress.stage(f"replaying rank {rank} {how}")
        report = _run(spec, progress)
        if report.status != "ok":
            findings.append(
                _finding(rank, f"the replay of rank {rank} {report.status}: {report.message} ({folder.log})")
            )
            continue
        try:
            result = read_json(folder.replay, ReplayResult)
        except FileFormatError as error:
            findings.append(_finding(rank, f"the replay of rank {rank} left no result: {error}"))
            continue
        summary = summarise(
            result, simulated_ms=plan.iteration_ns / 1e6, log=str(folder.log.relative_to(rundir.path))
        )
        summaries.append(summary)
        findings += check(summary, result)
    return tuple(summaries), tuple(findings)


def summarise(result: ReplayResult, *, simulated_ms: float, log: str) -> ReplaySummary:
    """The steady iterations of a replay."""
    steady = result.iteration_ms[_WARM_UP:] or result.iteration_ms
    median = steady_ms(steady)
    return ReplaySummary(
        rank=result.rank,
        iteration_time_ms=median,
        simulated_ms=simulated_ms,
        spread=(max(steady) - min(steady)) / median if steady and median else 0.0,
        iterations=len(steady),
        unmatched_calls=result.unmatched,
        peak_allocated_bytes=result.peak_allocated_bytes,
        timer=result.timer,
        log=log,
    )


def check(summary: ReplaySummary, result: ReplayResult) -> list[Finding]:
    """What is doubtful about a replay."""
    found = []
    if summary.unmatched_calls:
        found.append(
            _finding(
                summary.rank,
                f"{summary.unmatched_calls} calls of the replay were not in the simulated program: answered at once",
            )
        )
    if result.strange:
        found.append(
            _finding(
                summary.rank,
                f"{_iterations(result.strange)} of the replay did other things than the simulated one: times that the script "
                "read there are rough",
            )
        )
    if result.timer not in ("globaltimer", VIRTUAL_CLOCK):
        found.append(
            _finding(
                summary.rank,
                "the kernel of virtual peers could not be compiled (NVRTC): calls sleep for their predicted duration, late "
                "peers and their traffic are not acted",
            )
        )
    if summary.simulated_ms and abs(summary.iteration_time_ms / summary.simulated_ms - 1) > DISAGREEMENT:
        found.append(
            _finding(
                summary.rank,
                f"replay and simulation disagree: {summary.iteration_time_ms:.1f} against {summary.simulated_ms:.1f} ms",
            )
        )
    return found


def _iterations(number: int) -> str:
    return f"{number} iteration{'s' if number != 1 else ''}"


def _finding(rank: int, message: str) -> Finding:
    return Finding(kind="replay", severity="warning", ranks=str(rank), phase="", message=message)


def _run(spec: SliceSpec, progress: Progress) -> SliceReport:
    with SlicePool(1, progress.line) as pool:
        pool.start(spec, stream=True)
        while True:
            for _, report in pool.collect():
                return report
            time.sleep(0.05)
