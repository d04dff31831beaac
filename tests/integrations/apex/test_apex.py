"""Apex's fused kernels on virtual ones: what is recorded, saved and assumed, and that it is there on request only."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.roofline import Roofline
from prism_plugins.program.model import EventKind, OpSignature, TensorSpec
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.program.store import load_program
from prism_plugins.slice_env import slice_environment

SCRIPT = Path(__file__).parent / "train_with_apex.py"


def run(folder: Path, *, apex: bool) -> tuple[SliceReport, Path]:
    spec = SliceSpec(
        rank=0,
        world_size=1,
        gpus_per_node=8,
        argv=(str(SCRIPT),),
        gpu=load_cluster("dgx-a100").gpu_facts(),
        slice_dir=str(folder),
        apex=apex,
    )
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    subprocess.run(
        [sys.executable, "-m", "prism_plugins.slice", str(folder / "spec.json")],
        env=slice_environment(spec),
        timeout=300,
        check=False,
        capture_output=True,
    )
    return msgspec.json.decode((folder / "report.json").read_bytes(), type=SliceReport), folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[SliceReport, Path]:
    return run(tmp_path_factory.mktemp("apex"), apex=True)


def test_each_fused_kernel_is_one_op_with_its_operands(trained: tuple[SliceReport, Path]) -> None:
    report, folder = trained
    assert report.status == "ok", report.message + report.traceback
    program = load_program(folder / "program.npz")
    refs = program.events["ref"][program.events["kind"] == EventKind.KERNEL]
    signatures = [program.signatures[i] for i in refs.tolist()]
    counts = Counter(s.op for s in signatures if s.op.startswith("apex::"))
    assert counts == {
        "apex::layer_norm_fwd": 2,
        "apex::layer_norm_bwd": 2,
        "apex::scaled_upper_triang_masked_softmax_forward": 1,
        "apex::scaled_upper_triang_masked_softmax_backward": 1,
        "apex::multi_tensor_l2norm": 1,
        "apex::multi_tensor_scale": 1,
        "apex::multi_tensor_adam": 1,
    }
    assert not any("softmax" in s.op for s in signatures if s.op.startswith("aten::"))
    adam = next(s for s in signatures if s.op == "apex::multi_tensor_adam")
    assert len(adam.inputs) == 4 * 6
    assert [t.dtype for t in adam.inputs[::6]] == ["bfloat16", "bfloat16", "float32", "float32"]


def test_norms_keep_a_mean_and_a_deviation_a_row_in_fp32(trained: tuple[SliceReport, Path]) -> None:
    signatures = load_program(trained[1] / "program.npz").signatures
    forward = [s for s in signatures if s.op == "apex::layer_norm_fwd"]
    assert {tuple((t.dtype, t.shape) for t in s.outputs[1:]) for s in forward} == {
        (("float32", (512,)), ("float32", (512,)))
    }
    for s in signatures:
        if s.op == "apex::layer_norm_bwd":
            assert [t.shape for t in s.outputs] == [(512, 512), (512,), (512,)]


def test_it_is_said_and_nothing_is_there_without_being_asked_for(
    trained: tuple[SliceReport, Path], tmp_path: Path
) -> None:
    assert any(
        "Apex is taken as installed on the cluster (--prism-apex)" in line for line in trained[0].assumptions
    )
    report, _ = run(tmp_path, apex=False)
    assert report.status == "script_failed"
    assert "amp_C" in report.message


def softmax(op: str, keys: int) -> OpSignature:
    scores = TensorSpec("float16", (32, keys, keys), ())
    return OpSignature(op=op, inputs=(scores,), outputs=(scores,))


def test_a_fused_softmax_moves_its_bytes_once_and_half_its_input_under_a_causal_mask() -> None:
    price = Roofline(load_cluster("dgx-a100")).price
    plain = price(softmax("aten::_softmax", 2048)).duration_ns
    whole = price(softmax("apex::scaled_softmax_forward", 2048)).duration_ns
    causal = price(softmax("apex::scaled_upper_triang_masked_softmax_forward", 2048)).duration_ns
    assert causal < whole < plain
    assert np.isclose(causal / whole, 0.75, rtol=0.02)
