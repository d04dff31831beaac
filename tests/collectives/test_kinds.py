"""Every kind, through torch's public functions: the values and the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from prism_plugins.collectives import group as virtual_group
from prism_plugins.program.model import CommSignature

RANK, SIZE = 1, 4


def signature(kind: str, **fields: Any) -> CommSignature:
    return CommSignature(kind=kind, **{"group": 0, "dtype": "float32", **fields})


def one(world: Any) -> CommSignature:
    (recorded,) = world.take()
    return recorded


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 8.0),
        (dist.ReduceOp.PRODUCT, 16.0),
        (dist.ReduceOp.MAX, 2.0),
        (dist.ReduceOp.MIN, 2.0),
        (dist.ReduceOp.AVG, 2.0),
    ],
)
def test_all_reduce(world: Any, op: Any, expected: float) -> None:
    x = torch.full((3,), 2.0)
    dist.all_reduce(x, op)
    assert x.tolist() == [expected] * 3
    assert one(world) == signature("all_reduce", in_numel=3, out_numel=3, reduce_op=op.name)


def test_all_reduce_bitwise_and_premul(world: Any) -> None:
    for op, expected in ((dist.ReduceOp.BAND, 6), (dist.ReduceOp.BOR, 6), (dist.ReduceOp.BXOR, 0)):
        x = torch.tensor([6])
        dist.all_reduce(x, op)
        assert x.item() == expected
    x = torch.tensor([6.0])
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.item() == 12.0
    assert [c.reduce_op for c in world.take()] == ["BAND", "BOR", "BXOR", "PREMUL_SUM"]


def test_all_reduce_of_a_leaf_that_requires_grad(world: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    dist.all_reduce(x)
    assert x.tolist() == [4.0, 4.0]


def test_all_reduce_complex(world: Any) -> None:
    x = torch.tensor([1 + 2j])
    dist.all_reduce(x)
    assert x.item() == 4 + 8j
    assert one(world) == signature("all_reduce", in_numel=2, out_numel=2, reduce_op="SUM")


def test_reduce(world: Any) -> None:
    for root, expected in ((RANK, 4.0), (0, 1.0)):
        x = torch.ones(2)
        dist.reduce(x, root)
        assert x.tolist() == [expected] * 2
    at_root, elsewhere = world.take()
    assert at_root == signature("reduce", in_numel=2, out_numel=2, peer=RANK, reduce_op="SUM")
    assert elsewhere == signature("reduce", in_numel=2, out_numel=0, peer=0, reduce_op="SUM")


def test_broadcast(world: Any) -> None:
    for root in (RANK, 3):
        x = torch.tensor([5.0])
        dist.broadcast(x, root)
        assert x.item() == 5.0
        assert one(world) == signature("broadcast", in_numel=1, out_numel=1, peer=root)


def test_broadcast_into_uninitialised_memory_is_finite(world: Any) -> None:
    x = torch.tensor([float("nan"), float("inf")])
    dist.broadcast(x, 0)
    assert torch.isfinite(x).all()


def test_all_gather(world: Any) -> None:
    outputs = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(outputs, torch.tensor([1.0, 2.0]))
    assert [o.tolist() for o in outputs] == [[1.0, 2.0]] * SIZE
    assert one(world) == signature("all_gather", in_numel=2, out_numel=8)


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "_all_gather_base", "all_gather_single"])
def test_all_gather_into_tensor(world: Any, name: str) -> None:
    if not hasattr(dist, name):
        pytest.skip(f"this torch has no {name}")
    output = torch.zeros(SIZE * 2)
    getattr(dist, name)(output, torch.tensor([1.0, 2.0]))
    assert output.tolist() == [1.0, 2.0] * SIZE
    assert one(world) == signature("all_gather", in_numel=2, out_numel=8)


def test_all_gather_coalesced(world: Any) -> None:
    inputs = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    outputs = [[torch.zeros(1), torch.zeros(2)] for _ in range(SIZE)]
    with pytest.warns(FutureWarning):
        dist.all_gather_coalesced(outputs, inputs)
    assert [o[1].tolist() for o in outputs] == [[2.0, 3.0]] * SIZE
    assert [(c.in_numel, c.out_numel) for c in world.take()] == [(1, 4), (2, 8)]


def test_gather(world: Any) -> None:
    outputs = [torch.zeros(2) for _ in range(SIZE)]
    dist.gather(torch.tensor([1.0, 2.0]), outputs, dst=RANK)
    assert [o.tolist() for o in outputs] == [[1.0, 2.0]] * SIZE
    dist.gather(torch.tensor([1.0, 2.0]), None, dst=0)
    at_root, elsewhere = world.take()
    assert at_root == signature("gather", in_numel=2, out_numel=8, peer=RANK)
    assert elsewhere == signature("gather", in_numel=2, out_numel=0, peer=0)


def test_scatter(world: Any) -> None:
    x = torch.zeros(1)
    dist.scatter(x, [torch.tensor([float(i)]) for i in range(SIZE)], src=RANK)
    assert x.item() == 1.0
    x = torch.tensor([float("nan")])
    dist.scatter(x, None, src=0)
    assert x.item() == 1.0
    at_root, elsewhere = world.take()
    assert at_root == signature("scatter", in_numel=4, out_numel=1, peer=RANK)
    assert elsewhere == signature("scatter", in_numel=0, out_numel=1, peer=0)


def test_reduce_scatter(world: Any) -> None:
    x = torch.zeros(2)
    dist.reduce_scatter(x, [torch.full((2,), float(i + 1)) for i in range(SIZE)])
    assert x.tolist() == [8.0, 8.0]
    assert one(world) == signature("reduce_scatter", in_numel=8, out_numel=2, reduce_op="SUM")


@pytest.mark.parametrize("name", ["reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"])
@pytest.mark.parametrize(
    ("op", "factor"), [(dist.ReduceOp.SUM, 4), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1)]
)
def test_reduce_scatter_tensor(world: Any, name: str, op: Any, factor: int) -> None:
    if not hasattr(dist, name):
        pytest.skip(f"this torch has no {name}")
    x = torch.zeros(2)
    getattr(dist, name)(x, torch.arange(8.0), op)
    assert x.tolist() == [2.0 * factor, 3.0 * factor]
    assert one(world) == signature("reduce_scatter", in_numel=8, out_numel=2, reduce_op=op.name)


def test_all_to_all_single_even(world: Any) -> None:
    x = torch.zeros(8, 2)
    dist.all_to_all_single(x, torch.arange(16.0).view(8, 2))
    assert x.tolist() == [[4.0, 5.0], [6.0, 7.0]] * SIZE
    assert one(world) == signature("all_to_all", in_numel=16, out_numel=16)


def test_all_to_all_single_uneven(world: Any) -> None:
    x = torch.zeros(6, 2)
    dist.all_to_all_single(x, torch.arange(8.0).view(4, 2), [1, 2, 0, 3], [0, 2, 1, 1])
    rows = [[0.0, 1.0], [2.0, 3.0]]  # what rank 1 sends itself: rows 0 and 1
    assert x.tolist() == [rows[0], rows[0], rows[1], rows[0], rows[1], rows[0]]
    assert one(world) == signature(
        "all_to_all", in_numel=8, out_numel=12, send_splits=(0, 4, 2, 2), recv_splits=(2, 4, 0, 6)
    )


def test_all_to_all_single_with_equal_splits_is_even(world: Any) -> None:
    x = torch.zeros(4)
    dist.all_to_all_single(x, torch.arange(4.0), [1] * 4, [1] * 4)
    assert one(world) == signature("all_to_all", in_numel=4, out_numel=4)


def test_all_to_all_single_of_nothing(world: Any) -> None:
    x = torch.ones(0, 3)
    dist.all_to_all_single(x, torch.ones(0, 3), [0] * 4, [0] * 4)
    assert one(world) == signature("all_to_all", in_numel=0, out_numel=0)


def test_all_to_all_list(world: Any) -> None:
    outputs = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((2,), float(i)) for i in range(SIZE)])
    assert [o.tolist() for o in outputs] == [[1.0, 1.0]] * SIZE
    dist.all_to_all([torch.zeros(i + 1) for i in range(SIZE)], [torch.ones(2) for _ in range(SIZE)])
    even, uneven = world.take()
    assert even == signature("all_to_all", in_numel=8, out_numel=8)
    assert uneven == signature("all_to_all", in_numel=8, out_numel=10, recv_splits=(1, 2, 3, 4))


def test_barrier(world: Any) -> None:
    dist.barrier()
    assert one(world) == signature("barrier", dtype="")


@pytest.mark.parametrize(("release", "kept"), [((2, 11), True), ((2, 13), False)])
def test_earlier_releases_keep_the_tensor_of_the_last_barrier(
    world: Any, monkeypatch: Any, release: tuple[int, int], kept: bool
) -> None:
    """On an H200 (torch 2.11) it was the one block that a real job had at its peak and its slice had not."""
    monkeypatch.setattr(virtual_group, "_torch_release", lambda: release)
    monkeypatch.setattr(virtual_group, "_barrier_tensor", None)
    dist.barrier()
    first = virtual_group._barrier_tensor
    assert (first is not None) is kept
    if kept:
        assert first.nbytes == 1
        dist.barrier()
        assert virtual_group._barrier_tensor is not first


def test_monitored_barrier_is_for_gloo(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=1, backend="nccl")
    with pytest.raises(ValueError, match="GLOO"):
        dist.monitored_barrier()
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group)
    assert one(world).kind == "barrier"


def test_send_and_recv(world: Any) -> None:
    dist.send(torch.ones(3), 2)
    x = torch.full((3,), float("nan"))
    assert dist.recv(x, 0) == 0
    assert torch.isfinite(x).all()
    sent, received = world.recorder.comms
    assert sent[0] == signature("send", in_numel=3, peer=2)
    assert received[0] == signature("recv", out_numel=3, peer=0)
    assert world.recorder.waits == [sent[1], received[1]]


def test_recv_of_integers_is_finite_and_zero(world: Any) -> None:
    x = torch.full((3,), 77)
    dist.recv(x, 0)
    assert x.tolist() == [0, 0, 0]


def test_recv_from_anyone(world: Any) -> None:
    assert dist.recv(torch.zeros(1)) == 0
    assert one(world) == signature("recv", out_numel=1, peer=-1)


def test_isend_and_irecv_wait_once(world: Any) -> None:
    work = dist.isend(torch.ones(1), 2, tag=3)
    assert world.recorder.waits == []
    assert work.is_completed()
    work.wait()
    work.wait()
    assert len(world.recorder.waits) == 1
    work = dist.irecv(torch.ones(1), 0)
    assert work.source_rank() == 0


def test_group_ranks_are_recorded_as_peers(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=9, world_size=16)
    group = dist.new_group([8, 9, 10, 11])
    dist.broadcast(torch.ones(1), src=10, group=group)
    dist.broadcast(torch.ones(1), group_src=3, group=group)
    dist.send(torch.ones(1), 8, group=group)
    assert [c.peer for c in world.take()] == [2, 3, 0]
    assert world.recorder.groups[0].ranks == (8, 9, 10, 11)


def test_sync_and_async_calls(world: Any) -> None:
    x = torch.ones(1)
    assert dist.all_reduce(x) is None
    work = dist.all_reduce(x, async_op=True)
    (_, sync_work, sync), (_, async_work, is_async) = world.recorder.comms
    assert (sync, is_async) == (False, True)
    assert sync_work != async_work
    assert world.recorder.waits == []
    work.wait()
    assert world.recorder.waits == [async_work]


def test_future_of_a_work(world: Any) -> None:
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0] * 2)
    assert future.wait().item() == 8.0
    assert len(world.recorder.waits) <= 1
    assert dist.all_reduce(x, async_op=True).get_future().wait()[0] is x
    assert len(world.recorder.waits) >= 1


def test_what_nccl_refuses_is_refused(world: Any, make_world: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="world_size times"):
        dist.all_gather_into_tensor(torch.zeros(7), torch.zeros(2))
    with pytest.raises(ValueError, match="output size times world size"):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(7))
    with pytest.raises(ValueError, match="dim 0"):
        dist.all_to_all_single(torch.zeros(7), torch.zeros(7))
    with pytest.raises(ValueError, match="total dim 0"):
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1, 1, 2], [1] * 4)
    with pytest.raises(ValueError, match="same type"):
        dist.all_gather_into_tensor(torch.zeros(8, dtype=torch.float64), torch.zeros(2))
    make_world(backend="nccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))


NAME_SETS = {
    "torch 2.11": {
        "all_gather": "_allgather_base",
        "reduce_scatter": "_reduce_scatter_base",
        "all_to_all": "alltoall_base",
        "all_gather_coalesced": "allgather_into_tensor_coalesced",
        "reduce_scatter_coalesced": "reduce_scatter_tensor_coalesced",
    },
    "torch 2.13": {
        "all_gather": "all_gather_single",
        "reduce_scatter": "reduce_scatter_single",
        "all_to_all": "all_to_all_single",
        "all_gather_coalesced": "all_gather_single_coalesced",
        "reduce_scatter_coalesced": "reduce_scatter_single_coalesced",
    },
}


@pytest.mark.parametrize("names", NAME_SETS.values(), ids=NAME_SETS)
def test_both_method_name_sets(world: Any, names: dict[str, str]) -> None:
    group = dist.group.WORLD
    out, shard, full = torch.zeros(8), torch.tensor([1.0, 2.0]), torch.arange(8.0)
    getattr(group, names["all_gather"])(out, shard, c10d.AllgatherOptions()).wait()
    assert out.tolist() == [1.0, 2.0] * 4
    own = torch.zeros(2)
    getattr(group, names["reduce_scatter"])(own, full, c10d.ReduceScatterOptions()).wait()
    assert own.tolist() == [8.0, 12.0]
    getattr(group, names["all_to_all"])(out, full, [], [], c10d.AllToAllOptions()).wait()
    assert out.tolist() == [2.0, 3.0] * 4
    getattr(group, names["all_gather_coalesced"])([out], [shard]).wait()
    getattr(group, names["reduce_scatter_coalesced"])([own], [full]).wait()
    assert own.tolist() == [8.0, 12.0]
    assert [c.kind for c in world.take()] == [
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_gather",
        "reduce_scatter",
    ]


def test_plain_calls_of_the_methods(world: Any) -> None:
    """Overloads of torch's binding: a tensor instead of a list, an op or a root instead of options."""
    group, x = dist.group.WORLD, torch.ones(2)
    group.allreduce(x).wait()
    group.allreduce([x], dist.ReduceOp.MAX).wait()
    group.broadcast(x, 1).wait()
    group.reduce(x, 1, dist.ReduceOp.SUM).wait()
    group.allgather([torch.zeros(2) for _ in range(4)], x).wait()
    group.gather([torch.zeros(2) for _ in range(4)], x, 1).wait()
    group.scatter(x, [torch.zeros(2) for _ in range(4)], 1).wait()
    group.reduce_scatter(x, [torch.zeros(2) for _ in range(4)], dist.ReduceOp.SUM).wait()
    group.barrier().wait()
    assert [c.kind for c in world.take()] == [
        "all_reduce",
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "barrier",
    ]


def test_sequence_numbers_count_collectives(world: Any) -> None:
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.send(torch.ones(1), 0)
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 2


def test_cpu_tensors_go_to_the_cpu_backend(make_world: Callable[..., Any]) -> None:
    world = make_world(backend="cpu:gloo,cuda:nccl")
    dist.all_reduce(torch.ones(1))
    assert world.recorder.groups[0].backend == "gloo"


def test_group_of_one(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=0, world_size=1)
    x = torch.tensor([3.0])
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.zeros(1), x)
    dist.barrier()
    assert x.item() == 3.0
    assert len(world.take()) == 3
