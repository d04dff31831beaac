"""Host times scaled to the CPU time of slices."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prism_plugins.costs.cluster import Cluster, load_cluster, parse_cluster
from prism_plugins.costs.model import build_cost_model
from prism_plugins.host_speed import with_host_of_slices
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EVENT_DTYPE, EventKind, OpSignature, Program, TensorSpec
from prism_plugins.program.slices import SliceReport
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


def report(*cpu_seconds: float) -> dict[int, SliceReport]:
    return {0: SliceReport(rank=0, status="ok", cpu_seconds_per_iteration=cpu_seconds)}


def scaled(cluster: Cluster, **given: float) -> Cluster:
    return msgspec.structs.replace(cluster, host=msgspec.structs.replace(cluster.host, **given))


def test_times_are_those_of_the_least_disturbed_iteration_after_the_first():
    # By the preset: 100 x 10 us + 50 x 2 us = 1.1 ms.
    found = with_host_of_slices(
        load_cluster("dgx-h100"), job(kernels=100, views=50), report(0.9, 0.0066, 0.0055)
    )
    assert (found.host.op_us, found.host.view_us, found.host.comm_us) == (50.0, 10.0, 125.0)
    assert build_cost_model(found).price_op(ADD).host_ns == pytest.approx(50e3)
    assert any("CPU time of the slices" in line for line in build_cost_model(found).assumptions())


def test_a_slower_host():
    cluster = scaled(load_cluster("dgx-h100"), slice_factor=1.5)
    found = with_host_of_slices(cluster, job(kernels=100, views=50), report(0.9, 0.0055))
    assert found.host.op_us == 75.0


def test_given_times_are_meant_as_they_are():
    cluster = parse_cluster(preset_text() + "\n[host]\nop_us = 40.0\n", source="test")
    assert with_host_of_slices(cluster, job(kernels=100, views=50), report(0.9, 0.0055)) is cluster
    cluster = parse_cluster(preset_text() + "\n[host]\nslice_factor = 2.0\n", source="test")
    assert with_host_of_slices(cluster, job(kernels=100, views=50), report(0.9, 0.0055)).host.op_us == 100.0


@pytest.mark.parametrize("cpu", [(), (0.9,)])
def test_too_few_iterations_change_nothing(cpu):
    cluster = load_cluster("dgx-h100")
    assert with_host_of_slices(cluster, job(kernels=100, views=50), report(*cpu)) is cluster


def test_derived_programs_have_no_cpu_time_of_their_own():
    cluster = load_cluster("dgx-h100")
    assert (
        with_host_of_slices(cluster, job(kernels=9, views=0, source="derived"), report(0.9, 0.1)) is cluster
    )
