"""Host times scaled to the CPU time of slices."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from prism_plugins.costs.calibration import HostCosts
from prism_plugins.costs.cluster import Cluster, Host, load_cluster, parse_cluster
from prism_plugins.costs.families import FAMILIES
from prism_plugins.costs.host import enqueue_kind
from prism_plugins.costs.model import build_cost_model, host_of
from prism_plugins.host_benchmark import KINDS, DispatchBenchmark
from prism_plugins.host_speed import DISPATCH_IN_TRAINING, ENQUEUE_IN_TRAINING, with_host_of_slices
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EVENT_DTYPE, EventKind, OpSignature, Program, TensorSpec
from prism_plugins.program.slices import HostFigures, SliceReport
from prism_plugins.world.layout import Layout
from tests.costs.test_cluster import preset_text

ADD = OpSignature(
    op="aten::add.Tensor", inputs=(TensorSpec("float32", (8,)),) * 2, outputs=(TensorSpec("float32", (8,)),)
)
VIEW = OpSignature(op="aten::view", inputs=(TensorSpec("float32", (8,)),))


def job(*, kernels: int, views: int, source: str = "sliced") -> JobPrograms:
    rows = [(EventKind.KERNEL, 0, 0, 0, 0)] * kernels + [(EventKind.KERNEL, 0, 0, 1, 0)] * views
    program = Program(
        rank=0, events=np.array(rows, EVENT_DTYPE), signatures=[ADD, VIEW], comms=[], groups=[], phases=[],
        initial=[], source=source,
    )  # fmt: skip
    return JobPrograms(
        layout=Layout(world_size=1),
        classes=(RankClass(name="all", ranks=np.array([0]), representative=0, exemplar=program),),
    )


def report(*cpu_seconds: float, host: HostFigures | None = None) -> dict[int, SliceReport]:
    return {0: SliceReport(rank=0, status="ok", cpu_seconds_per_iteration=cpu_seconds, host=host)}


def figures(
    *dispatch_us: float, version: int = 1, in_training: bool = True, **enqueue_us: float
) -> HostFigures:
    return HostFigures(
        version=version, dispatch_us=dispatch_us, enqueue_us=enqueue_us, in_training=in_training
    )


def calibrated(benchmark: HostFigures) -> HostCosts:
    return HostCosts(op_us=1.0, dispatch_us=1.0, view_us=1.0, cpu="Some CPU", benchmark=benchmark)


def scaled(cluster: Cluster, **given: float) -> Cluster:
    return msgspec.structs.replace(cluster, host=msgspec.structs.replace(cluster.host, **given))


def test_times_are_those_of_the_least_disturbed_iteration_after_the_first():
    # By the preset: 100 x 10 us + 50 x 2 us = 1.1 ms.
    found = with_host_of_slices(
        load_cluster("dgx-h100"), job(kernels=100, views=50), report(0.9, 0.0066, 0.0055), None
    )
    assert (found.host.op_us, found.host.view_us, found.host.comm_us) == (50.0, 10.0, 125.0)
    assert build_cost_model(found).price_op(ADD).host_ns == pytest.approx(50e3)
    assert any("CPU time of the slices" in line for line in build_cost_model(found).assumptions())


def test_iterations_that_differ_and_a_busy_machine_are_told():
    reports = report(0.9, 0.0055, 0.0066, 0.0055, host=figures(1000.0, 1000.0, 1000.0, 1000.0))
    target = calibrated(figures(1000.0))

    def host_and_line(*seconds: float) -> tuple[Host, str]:
        reports[0] = msgspec.structs.replace(reports[0], seconds_per_iteration=seconds)
        found = with_host_of_slices(load_cluster("dgx-h100"), job(kernels=100, views=50), reports, target)
        (line,) = (text for text in build_cost_model(found).assumptions() if "CPU time of the slices" in text)
        return found.host, line

    host, line = host_and_line(0.9, 0.0055, 0.0068, 0.0056)
    # 5.5, 6.6 and 5.5 ms: the 84th percentile is 6.25.
    assert host.spread == pytest.approx(0.068, abs=0.001)
    assert "differ by ±7 %" in line
    assert "busy" not in line
    host, line = host_and_line(0.9, 0.0110, 0.0150, 0.0056)
    assert host.stretch == 2.0
    assert "iterations took 2.0 times their CPU time" in line


def test_a_slower_host():
    cluster = scaled(load_cluster("dgx-h100"), slice_factor=1.5)
    found = with_host_of_slices(cluster, job(kernels=100, views=50), report(0.9, 0.0055), None)
    assert found.host.op_us == 75.0


def test_given_times_are_meant_as_they_are():
    cluster = parse_cluster(preset_text() + "\n[host]\nop_us = 40.0\n", source="test")
    assert with_host_of_slices(cluster, job(kernels=100, views=50), report(0.9, 0.0055), None) is cluster
    cluster = parse_cluster(preset_text() + "\n[host]\nslice_factor = 2.0\n", source="test")
    assert (
        with_host_of_slices(cluster, job(kernels=100, views=50), report(0.9, 0.0055), None).host.op_us
        == 100.0
    )


@pytest.mark.parametrize("cpu", [(), (0.9,)])
def test_too_few_iterations_change_nothing(cpu):
    cluster = load_cluster("dgx-h100")
    assert with_host_of_slices(cluster, job(kernels=100, views=50), report(*cpu), None) is cluster


def test_derived_programs_have_no_cpu_time_of_their_own():
    cluster = load_cluster("dgx-h100")
    assert (
        with_host_of_slices(cluster, job(kernels=9, views=0, source="derived"), report(0.9, 0.1), None)
        is cluster
    )


def test_another_host_takes_longer_and_its_calls_on_the_device_count():
    # 100 kernels of 2 us are recorded in the slice: 5.3 ms of its 5.5 are Python. The benchmark takes twice as long there,
    # where a call takes 6 us.
    reports = report(0.9, 0.0055, host=figures(900.0, 1000.0, elementwise=2.0))
    target = calibrated(figures(1900.0, elementwise=6.0))
    found = with_host_of_slices(load_cluster("dgx-h100"), job(kernels=100, views=50), reports, target)
    assert found.host.op_us == pytest.approx(2 * 0.0053 / 0.0011 * 10.0, rel=0.01)
    price = build_cost_model(found).price_op(ADD)
    assert price.host_ns == pytest.approx((found.host.op_us + 6.0) * 1e3)
    assert any("2.00" in line and "Some CPU" in line for line in build_cost_model(found).assumptions())


def test_figures_of_a_process_of_its_own_are_taken_to_that_of_a_training_one():
    reports = report(0.9, 0.0055, host=figures(900.0, 1000.0, elementwise=2.0))
    own = calibrated(figures(1900.0 / DISPATCH_IN_TRAINING, in_training=False, elementwise=6.0))
    found = with_host_of_slices(load_cluster("dgx-h100"), job(kernels=100, views=50), reports, own)
    assert found.host.op_us == pytest.approx(2 * 0.0053 / 0.0011 * 10.0, rel=0.01)
    assert found.host.enqueue_us == {"elementwise": pytest.approx(6.0 * ENQUEUE_IN_TRAINING)}


def test_a_description_may_give_the_benchmarks_figures():
    reports = report(0.9, 0.0055, host=figures(900.0, 1000.0, elementwise=2.0))
    text = preset_text() + "\n[host]\ndispatch_us = 1900.0\n[host.enqueue_us]\nelementwise = 6.0\n"
    cluster = parse_cluster(text, source="test")
    found = with_host_of_slices(cluster, job(kernels=100, views=50), reports, host_of(None, cluster))
    assert found.host.op_us == pytest.approx(2 * 0.0053 / 0.0011 * 10.0, rel=0.01)
    assert found.host.enqueue_us == {"elementwise": 6.0}
    assert host_of(None, load_cluster("dgx-h100")).benchmark.in_training
    assert host_of("none", load_cluster("dgx-h100")) is None
    assert host_of("none", cluster) is not None


def test_presets_of_the_machines_that_measured_have_their_host():
    data = json.loads((Path(__file__).parent / "data" / "megatron_h200_host_in_training.json").read_text())
    training = data["in_training"]
    for name in ("h200x1", "h200x2"):
        host = load_cluster(name).host
        assert host.dispatch_us == pytest.approx(statistics.median(training["dispatch_us"][1:]), abs=0.1)
        assert {kind: us for kind, us in host.enqueue_us.items() if kind != "collective"} == training[
            "enqueue_us"
        ]


def test_the_two_states_of_a_process_are_as_measured():
    data = json.loads((Path(__file__).parent / "data" / "megatron_h200_host_in_training.json").read_text())
    own, training = data["own_process"], data["in_training"]
    dispatch = statistics.median(training["dispatch_us"][1:]) / own["dispatch_us"][0]
    assert pytest.approx(dispatch, abs=0.005) == DISPATCH_IN_TRAINING
    calls = statistics.median(us / own["enqueue_us"][kind] for kind, us in training["enqueue_us"].items())
    assert pytest.approx(calls, abs=0.005) == ENQUEUE_IN_TRAINING


def test_a_given_factor_replaces_the_benchmarks():
    reports = report(0.9, 0.0055, host=figures(900.0, 1000.0, elementwise=2.0))
    target = calibrated(figures(1900.0, elementwise=6.0))
    cluster = scaled(load_cluster("dgx-h100"), slice_factor=1.5)
    found = with_host_of_slices(cluster, job(kernels=100, views=50), reports, target)
    assert found.host.op_us == pytest.approx(1.5 * 0.0053 / 0.0011 * 10.0, rel=0.01)
    assert found.host.enqueue_us == {"elementwise": 6.0}


def test_figures_of_another_version_of_the_benchmark_are_not_compared():
    reports = report(0.9, 0.0055, host=figures(900.0, 1000.0, version=2))
    found = with_host_of_slices(
        load_cluster("dgx-h100"), job(kernels=100, views=50), reports, calibrated(figures(1900.0))
    )
    assert found.host.op_us == 50.0


def test_every_kind_of_call_that_ops_are_priced_by_is_measured():
    assert {enqueue_kind(f"aten::{names[0]}") for names in FAMILIES.values() if names} - {""} <= set(KINDS)


def test_the_benchmark_draws_no_random_numbers_and_needs_no_gradient_mode():
    state = torch.get_rng_state()
    with torch.no_grad():
        assert 0 < DispatchBenchmark().measure_us(budget_s=0.01) < 1e6
    assert torch.equal(state, torch.get_rng_state())
