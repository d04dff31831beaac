"""Jobs of one op, of none, of collectives alone: every run gets a report."""

import pytest

from prism_plugins.costs.base import Interference
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.emit.job_view import JobView
from prism_plugins.program.prediction import Prediction
from prism_plugins.report.html import render
from prism_plugins.report.insight import look_into, with_insight
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout
from tests.emit.conftest import build, prediction  # noqa: F401
from tests.simulate.builders import Builder, TableCosts, collective, one_class_per_rank


def nothing(b, g):
    pass


def host_only(b, g):
    b.host_op(500.0)
    b.device_sync()


def kernel(b, g):
    b.kernel(1000, host=100)


def communication(b, g):
    b.comm(collective(g, 100))


def late(b, g):
    b.kernel(100_000 * (1 + b.rank), host=100)
    b.comm(collective(g, 100))
    b.sync()
    b.kernel(10, host=100)


@pytest.mark.parametrize("program", [nothing, host_only, kernel, communication, late])
def test_report(program, prediction: Prediction):  # noqa: F811
    builders = [Builder(rank) for rank in range(2)]
    for builder in builders:
        program(builder, builder.group((0, 1), "G"))
    layout = Layout(world_size=2, dp=2)
    costs = TableCosts()
    job = one_class_per_rank({b.rank: b.program() for b in builders}, layout)
    timeline = Simulation(job, costs).timeline
    cluster = load_cluster("dgx-h100")
    view = JobView(job=job, costs=costs, timeline=timeline, gpu=cluster.gpu_facts(), gpus_per_node=8)
    insight = look_into(view)
    total = timeline.iteration_time_ns / 1e6
    assert sum(insight.path.by_kind_ms.values()) == pytest.approx(total)
    text = render(
        with_insight(prediction, view, insight),
        title="t",
        view=view,
        insight=insight,
        cluster=cluster,
        others={},
    )
    assert "</html>" in text
    if program is late:
        assert insight.path.by_kind_ms["compute"] == pytest.approx(0.20001)  # of rank 1, which comes last
        assert insight.path.segments[0].rank == 1


def test_a_host_that_waits_for_room_is_not_late():
    """The GPU is the bound of the first kernels, though the host is held up in their queue; then the host is."""
    builder = Builder(0)
    for i in range(600):
        builder.kernel(1_000 if i < 400 else 10, host=100)
    costs = TableCosts()
    costs.interference = Interference(num_sms=100, hbm_bytes_per_s=1e12, launch_queue=64)
    job = one_class_per_rank({0: builder.program()}, Layout(world_size=1))
    timeline = Simulation(job, costs).timeline
    gpu = load_cluster("dgx-h100").gpu_facts()
    view = JobView(job=job, costs=costs, timeline=timeline, gpu=gpu, gpus_per_node=8)
    found = look_into(view).path.by_kind_ms
    assert sum(found.values()) == pytest.approx(timeline.iteration_time_ns / 1e6)
    assert found["compute"] == pytest.approx(0.4, rel=0.01)
    assert 0.009 < found["host"] < 0.021
