from __future__ import annotations

import pytest
import torch

from prism_plugins.collectives import mirror


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("SUM", [9.0, -6.0]),
        ("PRODUCT", [27.0, -8.0]),
        ("AVG", [3.0, -2.0]),
        ("MIN", [3.0, -2.0]),
        ("MAX", [3.0, -2.0]),
        ("BAND", [3.0, -2.0]),
        ("BOR", [3.0, -2.0]),
    ],
)
def test_reduce(op: str, expected: list[float]) -> None:
    x = torch.tensor([3.0, -2.0])
    mirror.reduce_(x, op, 3)
    assert x.tolist() == expected


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.uint32]
)
def test_sum_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2]).to(dtype)
    mirror.reduce_(x, "SUM", 4)
    assert x.to(torch.float32).tolist() == [4.0, 8.0]


def test_bxor_of_equal_values_depends_on_parity() -> None:
    even, odd = torch.tensor([5]), torch.tensor([5])
    mirror.reduce_(even, "BXOR", 4)
    mirror.reduce_(odd, "BXOR", 3)
    assert (even.item(), odd.item()) == (0, 5)


def test_premul_sum_takes_numbers_and_tensors() -> None:
    for factor in (0.5, torch.tensor(0.5)):
        x = torch.tensor([2.0])
        mirror.reduce_(x, "PREMUL_SUM", 3, factor)
        assert x.item() == 3.0


def test_bool_sum_is_or() -> None:
    x = torch.tensor([True, False])
    mirror.reduce_(x, "SUM", 8)
    assert x.tolist() == [True, False]


def test_all_gather_in_place() -> None:
    out = torch.zeros(3, 2)
    shard = out[1]
    shard.copy_(torch.tensor([1.0, 2.0]))
    mirror.all_gather_flat(out, shard, 3)
    assert out.tolist() == [[1.0, 2.0]] * 3


def test_reduce_scatter_in_place() -> None:
    full = torch.arange(6.0)
    mirror.reduce_scatter_flat(full[2:4], full, "SUM", 3, 1)
    assert full.tolist() == [0.0, 1.0, 6.0, 9.0, 4.0, 5.0]


def test_all_to_all_repeats_and_cuts_own_rows() -> None:
    source = torch.tensor([[1.0], [2.0], [3.0], [4.0]])  # rows sent: 1, 3
    out = torch.zeros(7, 1)
    mirror.all_to_all_flat(out, source, 1, [2, 5], [1, 3])
    assert out.flatten().tolist() == [2.0, 3.0, 2.0, 3.0, 4.0, 2.0, 3.0]


def test_all_to_all_without_own_rows_takes_any() -> None:
    out = torch.zeros(2)
    mirror.all_to_all_flat(out, torch.tensor([7.0]), 1, [1, 1], [1, 0])
    assert out.tolist() == [7.0, 7.0]


def test_unknown_op_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown reduce op"):
        mirror.reduce_(torch.ones(1), "MEDIAN", 2)
