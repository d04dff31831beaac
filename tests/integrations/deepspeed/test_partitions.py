"""Kinds of data-parallel ranks from DeepSpeed's partition tables."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from prism_plugins.integrations.deepspeed.partitions import shard_kinds


class Param:
    def __init__(self, numel: int, parts: int = 1, requires_grad: bool = True) -> None:
        self._numel = self.ds_numel = numel
        self.parts = parts
        self.requires_grad = requires_grad

    def numel(self) -> int:
        return self._numel

    def partition_numel(self) -> int:
        return -(-self._numel // self.parts)


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are their sizes."""
    comm = ModuleType("deepspeed.comm")
    comm.get_world_size = lambda group: group
    package = ModuleType("deepspeed")
    package.comm = comm
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.comm", comm)


def flat(groups: list[tuple[list[int], int, int]]) -> SimpleNamespace:
    """An optimizer of (parameters, partitions, partition size) per group."""
    return SimpleNamespace(
        round_robin_bit16_groups=[[Param(n) for n in params] for params, _, _ in groups],
        round_robin_bit16_padding=[[0] * len(params) for params, _, _ in groups],
        real_dp_process_group=[parts for _, parts, _ in groups],
        partition_size=[size for _, _, size in groups],
    )


def test_flat_partitions_cut_parameters() -> None:
    kinds, kind_of = shard_kinds(flat([([250, 10, 30], 6, 50)]), 6)
    assert [kinds[k] for k in kind_of] == [(50,), (50,), (50,), (50,), (50,), (10, 30)]
    # The first begins the parameter, the next ones are inside.
    assert kind_of == (0, 1, 1, 1, 1, 2)


def test_experts_are_partitioned_over_fewer_ranks() -> None:
    kinds, kind_of = shard_kinds(flat([([80], 4, 20), ([12, 8], 2, 10)]), 4)
    assert [kinds[k] for k in kind_of] == [(20, 10), (20, 10), (20, 2, 8), (20, 2, 8)]


def test_equal_ranks_are_of_one_kind() -> None:
    assert shard_kinds(flat([([10] * 4, 1, 40)]), 1) == ((), ())
    assert shard_kinds(SimpleNamespace(), 8) == ((), ())


def test_stage_3_cuts_every_parameter() -> None:
    params = [Param(16, 8), Param(10, 8), Param(3, 8), Param(3, 8, requires_grad=False)]
    optimizer = SimpleNamespace(
        fp16_groups=[params], _get_param_partition_world_size=lambda param: param.parts
    )
    kinds, kind_of = shard_kinds(optimizer, 8)
    assert [kinds[k] for k in kind_of] == [(), (), (), (0,), (0,), (0, 0), (0, 0), (0, 0)]
    assert shard_kinds(SimpleNamespace(**{**vars(optimizer), "fp16_groups": [params[:1]]}), 8) == ((), ())
