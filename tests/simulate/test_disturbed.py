"""Slow ranks, jitter and failures, against jobs whose programs are really that much slower, rank by rank."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import Builder, TableCosts, collective, one_class_per_rank
from symmetric import every_rank_alone, random_job

from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import OpSignature
from prism_plugins.simulate.disturbance import Disturbance
from prism_plugins.simulate.engine import Simulation
from prism_plugins.simulate.vector import Failure
from prism_plugins.world.layout import Layout

LAYOUT = Layout(world_size=16, tp=2, pp=4, dp=2, num_microbatches=4)


def really_slower(job: JobPrograms, factors: np.ndarray) -> JobPrograms:
    """Every rank on its own, with kernels that last ``factors[rank]`` times as long."""

    def scaled(signature: OpSignature, factor: float) -> OpSignature:
        attrs = signature.attrs
        if signature.op.startswith("host::"):
            return signature
        return msgspec.structs.replace(signature, attrs={**attrs, "ns": attrs["ns"] * factor})

    alone = every_rank_alone(job)
    for cls in alone.classes:
        factor = float(factors[cls.representative])
        cls.exemplar = msgspec.structs.replace(
            cls.exemplar, signatures=[scaled(s, factor) for s in cls.exemplar.signatures]
        )
    return alone


def finish_of(simulation: Simulation) -> np.ndarray:
    return np.array(simulation.timeline.class_time_ns)


@pytest.mark.parametrize("seed", range(8))
def test_a_straggler_is_as_if_its_program_were_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    job = random_job(rng, layout=LAYOUT, shards=bool(seed % 2))
    factors = np.ones(16)
    rank = int(rng.integers(16))
    factors[rank] = 1.7
    truth = finish_of(Simulation(really_slower(job, factors), TableCosts()))
    disturbed = Simulation(job, TableCosts(), Disturbance(slow_ranks={rank: 1.7}))
    assert disturbed.timeline.iteration_time_ns == pytest.approx(truth.max(), abs=1)


@pytest.mark.parametrize("seed", range(8))
def test_every_rank_with_a_speed_of_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    job = random_job(rng, layout=LAYOUT, shards=bool(seed % 2))
    factors = rng.choice([1.0, 1.4], 16)
    truth = finish_of(Simulation(really_slower(job, factors), TableCosts()))
    machine = Simulation(job, TableCosts()).vector_machine((1.0, 1.4))
    times = machine.run(factors, explain=True)
    np.testing.assert_allclose(times.finish_ns, truth, atol=1)
    assert np.isnan(times.stalled_ns).all()
    assert times.waited_ns.sum() == pytest.approx(times.caused_ns.sum())
    again = machine.run(np.ones(16))
    np.testing.assert_allclose(
        again.finish_ns.max(), Simulation(job, TableCosts()).timeline.iteration_time_ns, atol=1
    )


def test_factors_between_the_bounds_are_never_too_short() -> None:
    rng = np.random.default_rng(3)
    job = random_job(rng, layout=LAYOUT, num_actions=60)
    factors = 1 + 0.05 * rng.random(16)
    truth = finish_of(Simulation(really_slower(job, factors), TableCosts())).max()
    times = Simulation(job, TableCosts()).vector_machine((1.0, 1.05)).run(factors)
    assert truth - 1 <= times.finish_ns.max() <= 1.01 * truth


def test_when_a_rank_fails_all_that_depend_on_it_stall() -> None:
    builders = [Builder(r) for r in range(4)]
    for b in builders:
        pair = b.group((0, 1) if b.rank < 2 else (2, 3), "PAIR")
        for _ in range(5):
            b.kernel(10_000.0)
            b.comm(collective(pair))
    job = one_class_per_rank({b.rank: b.program() for b in builders})
    machine = Simulation(job, TableCosts()).vector_machine((1.0, 1.0))
    times = machine.run(np.ones(4), failure=Failure(rank=1, at_ns=25_000))
    assert np.isinf(times.finish_ns[:2]).all()
    assert np.isfinite(times.finish_ns[2:]).all()
    assert 20_000 < times.stalled_ns[0] < 40_000
    assert builders[0].program().events[times.stalled_event[0]]["kind"] == 1
    assert times.stalled_event[2] == -1


def test_who_is_waited_for() -> None:
    builders = [Builder(r) for r in range(3)]
    for b in builders:
        b.kernel(50_000.0 if b.rank == 2 else 10_000.0)
        b.comm(collective(b.group((0, 1, 2), "DATA")))
    job = one_class_per_rank({b.rank: b.program() for b in builders})
    times = Simulation(job, TableCosts()).vector_machine((1.0, 1.0)).run(np.ones(3), explain=True)
    assert times.caused_ns.argmax() == 2
    assert times.caused_ns[2] == pytest.approx(80_000)
    np.testing.assert_allclose(times.waited_ns, [40_000, 40_000, 0])
