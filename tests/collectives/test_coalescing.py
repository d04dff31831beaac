"""Grouped calls (ncclGroupStart/End) share one work id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

CPU = torch.device("cpu")


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    """Rank 1 of 4, on a backend that groups calls and takes CPU tensors."""
    return make_world(rank=1, world_size=4, backend="ccl")


def works(world: Any) -> list[int]:
    return [work for _, work, _ in world.recorder.comms]


def batch(group: Any = None) -> list[dist.P2POp]:
    return [
        dist.P2POp(dist.isend, torch.ones(2), 2, group=group),
        dist.P2POp(dist.irecv, torch.ones(2), 0, group=group),
    ]


def test_batch_isend_irecv_is_one_work(world: Any) -> None:
    (request,) = dist.batch_isend_irecv(batch())
    assert [c.kind for c, _, _ in world.recorder.comms] == ["send", "recv"]
    assert len(set(works(world))) == 1
    request.wait()
    request.wait()
    assert world.recorder.waits == [works(world)[0]]
    dist.batch_isend_irecv(batch())
    assert len(set(works(world))) == 2


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_a_batch_over_gloo_is_not_grouped(make_world: Callable[..., Any], backend: str) -> None:
    world = make_world(rank=1, world_size=4, backend=backend)
    requests = dist.batch_isend_irecv(batch())
    assert len(requests) == 2
    assert len(set(works(world))) == 2


def test_batch_uses_group_ranks(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=9, world_size=16, backend="ccl")
    group = dist.new_group([8, 9, 10, 11])
    ops = [
        dist.P2POp(dist.isend, torch.ones(1), 10, group=group),
        dist.P2POp(dist.irecv, torch.ones(1), group_peer=0, group=group),
    ]
    dist.batch_isend_irecv(ops)
    assert [c.peer for c in world.take()] == [2, 0]


def test_a_failing_batch_leaves_no_open_group(world: Any) -> None:
    ops = batch()
    ops[1].tensor = torch.ones(1, device="meta")
    with pytest.raises(RuntimeError, match="device type meta"):
        dist.batch_isend_irecv(ops)
    world.take()
    assert dist.all_reduce(torch.ones(1)) is None
    assert world.recorder.comms[0][2] is False


@pytest.mark.parametrize("device", [None, CPU])
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_all_reduce(world: Any, device: Any, async_ops: bool) -> None:
    tensors = [torch.ones(i + 1) for i in range(3)]
    with _coalescing_manager(device=device, async_ops=async_ops) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert [t[0].item() for t in tensors] == [4.0] * 3
    assert [c.in_numel for c, _, _ in world.recorder.comms] == [1, 2, 3]
    assert len(set(works(world))) == 1
    if async_ops:
        assert world.recorder.waits == []
        manager.wait()
        assert len(world.recorder.waits) == 1


def test_coalesced_all_gather_and_reduce_scatter(world: Any) -> None:
    outputs = [torch.zeros(4), torch.zeros(8)]
    shards = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    with _coalescing_manager():
        for output, shard in zip(outputs, shards, strict=True):
            dist.all_gather_into_tensor(output, shard)
    with _coalescing_manager():
        for output, shard in zip(outputs, shards, strict=True):
            dist.reduce_scatter_tensor(shard, output)
    assert outputs[1].tolist() == [2.0, 3.0] * 4
    assert shards[1].tolist() == [8.0, 12.0]
    first, second, third, fourth = works(world)
    assert first == second != third == fourth


def test_mixed_calls_between_start_and_end(world: Any) -> None:
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.broadcast(torch.ones(1), 0)
        dist.isend(torch.ones(1), 0)
        dist.all_gather([torch.ones(1) for _ in range(4)], torch.ones(1))
    assert len(set(works(world))) == 1
    assert all(is_async for _, _, is_async in world.recorder.comms)
    assert world.recorder.waits == []
    manager.wait()
    assert world.recorder.waits == [works(world)[0]]


def test_synchronous_mixed_calls_wait_once(world: Any) -> None:
    with _coalescing_manager(device=CPU):
        dist.broadcast(torch.ones(1), 0)
        dist.broadcast(torch.ones(1), 1)
    assert len(set(works(world))) == 1
    assert world.recorder.waits == [works(world)[0]]


def test_all_reduce_coalesced(world: Any) -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(tensors, dist.ReduceOp.SUM)
    assert [t[0].item() for t in tensors] == [4.0, 4.0]
    assert len(set(works(world))) == 1
