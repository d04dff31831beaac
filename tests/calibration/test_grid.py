"""The grid and the rebuilding of ops, on shapes without memory and on the CPU."""

from __future__ import annotations

import pytest
import torch

from prism_plugins.calibration.grid import make_grid, op, t
from prism_plugins.calibration.rebuild import CannotRebuild, rebuild
from prism_plugins.calibration.values import Operands
from prism_plugins.costs.families import family_of
from prism_plugins.program.model import OpSignature, TensorSpec


@pytest.fixture(scope="module")
def operands() -> Operands:
    return Operands(torch.device("cpu"), pool_bytes=1 << 20)


def test_every_grid_op_has_a_family_and_known_outputs() -> None:
    grid = make_grid()
    assert len(grid.signatures) > 500
    assert all(family_of(s.op) not in (None, "free") for s in grid.signatures)
    lost = {s.op for s in grid.signatures if not s.outputs}
    assert all("_foreach_" in name or "_fused_adamw_" in name for name in lost)  # they return nothing
    assert grid.mixes[0].counts


def test_grids_are_equal() -> None:
    assert make_grid(small=True) == make_grid(small=True)


@pytest.mark.parametrize(
    "signature",
    [
        op("mul.Tensor", t("float32", 8, 8)),  # times a scalar on the CPU
        op("add_.Tensor", t("int64", 8)),
        op("embedding", t("float32", 4, 8), t("int64", 100)),
        op("index.Tensor", t("float32", 4, 8), t("int64", 100), t("int64", 100)),
        op("index_put_", t("float32", 4, 8), t("int64", 3), t("float32", 3, 8), accumulate=True),
        op("nll_loss_backward", t("float32"), t("float32", 8, 5), t("int64", 8), t("float32"), reduction=1, ignore_index=-100),
        op("_foreach_addcdiv_.ScalarList", *[t("float32", 8)] * 9),
        op("_foreach_mul_.Tensor", *[t("float32", 8)] * 3, t("float32")),
        op("_foreach_mul_.Tensor", *[t("float32", 8)] * 3),
        op("_fused_adamw_", *[t("float32", 8)] * 8, *[t("float32")] * 2, amsgrad=False, maximize=False),
        op("sum.dim_IntList", t("float32", 8, 8), dim=(-1,), keepdim=False),
        op("_to_copy", t("float32", 8, 8), dtype=15),
        op("cat", t("float32", 8, 8), t("float32", 8, 8, strides=(1, 8)), dim=1),
        op("arange.start_out", t("int64", 9)),
        op("clamp", t("float32", 9)),
    ],
    ids=lambda s: s.op,
)  # fmt: skip
def test_ops_run_from_their_signature(signature: OpSignature, operands: Operands) -> None:
    rebuild(signature, operands)()


def test_operands_keep_geometry_and_move(operands: Operands) -> None:
    spec = TensorSpec("float32", (4, 6), (1, 4))
    first, second = operands.take(spec), operands.take(spec)
    assert first.stride() == (1, 4)
    assert first.data_ptr() != second.data_ptr()
    assert (
        operands.take(spec, written=True).untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    )


def test_written_operands_are_restored(operands: Operands) -> None:
    spec = TensorSpec("float32", (64,))
    operands.take(spec)
    x = operands.take(spec, written=True)
    x.fill_(3.0)
    operands.refresh()
    assert not bool((x == 3.0).any())


@pytest.mark.parametrize(
    "signature",
    [op("nonzero", t("float32", 8)), OpSignature(op="prism::fused"), OpSignature(op="nosuch::op"), op("cat", t("int8", 2), t("int8", 2))],
    ids=lambda s: s.op,
)  # fmt: skip
def test_what_cannot_be_rebuilt_says_so(signature: OpSignature, operands: Operands) -> None:
    if signature.op == "aten::cat":  # dim has a default
        rebuild(signature, operands)()
    else:
        with pytest.raises(CannotRebuild):
            rebuild(signature, operands)
