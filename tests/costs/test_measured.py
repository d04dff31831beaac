"""Prices by calibration: exact figures, neighbours, other GPUs, clocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prism_plugins.costs.calibration import Calibration, Figure, HostCosts, MixState, PowerModel
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.measured import build_measured, expected_errors, shipped_calibration
from prism_plugins.costs.model import build_cost_model
from prism_plugins.costs.modelled import ModelledCosts
from prism_plugins.costs.power import solve_scale
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import EVENT_DTYPE, EventKind, OpSignature, Program, TensorSpec
from prism_plugins.world.layout import Layout

H200 = load_cluster("dgx-h200")
SHIPPED = shipped_calibration()


def mm(m: int, n: int, k: int) -> OpSignature:
    a, b, out = (
        TensorSpec("bfloat16", (m, k)),
        TensorSpec("bfloat16", (k, n), (1, k)),
        TensorSpec("bfloat16", (m, n)),
    )
    return OpSignature(op="aten::mm", inputs=(a, b), outputs=(out,))


def program(signatures: list[OpSignature], counts: list[int]) -> Program:
    refs = np.repeat(np.arange(len(signatures)), counts)
    events = np.zeros(len(refs), dtype=EVENT_DTYPE)
    events["kind"], events["ref"] = EventKind.KERNEL, refs
    return Program(rank=0, events=events, signatures=signatures, comms=[], groups=[], phases=[], initial=[])


def job(signatures: list[OpSignature], counts: list[int]) -> JobPrograms:
    exemplar = program(signatures, counts)
    return JobPrograms(
        layout=Layout(world_size=1),
        classes=(RankClass(name="all", ranks=np.array([0]), representative=0, exemplar=exemplar),),
    )


def test_a_measured_signature_costs_what_was_measured() -> None:
    costs = build_measured(H200)
    for figure in SHIPPED.figures[::25]:
        price = costs.price_op(figure.signature)
        assert price.provenance == "measured"
        assert price.duration_ns == pytest.approx(figure.us * 1e3)


def test_a_shape_between_measured_ones_is_interpolated_and_an_unknown_kind_is_modelled() -> None:
    costs = build_measured(H200)
    price = costs.price_op(mm(8192, 11008, 4096 + 128))
    assert price.provenance == "interpolated"
    assert price.flops / price.duration_ns == pytest.approx(650e3, rel=0.2)  # FLOP/ns
    fft = OpSignature(op="aten::_fft_r2c", inputs=(TensorSpec("float32", (1 << 20,)),))
    assert costs.price_op(fft) == ModelledCosts(H200).price_op(fft)
    unknown = OpSignature(op="vendor::mystery", inputs=(TensorSpec("float32", (1 << 20,)),))
    assert costs.price_op(unknown).provenance == "unpriced"


def test_expected_errors_of_what_ships() -> None:
    errors = expected_errors(SHIPPED)
    assert errors == SHIPPED.errors
    for family in ("gemm", "batched_gemm", "scaled_gemm"):
        assert errors[family].median < 0.05
    for kind in ("attention", "cudnn_attention"):
        for way in ("forward", "backward"):
            assert errors[f"{kind}_{way}"].median < 0.05
            assert errors[f"{kind}_{way}"].p95 < 0.15
    gemm = errors["gemm"]
    assert 0.8 * gemm.count < gemm.num_near < gemm.count
    assert gemm.near_p95 < gemm.p95


def test_another_gpu_is_scaled_by_the_rules_of_both_and_marked() -> None:
    a100 = build_measured(load_cluster("dgx-a100"))
    figure = next(f for f in SHIPPED.figures if f.signature.op == "aten::mm" and f.us > 1000)
    price = a100.price_op(figure.signature)
    assert price.provenance == "scaled"
    assert 2.2 < price.duration_ns / (figure.us * 1e3) < 3.5  # 989 / 312 TFLOP/s, less throttled
    assert "A100" in a100.assumptions()[0]
    assert a100.findings() == ()  # the shipped calibration is known to be another GPU's


def test_a_calibration_of_another_gpu_warns_and_names_both() -> None:
    figures = SHIPPED.figures[:1]
    (finding,) = build_measured(H200, Calibration(gpu="NVIDIA A100-SXM4-80GB", figures=figures)).findings()
    assert "A100" in finding.message
    assert "H200" in finding.message
    (finding,) = build_measured(H200, Calibration(gpu="Fancy 9000", figures=figures)).findings()
    assert "in no preset" in finding.message


def test_the_host_of_a_given_calibration_counts() -> None:
    given = Calibration(gpu="NVIDIA H200", host=HostCosts(op_us=33.0, dispatch_us=5.0, view_us=1.0))
    op = SHIPPED.figures[0].signature
    assert build_measured(H200, given).price_op(op).host_ns == 33e3
    assert build_measured(H200).price_op(op).host_ns == H200.host.op_us * 1e3


def test_formulas_alone_on_request() -> None:
    assert isinstance(build_cost_model(H200, calibration="none"), ModelledCosts)


HOT = PowerModel(
    cap_w=700, static_w=100, exponent=2.0, max_clock_mhz=1980, family_w={"gemm": 600.0, "elementwise": 300.0},
    family_clock_mhz={"gemm": 1500.0, "elementwise": 1500.0},
    mixes=(MixState(name="m", clock_mhz=1500, model_w=550.0, shares={"gemm": 0.5, "elementwise": 0.5}),),
)  # fmt: skip


def solve(us: list[float], headroom: float = 2.0) -> float:
    return solve_scale(
        HOT,
        ops=["aten::mm", "aten::add.Tensor"],
        us=np.array(us),
        compute_share=np.array([1.0, 0.0]),
        dynamic=np.array([600.0, 300.0]),
        headroom=np.array([headroom, headroom]),
    )


def test_a_replayed_mix_keeps_its_clocks_and_a_hungrier_program_clocks_lower() -> None:
    assert solve([50.0, 50.0]) == pytest.approx(1.0, abs=1e-3)
    assert solve([80.0, 20.0]) < 0.98
    assert solve([20.0, 80.0]) > 1.02
    assert solve([0.0, 100.0]) <= 1.12


def test_a_job_of_other_proportions_moves_only_what_scales_with_the_clock() -> None:
    gemm = mm(4096, 4096, 4096)
    add = OpSignature(
        op="aten::add.Tensor", inputs=(TensorSpec("bfloat16", (1 << 24,)),) * 2, outputs=(TensorSpec("bfloat16", (1 << 24,)),)
    )  # fmt: skip
    figures = [
        Figure(signature=gemm, us=200.0, clock_mhz=1500.0, burst_clock_mhz=1900.0, compute_share=1.0),
        Figure(signature=add, us=20.0, clock_mhz=1500.0, burst_clock_mhz=1900.0, compute_share=0.0),
    ]
    costs = build_measured(H200, Calibration(gpu="NVIDIA H200", figures=figures, power=HOT))
    for counts, slower in (([10, 0], True), ([1, 100], False)):
        programs = job([gemm, add], counts)
        costs.settle(programs)
        state = costs.in_state_of(programs.classes[0].exemplar.signatures)
        assert (state.price_op(gemm).duration_ns > 200e3) is slower
        assert state.price_op(add).duration_ns == 20e3
        assert "% measured" in costs.assumptions()[0]


def test_the_shipped_file_is_small_and_says_what_it_is() -> None:
    assert len(msgspec.json.encode(SHIPPED)) < 300_000
    assert SHIPPED.gpu == "NVIDIA H200"
    assert SHIPPED.power is not None
    assert SHIPPED.driver
