from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from prism_plugins.collectives.stores import VirtualStore


@pytest.fixture
def store() -> VirtualStore:
    return VirtualStore(rank=2, world_size=8)


def test_set_and_get(store: VirtualStore) -> None:
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.check(["key", "other"])
    assert store.delete_key("key")
    assert not store.delete_key("key")


def test_a_counting_barrier_ends(store: VirtualStore) -> None:
    for _ in range(3):
        store.add("arrived", 1)
    assert store.add("arrived", 0) == 24
    assert store.get("arrived") == b"24"
    store.wait(["anything"], timedelta(seconds=1))


def test_ranks_arrive_in_order(store: VirtualStore) -> None:
    assert store.add("ticket", 1) == 3
    assert store.add("ticket", 1) == 11
    first = VirtualStore(rank=0, world_size=8)
    assert first.add("leader", 1) == 1


def test_keys_of_peers_are_answered_by_ours(store: VirtualStore) -> None:
    store.set("addr/2", "10.0.0.2:99")
    assert store.get("addr/7") == b"10.0.0.2:99"
    assert store.num_mirrored == 1
    assert store.get("nobody set this") == b""


def test_compare_set(store: VirtualStore) -> None:
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"


def test_queues_do_not_block(store: VirtualStore) -> None:
    store.queue_push("q", "a")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"a"
    assert store.queue_pop("q") == b""


def test_inside_a_prefix_store(store: VirtualStore) -> None:
    prefixed = dist.PrefixStore("x", store)
    prefixed.set("addr/2", "me")
    assert prefixed.get("addr/0") == b"me"
    prefixed.add("n", 1)
    assert prefixed.add("n", 0) == 8
    prefixed.wait(["never set"], timedelta(milliseconds=1))


def test_stores_a_script_makes_do_not_wait(make_world: Callable[..., Any], tmp_path: Any) -> None:
    make_world(rank=3, world_size=64)
    store = dist.TCPStore("192.0.2.1", 29500, 64, False, timeout=timedelta(seconds=1))
    store.set("a", "1")
    same = dist.TCPStore(host_name="192.0.2.1", port=29500, world_size=64, is_master=True)
    assert same.get("a") == b"1"
    store.add("n", 1)
    assert store.add("n", 0) == 64
    alone = dist.TCPStore("localhost", 29501, 1, True)
    assert alone.add("n", 1) == 1
    dist.FileStore(str(tmp_path / "f"), 64).wait(["x"])
    assert isinstance(store, dist.Store)
    assert isinstance(store, dist.TCPStore)


def test_the_stores_of_groups(make_world: Callable[..., Any]) -> None:
    make_world(rank=3, world_size=64)
    default = dist.distributed_c10d._get_default_store()
    default.set("rank/3", "here")
    assert default.get("rank/60") == b"here"
    group_store = dist.distributed_c10d._get_process_group_store(dist.new_group([2, 3]))
    group_store.add("n", 1)
    assert group_store.add("n", 0) == 64
