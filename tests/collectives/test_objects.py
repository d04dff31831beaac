"""Object collectives: values, and the tensor collectives torch makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist


def recorded(world: Any) -> list[tuple[str, str, int, int, int]]:
    return [(c.kind, c.dtype, c.in_numel, c.out_numel, c.peer) for c in world.take()]


OBJ = {"a": [1, 2, 3]}
N = len(pickle.dumps(OBJ))


def test_all_gather_object(world: Any) -> None:
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, OBJ)
    assert gathered == [OBJ] * 4
    assert gathered[0] is not gathered[1]
    assert recorded(world) == [("all_gather", "int64", 1, 4, -1), ("all_gather", "uint8", N, 4 * N, -1)]


def test_gather_object(world: Any) -> None:
    gathered: list[Any] = [None] * 4
    dist.gather_object(OBJ, gathered, dst=1)
    dist.gather_object(OBJ, dst=0)
    assert gathered == [OBJ] * 4
    sizes = ("all_gather", "int64", 1, 4, -1)
    assert recorded(world) == [sizes, ("gather", "uint8", N, 4 * N, 1), sizes, ("gather", "uint8", N, 0, 0)]


def test_broadcast_object_list(world: Any) -> None:
    objects = [OBJ, OBJ]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [OBJ, OBJ]
    assert recorded(world) == [
        ("broadcast", "int64", 2, 2, 1),
        ("broadcast", "uint8", 2 * N, 2 * N, 1),
    ]


def test_scatter_object_list(world: Any) -> None:
    output: list[Any] = [None]
    dist.scatter_object_list(output, ["zero", "one", "two", "three"], src=1)
    assert output == ["one"]
    assert [r[0] for r in recorded(world)] == ["broadcast", "scatter", "scatter"]


def test_send_and_recv_object_list(world: Any) -> None:
    dist.send_object_list([OBJ], dst=2)
    assert dist.recv_object_list([None], src=0) == 0
    assert recorded(world)[:2] == [("send", "int64", 1, 0, 2), ("send", "uint8", N, 0, 2)]


def test_large_objects_are_shared_not_copied(make_world: Callable[..., Any]) -> None:
    make_world(rank=0, world_size=512)
    gathered: list[Any] = [None] * 512
    dist.all_gather_object(gathered, b"x" * (1 << 20))
    assert gathered[0] is gathered[511]


def test_arguments_are_checked_as_torch_does(world: Any) -> None:
    with pytest.raises(ValueError, match="gather_list"):
        dist.gather_object(OBJ, None, dst=1)
    with pytest.raises(ValueError, match="Expected argument"):
        dist.scatter_object_list([], ["a"] * 4, src=1)
    with pytest.raises(ValueError, match="non-None"):
        dist.scatter_object_list([None], None, src=1)
    with pytest.raises(ValueError, match="should not be the same"):
        dist.send_object_list([OBJ], dst=1)


def test_group_rank_arguments(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=9, world_size=16)
    group = dist.new_group([8, 9])
    objects = [OBJ]
    dist.broadcast_object_list(objects, group=group, group_src=1)
    assert recorded(world)[0] == ("broadcast", "int64", 1, 1, 1)
    assert dist.recv_object_list([None], group=group, group_src=0) == 8


def test_other_groups_are_ignored_with_a_warning(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=9, world_size=16)
    with pytest.warns(UserWarning, match="all_gather_object"):
        dist.all_gather_object([None], OBJ, group=dist.new_group([0, 1]))
    assert world.take() == []


def test_object_device_follows_the_backend(make_world: Callable[..., Any]) -> None:
    world = make_world(backend="nccl")
    dist.all_gather_object([None] * 4, OBJ)
    assert world.recorder.groups[0].backend == "nccl"
