"""What is replaced in ``torch.distributed``: one table, applied and undone by one object."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from prism_plugins.collectives import objects
from prism_plugins.collectives.group import VirtualProcessGroup
from prism_plugins.collectives.nccl import ProcessGroupNCCL
from prism_plugins.collectives.stores import make_shared_store_classes, make_store_classes

if TYPE_CHECKING:
    from prism_plugins.collectives.install import Collectives

_NCCL_TIMEOUT = timedelta(minutes=10)
_NCCL_VERSION = 2 << 32 | 27 << 16 | 5
_MISSING = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute that is replaced, or added where torch lacks it."""

    target: Any
    name: str
    replacement: Any
    why: str


def patch_table(collectives: Collectives) -> list[Patch]:
    """Everything that is replaced, with its reason."""
    return [
        *_functions(collectives),
        *_object_collectives(),
        *_stores(collectives),
        *_what_cpu_builds_lack(),
    ]


class AppliedPatches:
    """Patches in force until :meth:`undo`."""

    def __init__(self, table: list[Patch]) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        for patch in table:
            original = getattr(patch.target, patch.name, _MISSING)
            targets = [patch.target]
            if callable(original):
                targets += _modules_holding(patch.name, original, patch.target)
            for target in targets:
                self._undo.append((target, patch.name, original))
                setattr(target, patch.name, patch.replacement)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            target, name, original = self._undo.pop()
            if original is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, original)


def _functions(collectives: Collectives) -> list[Patch]:
    return [
        Patch(
            target=c10d,
            name="_new_process_group_helper",
            replacement=collectives.wrap_helper(c10d._new_process_group_helper),
            why="every backend name makes our group, at the target's rank and world size",
        ),
        Patch(
            target=c10d,
            name="rendezvous",
            replacement=collectives.rendezvous,
            why="there is nobody to meet",
        ),
        Patch(
            target=c10d,
            name="_store_based_barrier",
            replacement=lambda *args, **kwargs: None,
            why="virtual ranks never check in (TORCH_DIST_INIT_BARRIER=1)",
        ),
        Patch(
            target=c10d,
            name="batch_isend_irecv",
            replacement=_wrap_batch(c10d.batch_isend_irecv),
            why="whether a batch is grouped depends on torch's version (never for a subclass, or by its one backend)",
        ),
        Patch(
            target=c10d,
            name="split_group",
            replacement=collectives.wrap_split_group(c10d.split_group),
            why="ncclCommSplit of a virtual communicator",
        ),
    ]


def _object_collectives() -> list[Patch]:
    return [
        Patch(
            target=c10d,
            name=name,
            replacement=objects.for_virtual_groups(getattr(c10d, name), replacement),
            why="objects must not go through device tensors whose values are not real",
        )
        for name, replacement in objects.REPLACEMENTS.items()
    ]


def _stores(collectives: Collectives) -> list[Patch]:
    if collectives.all_real:
        stores = make_shared_store_classes(lambda: collectives.store)
    else:
        spec = collectives.spec
        stores = make_store_classes(rank=spec.rank, world_size=spec.world_size)
    return [
        Patch(target=dist, name=name, replacement=cls, why="its constructor waits for peers")
        for name, cls in stores.items()
    ]


def _what_cpu_builds_lack() -> list[Patch]:
    table = [
        Patch(target=c10d, name="is_nccl_available", replacement=lambda: True, why="CPU builds say no"),
        Patch(
            target=c10d,
            name="default_pg_nccl_timeout",
            replacement=c10d.default_pg_nccl_timeout or _NCCL_TIMEOUT,
            why="None in CPU builds",
        ),
    ]
    if not hasattr(c10d, "ProcessGroupNCCL"):
        why = "CPU builds lack it; scripts make its Options"
        for module in (c10d, dist):
            table.append(Patch(target=module, name="ProcessGroupNCCL", replacement=ProcessGroupNCCL, why=why))
    if not hasattr(torch._C, "_nccl_version"):
        why = "CPU builds lack it; torch asks for it to log errors of nccl groups"
        for name, value in (("_nccl_version", _NCCL_VERSION), ("_nccl_version_suffix", b"")):
            replacement = functools.partial(_constant, value)
            table.append(Patch(target=torch._C, name=name, replacement=replacement, why=why))
    return table


def _wrap_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d._get_default_group()
        device = p2p_op_list[0].tensor.device
        if not isinstance(group, VirtualProcessGroup):
            return original(p2p_op_list)

        def call_all() -> list[dist.Work]:
            calls = [(group.send if op.op is dist.isend else group.recv, op) for op in p2p_op_list]
            return [call([op.tensor], op.group_peer, op.tag) for call, op in calls]

        if not group.coalesces(device.type):
            return call_all()
        group._start_coalescing(device)
        try:
            call_all()
        finally:
            work = group._end_coalescing(device)
        return [work]

    return batch_isend_irecv


def _modules_holding(name: str, original: Any, target: Any) -> list[Any]:
    """Python modules of torch that hold an object by this name. ``torch._C`` keeps its own: we use it."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.")
        and not module_name.startswith("torch._C")
        and module is not target
        and getattr(module, "__dict__", {}).get(name) is original
    ] + ([dist] if target is not dist and dist.__dict__.get(name) is original else [])


def _constant(value: Any) -> Any:
    return value
