"""Kinds of data-parallel ranks from DeepSpeed's partition tables."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from prism_plugins.integrations.deepspeed.partitions import Kinds, shard_kinds


class Param:
    def __init__(self, numel: int, parts: int = 1, requires_grad: bool = True) -> None:
        self._numel = self.ds_numel = numel
        self.parts = parts
        self.requires_grad = requires_grad

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._numel,)

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
    utils = ModuleType("deepspeed.runtime.utils")
    utils.is_model_parallel_parameter = lambda param: getattr(param, "model_parallel", False)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.utils", utils)


def flat(groups: list[tuple[list[int], int, int]], **changes) -> SimpleNamespace:
    """An optimizer of (parameters, partitions, partition size) per group."""
    params = [[Param(n) for n in params] for params, _, _ in groups]
    param_dict = dict(enumerate(param for group in params for param in group))
    number = {id(param): i for i, param in param_dict.items()}
    settings = {
        "cpu_offload": False,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "model_parallel_rank": 0,
        "_use_compact_grad_partition_buffer": lambda group: False,
    }
    return SimpleNamespace(
        **settings | changes,
        param_dict=param_dict,
        get_param_id=lambda param: number[id(param)],
        round_robin_bit16_groups=params,
        round_robin_bit16_padding=[[0] * len(params) for params, _, _ in groups],
        real_dp_process_group=[parts for _, parts, _ in groups],
        partition_size=[size for _, _, size in groups],
    )


def test_flat_partitions_cut_parameters() -> None:
    kinds, kind_of, partitions = shard_kinds(flat([([250, 10, 30], 6, 50)]), 6)
    assert [kinds[k] for k in kind_of] == [(50,), (50,), (50,), (50,), (50,), (10, 30)]
    # The first begins the parameter, the next ones are inside.
    assert kind_of == (0, 1, 1, 1, 1, 2)
    assert partitions.shapes == ((250,), (10,), (30,))
    assert partitions.sizes == (50,)
    assert [tuple(msgspec.to_builtins(f)) for f in partitions.owned[2]] == [(0, 1, 0, 10), (0, 2, 0, 30)]
    assert partitions.owned[1][0].start == 50


@pytest.mark.parametrize("setting", ["cpu_offload", "contiguous_gradients", "reduce_scatter"])
def test_other_ways_to_treat_gradients_are_not_derived(setting: str) -> None:
    plain = flat([([250, 10, 30], 6, 50)])
    kinds, _, partitions = shard_kinds(
        flat([([250, 10, 30], 6, 50)], **{setting: not getattr(plain, setting)}), 6
    )
    assert len(kinds) == 3
    assert partitions is None


def test_the_norm_counts_replicated_parameters_once() -> None:
    optimizer = flat([([250, 10, 30], 6, 50)], model_parallel_rank=1)
    optimizer.param_dict[0].model_parallel = True
    assert shard_kinds(optimizer, 6).partitions.uncounted == (1, 2)
    optimizer = flat([([250, 10, 30], 6, 50)])
    optimizer.param_dict[1].ds_pipe_replicated = True
    assert shard_kinds(optimizer, 6).partitions.uncounted == (1,)


def test_experts_are_partitioned_over_fewer_ranks() -> None:
    kinds, kind_of, partitions = shard_kinds(flat([([80], 4, 20), ([12, 8], 2, 10)]), 4)
    assert partitions is None
    assert [kinds[k] for k in kind_of] == [(20, 10), (20, 10), (20, 2, 8), (20, 2, 8)]


def test_equal_ranks_are_of_one_kind() -> None:
    assert shard_kinds(flat([([10] * 4, 1, 40)]), 1) == Kinds()
    assert shard_kinds(SimpleNamespace(), 8) == Kinds()


def test_stage_3_cuts_every_parameter() -> None:
    params = [Param(16, 8), Param(10, 8), Param(3, 8), Param(3, 8, requires_grad=False)]
    optimizer = SimpleNamespace(
        fp16_groups=[params], _get_param_partition_world_size=lambda param: param.parts
    )
    kinds, kind_of, _ = shard_kinds(optimizer, 8)
    assert [kinds[k] for k in kind_of] == [(), (), (), (0,), (0,), (0, 0), (0, 0), (0, 0)]
    assert shard_kinds(SimpleNamespace(**{**vars(optimizer), "fp16_groups": [params[:1]]}), 8) == Kinds()
