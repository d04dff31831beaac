#!/usr/bin/env python3
"""How the simulation scales with the world, and how it compares with a plain event queue (simpy).

    python benchmarks/scale.py                     # worlds of 64 to 65536 GPUs: 175B dimensions, TP8, up to PP16
    python benchmarks/scale.py --compare 64,128    # the same programs on simpy: same times, and the ratio

CPU seconds; with ``--faults`` also one slow rank, one draw of jitter on all ranks and a slow NIC, at each world size.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "scripts")]

from bench_simulate import build_job

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model
from prism_plugins.costs.slow_links import CostsWithSlowLinks
from prism_plugins.simulate.disturbance import Disturbance
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout

WORLDS = (64, 256, 1024, 4096, 8192, 16384, 65536)


def main() -> int:
    """Print the curve or the comparison; 1 when times differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--compare", default="", metavar="WORLDS", help="compare with simpy at these sizes")
    args = parser.parse_args()
    if args.compare:
        return max(compare(int(world), args.microbatches) for world in args.compare.split(","))
    for world in map(int, args.worlds.split(",")):
        curve(world, args.microbatches, faults=args.faults)
    return 0


def layout_of(world: int, microbatches: int) -> Layout:
    """TP8; PP4 in small worlds, PP16 from 1024 on."""
    pp = 16 if world >= 1024 else 4
    return Layout(world_size=world, tp=8, pp=pp, dp=world // (8 * pp), num_microbatches=microbatches)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """(result, CPU seconds)."""
    began = time.process_time()
    return function(), time.process_time() - began


def curve(world: int, microbatches: int, *, faults: bool) -> None:
    """One line of the curve."""
    cluster = load_cluster("dgx-h100")
    job = build_job(layout_of(world, microbatches))
    events = sum(len(c.exemplar.events) for c in job.classes)
    costs = build_cost_model(cluster)
    simulation, seconds = timed(lambda: Simulation(job, costs))
    iteration = simulation.timeline.iteration_time_ns / 1e6
    text = (
        f"{world:6d} ranks, {len(simulation.cells):3d} cells, {events:,} events of classes: {seconds:6.2f} s"
    )
    if faults:
        slow, slow_s = timed(lambda: Simulation(job, costs, Disturbance(slow_ranks={37: 1.3})))
        text += f"; slow rank {slow_s:.2f} s ({slow.timeline.iteration_time_ns / 1e6 / iteration - 1:+.1%})"
        node = msgspec.structs.replace(cluster.node, nic_bytes_per_s=cluster.node.nic_bytes_per_s / 2)
        half = build_cost_model(msgspec.structs.replace(cluster, node=node))
        link, link_s = timed(lambda: Simulation(job, CostsWithSlowLinks(costs, {26: half}, cluster)))
        text += f"; slow NIC {link_s:.2f} s ({link.timeline.iteration_time_ns / 1e6 / iteration - 1:+.1%})"
        rng = np.random.default_rng(0)
        machine, machine_s = timed(lambda: simulation.vector_machine((0.85, 1.15)))
        factors = np.clip(rng.normal(1, 0.03, world), 0.85, 1.15)
        times, draw_s = timed(lambda: machine.run(factors))
        text += (
            f"; jitter 3 % {machine_s + draw_s:.2f} s ({times.finish_ns.max() / 1e6 / iteration - 1:+.1%})"
        )
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{text}; peak RSS so far {rss:,.0f} MiB", flush=True)


def compare(world: int, microbatches: int) -> int:
    """The same job on both; 1 when a rank's time differs by more than a nanosecond."""
    from event_queue import EventQueueSimulation

    job = build_job(layout_of(world, microbatches))
    costs = build_cost_model(load_cluster("dgx-h100"))
    costs.interference = None  # the event queue has none
    simulation, ours = timed(lambda: Simulation(job, costs))
    queue, theirs = timed(lambda: EventQueueSimulation(job, costs))
    finish = np.array([simulation.op_times(r).end_ns.max() for r in range(0, world, max(world // 16, 1))])
    difference = abs(simulation.timeline.iteration_time_ns - queue.finish_ns.max())
    per_rank = float(np.abs(finish - queue.finish_ns[:: max(world // 16, 1)]).max())
    events = sum(len(c.exemplar.events) * len(c.ranks) for c in job.classes)
    print(
        f"{world} ranks, {events:,} events: prism {ours:.2f} s, simpy {theirs:.1f} s of CPU, {theirs / ours:.0f} times as long; "
        f"the iteration differs by {difference:.3g} ns of {queue.finish_ns.max():,.0f}, ranks by at most {per_rank:.3g} ns",
        flush=True,
    )
    return int(max(difference, per_rank) > 1.0)


if __name__ == "__main__":
    sys.exit(main())
