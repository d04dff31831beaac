"""Work of the host, priced by its memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.host import MEMORY_EFFICIENCY
from prism_plugins.costs.model import build_cost_model
from prism_plugins.program.model import OpSignature, TensorSpec


def adam(numel: int) -> OpSignature:
    return OpSignature(op="host::cpu_adam", inputs=(TensorSpec("float32", (numel,)),) * 4)


@pytest.mark.parametrize(("billions", "seconds"), [(1, 0.22), (2, 0.51), (4, 1.03), (8, 2.41), (10, 2.57)])
def test_cpu_adam_takes_what_the_zero_offload_paper_measured(billions, seconds):
    """arXiv 2101.06840: one process on two Xeon 8168 with twelve channels of DDR4-2666."""
    preset = load_cluster("dgx-h100")
    cluster = replace(
        preset,
        node=replace(preset.node, num_gpus=1),
        host=replace(preset.host, memory_bytes_per_s=256e9),
    )
    price = build_cost_model(cluster).price_op(adam(billions * 10**9))
    assert price.duration_ns * 1e-9 == pytest.approx(seconds, rel=0.25)
    assert price.provenance == "modelled"


def test_the_gpus_of_a_node_share_its_memory():
    cluster = load_cluster("dgx-h100")
    price = build_cost_model(cluster).price_op(adam(10**6))
    assert price.bytes == 28e6
    share = cluster.host.memory_bytes_per_s * MEMORY_EFFICIENCY / cluster.gpus_per_node
    assert price.duration_ns == pytest.approx(28e6 / share * 1e9)


def test_other_host_work_reads_and_writes_once():
    operand = TensorSpec("float32", (1000,))
    price = build_cost_model(load_cluster()).price_op(
        OpSignature(op="host::mul", inputs=(operand,), outputs=(operand,))
    )
    assert price.bytes == 8000


def test_a_loop_of_views_is_as_slow_as_the_host():
    """ZeRO-3's loops over ranks."""
    preset = load_cluster("dgx-h100")
    loop = OpSignature(op="host::views", scalars=(("count", 500),))
    for factor in (1.0, 1.75):
        cluster = replace(preset, host=replace(preset.host, slice_factor=factor))
        price = build_cost_model(cluster, calibration="none").price_op(loop)
        assert price.duration_ns == pytest.approx(500 * cluster.host.loop_us * factor * 1e3)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_between_host_and_device_take_pcie(direction):
    cluster = load_cluster("dgx-h100")
    costs = build_cost_model(cluster, calibration="none")
    tensor = TensorSpec("bfloat16", (2**27,))

    def seconds(host: str) -> float:
        copy = OpSignature(
            op="aten::copy_",
            inputs=(tensor, tensor),
            outputs=(tensor,),
            attrs={"direction": direction, "host": host},
        )
        return costs.price_op(copy).duration_ns * 1e-9

    assert seconds("pinned") == pytest.approx(2**28 / cluster.node.pcie_bytes_per_s, rel=0.01)
    assert seconds("pageable") == pytest.approx(seconds("pinned") / 0.4, rel=0.01)
