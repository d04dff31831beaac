"""Collectives that reach the group through C++: functional collectives, DTensor, FSDP2, DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SIZE = 4


def kinds(world: Any) -> list[str]:
    return [c.kind for c in world.take()]


def test_functional_all_reduce(world: Any) -> None:
    x = torch.ones(3)
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    assert (y + 0).tolist() == [4.0] * 3
    assert x.tolist() == [1.0] * 3
    assert kinds(world) == ["all_reduce"]


def test_functional_calls_are_asynchronous_and_waited_for(world: Any) -> None:
    y = funcol.all_reduce(torch.ones(3), "avg", dist.group.WORLD)
    _, work, is_async = world.recorder.comms[0]
    assert is_async
    assert world.recorder.waits == []
    funcol.wait_tensor(y)
    assert world.recorder.waits == [work]


def test_functional_gather_scatter_all_to_all(world: Any) -> None:
    group, x = dist.group.WORLD, torch.arange(8.0)
    gathered = funcol.all_gather_tensor(x, 0, group)
    assert gathered.tolist() == x.tolist() * SIZE
    own = funcol.reduce_scatter_tensor(x, "sum", 0, group)
    assert own.tolist() == [8.0, 12.0]
    exchanged = funcol.all_to_all_single(x, [2] * 4, [2] * 4, group)
    assert exchanged.tolist() == [2.0, 3.0] * SIZE
    assert funcol.broadcast(x, 1, group).tolist() == x.tolist()
    assert kinds(world) == ["all_gather", "reduce_scatter", "all_to_all", "broadcast"]


def test_functional_coalesced(world: Any) -> None:
    group = dist.group.WORLD
    funcol.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", group)
    funcol.all_gather_into_tensor_coalesced([torch.ones(1), torch.ones(2)], group)
    funcol.reduce_scatter_tensor_coalesced([torch.ones(4), torch.ones(8)], "sum", [0, 0], group)
    works = [work for _, work, _ in world.recorder.comms]
    assert len(works) == 6
    assert len(set(works)) == 3


def test_autograd_functional(world: Any) -> None:
    x = torch.arange(8.0, requires_grad=True)
    y = funcol.all_to_all_single_autograd(x, [2] * 4, [2] * 4, dist.group.WORLD)
    y.sum().backward()
    assert x.grad.tolist() == [1.0] * 8
    x = torch.ones(2, requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (gathered * gathered).sum().backward()
    assert x.grad.tolist() == [8.0, 8.0]
    assert kinds(world) == ["all_to_all", "all_to_all", "all_gather", "reduce_scatter"]


def test_nn_functional(world: Any) -> None:
    x = torch.ones(4, requires_grad=True)
    dist_nn.all_reduce(x).sum().backward()
    assert x.grad.tolist() == [4.0] * 4
    x = torch.ones(2, requires_grad=True)
    torch.stack(dist_nn.all_gather(x)).sum().backward()
    y = dist_nn.reduce_scatter(torch.zeros(2), [x * 2 for _ in range(4)])
    assert y.tolist() == [8.0, 8.0]
    dist_nn.all_to_all_single(torch.zeros(4), torch.ones(4, requires_grad=True)).sum().backward()
    dist_nn.broadcast(x, 0)
    dist_nn.gather(x, 1)
    assert "all_gather" in (recorded := kinds(world))
    assert recorded[:2] == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize("op", ["isend", "irecv", "batch_p2p_ops"])
def test_functional_point_to_point(world: Any, op: str) -> None:
    if not hasattr(torch.ops._c10d_functional, op):
        pytest.skip(f"this torch has no functional {op}")
    ops, name, x = torch.ops._c10d_functional, dist.group.WORLD.group_name, torch.ones(2)
    if op == "isend":
        ops.wait_tensor(ops.isend(x, 2, 0, name))
        assert kinds(world) == ["send"]
    elif op == "irecv":
        ops.wait_tensor(ops.irecv(x, 0, 0, name))
        assert kinds(world) == ["recv"]
    else:
        for y in ops.batch_p2p_ops(["isend", "irecv"], [2, 0], [0, 0], [x, torch.ones(2)], name):
            ops.wait_tensor(y)
        assert kinds(world) == ["send", "recv"]


def test_dtensor(world: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    assert x.to_local().shape == (2, 2)
    assert x.redistribute(mesh, [Replicate()]).to_local().shape == (8, 2)
    assert x.sum().full_tensor().item() == 16.0
    assert {"all_gather", "all_reduce"} <= set(kinds(world))


def test_fsdp2_step(make_world: Callable[..., Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    world = make_world(rank=1, world_size=SIZE, backend="gloo")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    world.take()
    model(torch.ones(2, 8)).sum().backward()
    recorded = kinds(world)
    assert recorded.count("all_gather") >= 2
    assert recorded.count("reduce_scatter") == 2


def test_ddp_step(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=1, world_size=SIZE, backend="gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    assert model.module.bias.grad.tolist() == [2.0] * 4
    assert kinds(world)[-1] == "all_reduce"
