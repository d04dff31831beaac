"""Object collectives: exchanged as pickles, recorded as the collectives torch makes of them.

torch sends an object as a size (int64) and a byte tensor. The values must not go through device tensors here:
what is larger than the virtual device's real storage would be lost. Each function records exactly the calls
that torch's own function would make.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from prism_plugins.collectives.group import VirtualProcessGroup

_SHARE_BYTES = 16 << 20
"""Above this many bytes in a gathered list its members share one object instead of getting copies."""


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Gather an object of every rank to every rank."""
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("all_gather_object")
        return
    pg = _group(group)
    object_list[: pg.size()] = _load_all(pg.all_gather_objects(_dump(obj)))


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    """Gather an object of every rank to one rank."""
    pg = _group(group)
    if dst is None and group_dst is None:
        dst = 0
    root = _group_rank(pg, dst, group_dst)
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("gather_object")
        return
    c10d._validate_output_list_for_rank(pg.rank(), root, object_gather_list)
    gathered = pg.gather_objects(_dump(obj), root)
    if pg.rank() == root:
        object_gather_list[: pg.size()] = _load_all(gathered)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Broadcast a list of objects from one rank."""
    pg = _group(group)
    if src is None and group_src is None:
        src = 0
    root = _group_rank(pg, src, group_src)
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("broadcast_object_list")
        return
    received = pg.broadcast_objects([_dump(o) for o in object_list], root, _device_type(device))
    if pg.rank() != root:
        _store(object_list, received)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    """Scatter a list of objects from one rank."""
    pg = _group(group)
    if src is None and group_src is None:
        src = 0
    root = _group_rank(pg, src, group_src)
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("scatter_object_list")
        return
    if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    if pg.rank() == root and scatter_object_input_list is None:
        raise ValueError("source rank must provide non-None scatter_object_input_list")
    payloads = [_dump(o) for o in scatter_object_input_list] if pg.rank() == root else []
    payload = pg.scatter_objects(payloads, root)
    _store(scatter_object_output_list, [payload])


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send a list of objects to one rank."""
    pg = _group(group)
    peer = _group_rank(pg, dst, group_dst)
    c10d._check_not_self_rank(pg, peer, "destination")
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("send_object_list")
        return
    pg.send_objects([_dump(o) for o in object_list], peer, _device_type(device))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive a list of objects from one rank; returns its global rank."""
    pg = _group(group)
    if src is None and group_src is None:
        peer = pg.any_source()
    else:
        peer = _group_rank(pg, src, group_src)
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("recv_object_list")
        return -1
    _store(object_list, pg.recv_objects([_dump(o) for o in object_list], peer, _device_type(device)))
    return pg.ranks[peer]


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        all_gather_object,
        gather_object,
        broadcast_object_list,
        scatter_object_list,
        send_object_list,
        recv_object_list,
    )
}


def for_virtual_groups(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` for groups of ours, ``original`` for any other; name, doc and signature stay."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        group = bound.arguments.get("group") or c10d._get_default_group()
        if isinstance(group, VirtualProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER:
            return replacement(**bound.arguments)
        return original(*args, **kwargs)

    return dispatch


def _group(group: Any) -> VirtualProcessGroup:
    return group or c10d._get_default_group()


def _group_rank(pg: VirtualProcessGroup, rank: int | None, group_rank: int | None) -> int:
    return c10d._canonicalize_group_rank(pg, rank, group_rank, return_global=False)


def _device_type(device: Any) -> str | None:
    return None if device is None else torch.device(device).type


def _dump(obj: Any) -> bytes:
    return pickle.dumps(obj)


def _load(payload: bytes) -> Any:
    return pickle.loads(payload)


def _load_all(payloads: Sequence[bytes]) -> list[Any]:
    if payloads and len(payloads) * len(payloads[0]) > _SHARE_BYTES and len(set(map(id, payloads))) == 1:
        return [_load(payloads[0])] * len(payloads)
    return [_load(p) for p in payloads]


def _store(target: list[Any], payloads: Sequence[bytes | None]) -> None:
    for i, payload in enumerate(payloads):
        if payload is not None:
            target[i] = _load(payload)
