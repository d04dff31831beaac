"""The fault flags of ``prism what-if``: slow ranks and NICs, jitter, a rank that fails."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from rich.console import Console

from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.slow_links import SlowLink
from prism_plugins.emit.console import milliseconds
from prism_plugins.emit.ranks import format_ranks
from prism_plugins.errors import PrismError
from prism_plugins.fault_report import FaultReport, Faults, Waiting
from prism_plugins.simulate.vector import Failure

NCCL_TIMEOUT_S = 600
"""torch.distributed's default for NCCL groups: so long a hang lasts until the watchdog ends the job."""
_STALLS = 12
_SMALL_SHARE = 0.02
"""Of the waiting for the rank that is waited for most: less than that is left out."""


def add_fault_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags."""
    group = parser.add_argument_group("faults")
    group.add_argument("--slow-rank", action="append", default=[], metavar="R=F",
                       help="kernels of rank R last F times as long; may be given again")  # fmt: skip
    group.add_argument("--slow-link", action="append", default=[], metavar="nodeN:nicM=F",
                       help="that NIC has only this share of its rate (0.5: half); may be given again")  # fmt: skip
    group.add_argument("--jitter", metavar="P%",
                       help="speeds of ranks differ: a normal factor with this standard deviation on each one's kernels")  # fmt: skip
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="draws of the jitter (default 1)")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="the first of them (default 0)")
    group.add_argument("--fail", metavar="rank=R@T", help="rank R stops T (12ms, 0.5s) into the iteration")
    group.add_argument("--critical-path", type=Path, metavar="FILE",
                       help="write every op of the critical path there, as JSON lines (not with jitter or --fail)")  # fmt: skip
    group.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="processes for seeds (default: cores)"
    )


def parse_faults(arguments: argparse.Namespace, cluster: Cluster, world_size: int) -> Faults:
    """The flags as data. Raises :class:`PrismError` naming the flag that is wrong."""
    return Faults(
        slow_ranks=dict(_slow_rank(text, world_size) for text in arguments.slow_rank),
        slow_links=tuple(_slow_link(text, cluster, world_size) for text in arguments.slow_link),
        jitter=_jitter(arguments.jitter),
        seeds=_seeds(arguments.seeds),
        first_seed=arguments.seed,
        failure=_failure(arguments.fail, world_size),
    )


def _match(flag: str, pattern: str, text: str, example: str) -> re.Match:
    found = re.fullmatch(pattern, text.strip())
    if found is None:
        raise PrismError(f"{flag} {text!r} is not of the form {example}")
    return found


def _rank(flag: str, rank: int, world_size: int) -> int:
    if rank >= world_size:
        raise PrismError(f"{flag}: rank {rank} is outside the world of {world_size} ranks")
    return rank


def _slow_rank(text: str, world_size: int) -> tuple[int, float]:
    found = _match("--slow-rank", r"(\d+)=(\d+(?:\.\d+)?)", text, "37=1.3")
    factor = float(found[2])
    if not 0.01 <= factor <= 1000:
        raise PrismError(f"--slow-rank {text!r}: the factor must be between 0.01 and 1000")
    return _rank("--slow-rank", int(found[1]), world_size), factor


def _slow_link(text: str, cluster: Cluster, world_size: int) -> SlowLink:
    found = _match("--slow-link", r"node(\d+):nic(\d+)=(\d+(?:\.\d+)?)", text, "node3:nic2=0.5")
    link = SlowLink(node=int(found[1]), nic=int(found[2]), factor=float(found[3]))
    if not 0 < link.factor <= 1:
        raise PrismError(f"--slow-link {text!r}: the share of the rate must be above 0 and at most 1")
    if link.nic >= cluster.node.num_nics:
        raise PrismError(f"--slow-link {text!r}: nodes of {cluster.name} have {cluster.node.num_nics} NICs")
    if link.node * cluster.gpus_per_node >= world_size:
        raise PrismError(f"--slow-link {text!r}: the job has {-(-world_size // cluster.gpus_per_node)} nodes")
    return link


def _jitter(text: str | None) -> float:
    if text is None:
        return 0.0
    share = float(_match("--jitter", r"(\d+(?:\.\d+)?)\s*%", text, "3%")[1]) / 100
    if not 0 < share <= 0.3:
        raise PrismError(f"--jitter {text!r} must be above 0 and at most 30%")
    return share


def _seeds(seeds: int) -> int:
    if not 1 <= seeds <= 10_000:
        raise PrismError(f"--seeds {seeds} must be between 1 and 10000")
    return seeds


def _failure(text: str | None, world_size: int) -> Failure | None:
    if text is None:
        return None
    found = _match("--fail", r"(?:rank=)?(\d+)@(\d+(?:\.\d+)?)(us|ms|s)", text, "rank=100@12ms")
    scale = {"us": 1e3, "ms": 1e6, "s": 1e9}[found[3]]
    return Failure(rank=_rank("--fail", int(found[1]), world_size), at_ns=float(found[2]) * scale)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────


def print_report(report: FaultReport, console: Console, *, world_size: int) -> None:
    """The report as text."""
    console.print(f"undisturbed iteration  {milliseconds(report.undisturbed_ms)}")
    if report.iteration_ms:
        times = np.array(report.iteration_ms)
        mean = float(times.mean())
        console.print(
            f"with the faults        {milliseconds(mean)}  ({mean / report.undisturbed_ms - 1:+z.2%}, costs "
            f"{(mean - report.undisturbed_ms) / 1e3 * world_size / 3600:.4f} GPU hours an iteration)"
        )
        if len(times) > 1:
            texts = [f"p{q} {milliseconds(float(np.percentile(times, q)))}" for q in (5, 50, 95)]
            console.print(
                f"  over {len(times)} seeds       {', '.join(texts)}, min {milliseconds(float(times.min()))}, "
                f"max {milliseconds(float(times.max()))}, standard deviation {milliseconds(float(times.std(ddof=1)))}"
            )
        console.print(
            f"waiting                each rank's streams wait {milliseconds(report.waiting_ms)} for others, on average (also "
            "where it computes meanwhile); most for"
        )
        for waiting in report.waited_for:
            if waiting.total_ms >= _SMALL_SHARE * report.waited_for[0].total_ms:
                _print_waiting(waiting, console, world_size=world_size)
    for replay in report.replay:
        console.print(
            f"replay of rank {replay.rank:<6}  {milliseconds(replay.iteration_time_ms)} (simulated "
            f"{milliseconds(replay.simulated_ms)}, {replay.iterations} iterations; its log: what-if/{replay.log})"
        )
    if report.critical_path:
        _print_path(report, console)
    if report.num_stalled:
        lost = NCCL_TIMEOUT_S * world_size / 3600
        console.print(
            f"the iteration never ends: {report.num_stalled} of {world_size} ranks stop. NCCL's watchdog ends the job after "
            f"{NCCL_TIMEOUT_S} s by default: {lost:,.1f} GPU hours until then"
        )
        for stall in report.stalled[:_STALLS]:
            ranks = f"{'rank' if len(stall.ranks) == 1 else 'ranks'} {format_ranks(stall.ranks, max_runs=4)}"
            verb = "stops in" if stall.distance == 0 else "wait in" if len(stall.ranks) > 1 else "waits in"
            far = {-1: "for its own streams", 0: "fails", 1: "for it"}.get(
                stall.distance, f"{stall.distance} calls away"
            )
            console.print(f"  {milliseconds(stall.at_ms):>12}  {far}: {ranks} {verb} {stall.what}")
        if len(report.stalled) > _STALLS:
            console.print(f"  and {len(report.stalled) - _STALLS} more groups of ranks (--json lists them)")


def _print_waiting(waiting: Waiting, console: Console, *, world_size: int) -> None:
    groups = ", ".join(
        f"{milliseconds(ms / world_size)} in {label}" for label, ms in list(waiting.in_groups.items())[:3]
    )
    console.print(
        f"  rank {waiting.rank}: {milliseconds(waiting.total_ms / world_size)} of each rank, on average ({groups})"
    )
    for ranks, each in waiting.by_ranks:
        console.print(f"      {milliseconds(each):>12} each: ranks {ranks}")


def _print_path(report: FaultReport, console: Console) -> None:
    by_kind = ", ".join(
        f"{kind} {milliseconds(ms)}" for kind, ms in report.critical_path_ms.items() if ms > 0
    )
    console.print(f"critical path          {by_kind}")
    ranks = ", ".join(f"rank {rank} {milliseconds(ms)}" for rank, ms in report.critical_path_ranks)
    console.print(f"  it runs most on      {ranks}")
    console.print("  ops that take most of it (--critical-path FILE writes all, in order):")
    for total in report.critical_path:
        group = f" in {total.group}" if total.group else ""
        console.print(
            f"  {milliseconds(total.duration_ms):>12}  {total.times:>6} x {total.kind}{group}: {total.name}"
        )
