"""Initialisation and groups: every backend name, every way to make a group, at any size."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prism_plugins.collectives.group import VirtualProcessGroup


@pytest.mark.parametrize(
    "backend", ["nccl", "gloo", "ccl", "mpi", "ucc", "fake", "cpu:gloo,cuda:nccl", "NCCL", None]
)
@pytest.mark.filterwarnings("ignore")
def test_every_backend_name(make_world: Callable[..., Any], backend: str | None) -> None:
    make_world(rank=3, world_size=16, backend="uninitialized")
    dist.init_process_group(backend)
    assert isinstance(dist.group.WORLD, VirtualProcessGroup)
    assert (dist.get_rank(), dist.get_world_size()) == (3, 16)
    assert dist.get_backend() == ("undefined" if backend is None else backend.lower())
    assert dist.new_group([2, 3]).size() == 2
    assert dist.get_backend(dist.new_group([2, 3])) == dist.get_backend()


def test_backend_config_and_devices_are_those_asked_for(make_world: Callable[..., Any]) -> None:
    make_world(backend="cpu:gloo,cuda:nccl")
    assert c10d.get_backend_config() == "cpu:gloo,cuda:nccl"
    assert [d.type for d in dist.group.WORLD._device_types] == ["cpu", "cuda"]
    group = dist.new_group(backend="nccl")
    assert c10d.get_backend_config(group) == "cuda:nccl"
    assert [d.type for d in group._device_types] == ["cuda"]
    assert group._get_backend(torch.device("cuda")).supports_coalescing
    assert not dist.new_group(backend="gloo")._get_backend(torch.device("cpu")).supports_coalescing


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_method": "tcp://192.0.2.1:1"},
        {"init_method": "file:///nonexistent/file"},
        {"init_method": "env://"},
        {"world_size": 99, "rank": 7, "init_method": "tcp://192.0.2.1:1"},
        {"timeout": timedelta(seconds=1)},
        {"store": "hash"},
        {"store": "tcp"},
        {"store": "prefix"},
    ],
)
def test_any_way_to_meet(make_world: Callable[..., Any], arguments: dict[str, Any]) -> None:
    make_world(rank=5, world_size=64, backend="uninitialized")
    stores = {
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("192.0.2.1", 1, 64, False),
        "prefix": lambda: dist.PrefixStore("x", dist.TCPStore("192.0.2.1", 1, 64, False)),
    }
    if "store" in arguments:
        arguments = {"store": stores[arguments["store"]](), "rank": 5, "world_size": 64}
    begin = time.perf_counter()
    dist.init_process_group("gloo", **arguments)
    assert (dist.get_rank(), dist.get_world_size()) == (5, 64)
    assert time.perf_counter() - begin < 1


def test_init_barrier_variable_does_not_hang(make_world: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    make_world(rank=1, world_size=64, backend="gloo")
    dist.new_group([0, 1])


def test_new_group(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=5, world_size=16)
    mine = dist.new_group([4, 5, 6, 7], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    other = dist.new_group([0, 1, 2, 3])
    assert other == dist.GroupMember.NON_GROUP_MEMBER
    assert (mine.rank(), mine.size()) == (1, 4)
    assert dist.get_process_group_ranks(mine) == [4, 5, 6, 7]
    assert dist.get_group_rank(mine, 7) == 3
    assert dist.get_global_rank(mine, 3) == 7
    assert mine.group_desc == "TENSOR_MODEL_PARALLEL_GROUP"
    dist.all_reduce(torch.ones(1), group=mine)
    (info,) = world.recorder.groups
    assert (info.ranks, info.desc, info.name) == ((4, 5, 6, 7), mine.group_desc, mine.group_name)


def test_local_synchronization_and_unsorted_ranks(make_world: Callable[..., Any]) -> None:
    make_world(rank=2, world_size=8)
    assert dist.new_group([1, 2], use_local_synchronization=True).rank() == 1
    assert dist.new_group([4, 5], use_local_synchronization=True) in (None, dist.GroupMember.NON_GROUP_MEMBER)
    assert dist.new_group([6, 2, 0]).ranks == (0, 2, 6)


def test_subgroups(make_world: Callable[..., Any]) -> None:
    make_world(rank=5, world_size=16)
    mine, _ = dist.new_subgroups(group_size=4)
    assert mine.ranks == (4, 5, 6, 7)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], [5, 9], [2, 3]])
    assert mine.ranks == (5, 9)


def test_split_group(make_world: Callable[..., Any]) -> None:
    make_world(rank=5, world_size=8)
    with pytest.raises(RuntimeError, match="No device associated"):
        dist.split_group(split_ranks=[[0, 1], [4, 5]])
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    half = dist.split_group(split_ranks=[[0, 1, 2, 3], [7, 6, 5, 4]])
    assert half.ranks == (4, 5, 6, 7)
    assert dist.get_process_group_ranks(half) == [4, 5, 6, 7]
    quarter = dist.split_group(half, split_ranks=[[0, 1]])
    assert quarter.ranks == (4, 5)
    assert dist.split_group(half, split_ranks=[[2, 3]]) is None
    dist.all_reduce(torch.ones(1), group=quarter)


def test_device_mesh(make_world: Callable[..., Any]) -> None:
    make_world(rank=13, world_size=16)
    mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh.get_group("tp").ranks == (12, 13, 14, 15)
    assert mesh.get_group("dp").ranks == (9, 13)
    assert mesh.get_group("pp").ranks == (5, 13)
    assert tuple(mesh.get_coordinate()) == (1, 1, 1)
    assert mesh["dp", "tp"].mesh.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert mesh["tp"].get_local_rank() == 1
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    assert flat.get_group().ranks == tuple(range(8, 16))
    assert DeviceMesh.from_group(mesh.get_group("tp"), "cpu").mesh.tolist() == [12, 13, 14, 15]


def test_device_mesh_initialises_the_world(make_world: Callable[..., Any]) -> None:
    make_world(rank=3, world_size=4, backend="uninitialized")
    mesh = init_device_mesh("cpu", (4,))
    assert mesh.get_group().ranks == (0, 1, 2, 3)


def test_destroy_and_init_again(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=1, world_size=4, backend="gloo")
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    assert len(world.take()) == 1


def test_nccl_is_there(make_world: Callable[..., Any]) -> None:
    make_world(backend="uninitialized")
    assert dist.is_nccl_available()
    assert dist.is_backend_available("nccl")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.cga_cluster_size = 2
    options._timeout = timedelta(seconds=5)
    dist.init_process_group("nccl", pg_options=options)
    group = dist.new_group([0, 1], pg_options=options, timeout=timedelta(seconds=3))
    assert group.options is options
    c10d._set_pg_timeout(timedelta(seconds=9), group)


def test_groups_are_found_by_name(make_world: Callable[..., Any]) -> None:
    make_world(rank=1, world_size=4)
    group = dist.new_group([0, 1])
    assert c10d._resolve_process_group(group.group_name) is group


def test_twenty_thousand_groups_in_a_world_of_8192(make_world: Callable[..., Any]) -> None:
    """As many as Megatron makes. CPU seconds: the machine may be busy."""
    make_world(rank=4097, world_size=8192, backend="uninitialized")
    begin = time.process_time()
    dist.init_process_group("nccl")
    count = 0
    for rank in range(8192):
        dist.new_group([rank])
        count += 1
    for start in range(0, 8192, 8):
        dist.new_group(range(start, start + 8))
        dist.new_group(range(start, start + 8), backend="gloo")
        count += 2
    while count < 20_000:
        dist.new_group(range(count % 1024, 8192, 1024))
        count += 1
    for start in range(8):
        dist.new_group(range(start, 8192, 8))
    seconds = time.process_time() - begin
    print(f"{count} groups in a world of 8192: {seconds:.2f} CPU s")
    assert seconds < 2
