"""Prices from the job's own slices."""

from __future__ import annotations

import numpy as np
import pytest

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.in_situ import InSituCosts
from prism_plugins.costs.model import build_cost_model
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.measured import GpuState, Measured, MeasuredMemory, MeasuredOp, Watched
from prism_plugins.program.model import EVENT_DTYPE, CommSignature, OpSignature, Program, TensorSpec
from prism_plugins.world.layout import Layout

X = TensorSpec("bfloat16", (1024, 1024))
MM = OpSignature(op="aten::mm", inputs=(X, X))
TRITON = OpSignature(op="kernel::triton_poi_fused_0")
OTHER = OpSignature(op="aten::add.Tensor", inputs=(X, X), outputs=(X,))


def costs(gpu: str = "NVIDIA H200") -> InSituCosts:
    cluster = load_cluster("dgx-h200")
    slices = [
        Measured(rank=0, ops=(MeasuredOp(MM, 100.0, 3), MeasuredOp(TRITON, 7.0, 1)), gpu=GpuState(name=gpu)),
        Measured(rank=1, ops=(MeasuredOp(MM, 200.0, 1),), gpu=GpuState(name=gpu)),
    ]
    return InSituCosts(build_cost_model(cluster), cluster, slices)


def test_an_op_costs_its_mean_over_slices_and_the_kernels_of_a_compiler_need_no_rule() -> None:
    price = costs().price_op(MM)
    assert (price.duration_ns, price.provenance) == (pytest.approx(125.0), "measured")
    assert price.host_ns > 0
    assert costs().price_op(TRITON).duration_ns == 7.0
    assert costs().price_op(TRITON).provenance == "measured"


def test_what_no_slice_ran_is_priced_by_the_base_and_counted() -> None:
    model = costs()
    base = build_cost_model(load_cluster("dgx-h200"))
    assert model.price_op(OTHER).duration_ns == base.price_op(OTHER).duration_ns
    assert any("1 distinct ops ran in no slice" in line for line in model.assumptions())
    comm = CommSignature(kind="all_reduce", group=0, dtype="bfloat16", in_numel=1 << 20, out_numel=1 << 20)
    assert model.price_comm(comm, (0, 1), 0) == base.price_comm(comm, (0, 1), 0)


def test_where_host_times_were_measured_calls_are_part_of_the_ops_after_them() -> None:
    cluster = load_cluster("dgx-h200")
    ops = (MeasuredOp(MM, 100.0, 3, 900.0), MeasuredOp(TRITON, 7.0, 1, 0.0))
    model = InSituCosts(build_cost_model(cluster), cluster, [Measured(rank=0, ops=ops)])
    assert model.price_op(MM).host_ns == 900.0
    assert model.price_op(TRITON).host_ns == 0.0
    comm = CommSignature(kind="all_reduce", group=0, dtype="bfloat16", in_numel=1 << 20, out_numel=1 << 20)
    price = model.price_comm(comm, (0, 1), 0)
    assert price.host_ns == 0.0
    assert price.duration_ns == build_cost_model(cluster).price_comm(comm, (0, 1), 0).duration_ns


@pytest.mark.parametrize(("overlap_ms", "turns"), [(0.1, True), (9.0, False)])
def test_streams_take_turns_where_they_were_seen_to(overlap_ms: float, turns: bool) -> None:
    cluster = load_cluster("dgx-h200")
    watched = Watched(beside_ms=15.0, overlap_ms=overlap_ms)
    model = InSituCosts(build_cost_model(cluster), cluster, [Measured(rank=0, watched=watched)])
    assert model.interference.streams_share is turns
    assert costs().interference.streams_share is False, "nobody looked"


def test_another_gpu_than_the_clusters_is_a_finding() -> None:
    assert costs().findings() == ()
    (finding,) = costs("NVIDIA A100").findings()
    assert "slices ran on NVIDIA A100" in finding.message


def test_memory_that_torch_does_not_see_is_what_remains() -> None:
    memory = MeasuredMemory(used=10, context=2, reserved=5)
    assert memory.libraries == 3
    assert MeasuredMemory(used=0, context=2, reserved=5).libraries == 0


def test_a_program_is_priced_by_its_own_slice() -> None:
    model = costs()
    tables = {rank: [MM, TRITON] for rank in (0, 1, 2)}
    classes = []
    for rank, source in ((0, "sliced"), (1, "sliced"), (2, "derived")):
        program = Program(
            rank=rank, events=np.empty(0, EVENT_DTYPE), signatures=tables[rank], comms=[], groups=[], phases=[], initial=[],
            source=source,
        )  # fmt: skip
        classes.append(
            RankClass(name=str(rank), ranks=np.array([rank]), representative=min(rank, 1), exemplar=program)
        )
    model.settle(JobPrograms(layout=Layout(world_size=3, dp=3), classes=tuple(classes)))
    prices = [model.in_state_of(tables[rank]).price_op(MM).duration_ns for rank in (0, 1, 2)]
    assert prices == [100.0, 200.0, pytest.approx(125.0)], "what was derived takes the mean"
    assert model.in_state_of(tables[1]).price_op(TRITON).duration_ns == 7.0, (
        "another slice's where its own has none"
    )
