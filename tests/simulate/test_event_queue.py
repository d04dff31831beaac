"""The engine against simpy, a plain event queue, on random jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from builders import TableCosts, one_class_per_rank, random_programs
from symmetric import random_job

from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout

pytest.importorskip("simpy")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.parametrize("seed", range(6))
def test_same_times_to_a_nanosecond(seed: int) -> None:
    from event_queue import EventQueueSimulation

    rng = np.random.default_rng(seed)
    if seed % 2:
        job = one_class_per_rank(random_programs(rng, num_ranks=5, num_actions=300))
    else:
        job = random_job(rng, layout=Layout(world_size=16, tp=2, pp=4, dp=2), num_actions=60)
    simulation = Simulation(job, TableCosts())
    queue = EventQueueSimulation(job, TableCosts())
    assert simulation.timeline.iteration_time_ns == pytest.approx(queue.finish_ns.max(), abs=1)
