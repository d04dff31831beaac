"""Layers of a reduced job whose device waits for its host, and what a stage of many of them takes."""

from __future__ import annotations

import numpy as np
import pytest

from prism_plugins.costs.altered import without_host
from prism_plugins.costs.base import Price
from prism_plugins.integration.tuning import Chunk, Shape
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EVENT_DTYPE, EventKind, OpSignature, Phase, Program, TensorSpec
from prism_plugins.program.slices import JobFacts
from prism_plugins.simulate.engine import Simulation
from prism_plugins.tune.compose import Composer
from prism_plugins.tune.layers import LayerCosts, measure
from prism_plugins.world.layout import Layout

SMALL, LARGE = (
    OpSignature(op=name, inputs=(TensorSpec("bfloat16", (8,)),), outputs=(TensorSpec("bfloat16", (8,)),))
    for name in ("aten::add", "aten::mm")
)
DEVICE_US, HOST_US = {"aten::add": 10.0, "aten::mm": 400.0}, 100.0


class Prices:
    """Ops of fixed lengths, a host that takes 100 us for each."""

    name = "fixed"
    interference = None

    def price_op(self, signature):
        return Price(
            duration_ns=DEVICE_US[signature.op] * 1e3,
            host_ns=HOST_US * 1e3,
            provenance="modelled",
            rule="fixed",
        )

    def in_state_of(self, signatures):
        return self

    def settle(self, job):
        pass


def reduced_job(layers: int) -> Program:
    """Two micro-batches; a layer is two small kernels and a large one, forward and backward; the loss a small one."""
    phases, rows = [], []
    for micro in range(2):
        for kind in ("forward", "backward"):
            rows.append((EventKind.PHASE_BEGIN, 0, 0, len(phases), 0))
            ops = [0, 0, 1] * layers + ([0] if kind == "forward" else [])
            rows += [(EventKind.KERNEL, 0, 0, ref, 0) for ref in ops]
            rows.append((EventKind.DEVICE_SYNC, 0, 0, 0, 0))
            rows.append((EventKind.PHASE_END, 0, 0, len(phases), 0))
            phases.append(Phase(kind=kind, microbatch=micro))
    events = np.array(rows, dtype=EVENT_DTYPE)
    return Program(
        rank=0, events=events, signatures=[SMALL, LARGE], comms=[], groups=[], phases=phases, initial=[]
    )


@pytest.fixture
def layer_costs() -> LayerCosts:
    facts = JobFacts(framework="x", layout=Layout(world_size=1))
    programs = [reduced_job(1), reduced_job(2)]
    return measure(programs, facts, Prices(), nvls=frozenset(), gpus_per_domain=8)


def test_device_and_host_are_told_apart(layer_costs):
    assert layer_costs.layer("forward") == pytest.approx(0.42)
    assert layer_costs.layer("backward") == pytest.approx(0.42)
    assert layer_costs.around("forward") == pytest.approx(0.01)
    assert layer_costs.layer("host_forward") == pytest.approx(0.3)
    # The large kernel of the first layer is issued at 0.3 ms, when the device could have begun it at 0.02.
    assert layer_costs.two.lag_forward == pytest.approx(0.28)


@pytest.mark.parametrize("layers", [1, 2, 8, 30])
def test_a_step_after_a_synchronisation_takes_what_the_simulation_says(layer_costs, layers):
    step = step_ms(layer_costs, layers, pp=2)
    assert step == pytest.approx(layers * 0.42 + 0.28)
    assert step == pytest.approx(simulated_backward_ms(layers), abs=0.01)


def test_without_synchronisation_the_slower_of_both_counts(layer_costs):
    assert step_ms(layer_costs, 8, pp=1) == pytest.approx(8 * 0.42)


def test_a_free_host_issues_in_no_time():
    assert without_host(Prices()).price_op(LARGE).host_ns == 0.0


def step_ms(costs: LayerCosts, layers: int, *, pp: int) -> float:
    """A backward step of so many layers, without embedding and loss."""
    chunk = Chunk(layers=(("plain", layers),))
    shape = Shape(
        layout=Layout(world_size=pp, pp=pp), chunks=((chunk,),) * pp, transfer_elements=1, transfer_dtype="bfloat16",
        sharded_optimizer=False, overlap_grad=False, overlap_param=False, bucket_elements=1, param_dtype="bfloat16",
        tied_embedding=False, async_p2p=False,
    )  # fmt: skip
    return Composer(Prices(), None)._step(shape, {"plain": costs}, chunk, "backward")


def simulated_backward_ms(layers: int) -> float:
    """From the synchronisation after the forward step to the end of the first backward step's last kernel."""
    program = reduced_job(layers)
    ranks = np.array([0])
    cls = RankClass(name="all", ranks=ranks, representative=0, exemplar=program)
    times = Simulation(JobPrograms(layout=Layout(world_size=1), classes=(cls,)), Prices()).op_times(0)
    ends = {
        (phase.kind, phase.microbatch): float(times.end_ns[lo:hi].max())
        for phase, lo, hi in program.iter_phases()
    }
    return (ends["backward", 0] - ends["forward", 0]) / 1e6
