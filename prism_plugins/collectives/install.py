"""Replace ``torch.distributed``'s backends by the virtual process group."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from prism_plugins.collectives import functional, objects
from prism_plugins.collectives.group import VirtualProcessGroup
from prism_plugins.collectives.journal import Journal, group_shape
from prism_plugins.collectives.nccl import ProcessGroupNCCL
from prism_plugins.collectives.peers import MirrorPeers
from prism_plugins.collectives.real import RealPeers, RealWorld
from prism_plugins.collectives.stores import VirtualStore, make_shared_store_classes, make_store_classes
from prism_plugins.program.slices import SliceSpec

_BACKEND = "prism"
_NCCL_TIMEOUT = timedelta(minutes=10)
_NCCL_VERSION = 2 << 32 | 27 << 16 | 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute that is replaced."""

    target: Any
    name: str
    replacement: Any
    why: str


class Collectives:
    """The virtual world of this process, and what was patched to install it.

    Args:
        spec: rank and world size, journals, real ranks.
        recorder: see :class:`~prism_plugins.capture.recorder.Recorder`.
        context: of the slice; told the assumptions at the end.
    """

    def __init__(self, spec: SliceSpec, recorder: Any, context: Any = None) -> None:
        self.spec = spec
        self._context = context
        self.journal = Journal(spec)
        self.num_groups = 0
        """Groups this rank is a member of."""
        self._recorder = recorder
        self._real = RealWorld(spec) if spec.real_ranks else None
        self._all_real = self._real is not None and self._real.covers(range(spec.world_size))
        self._virtual_store = VirtualStore(rank=spec.rank, world_size=spec.world_size)
        self._ordinals: Counter[str] = Counter()
        self._pending: dict[str, Any] = {}
        self._kernels: torch.library.Library | None = None
        self._undo: list[tuple[Any, str, Any]] = []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the journal, and tell the slice's context what was assumed about virtual ranks."""
        self.journal.save(path)
        if self._context is not None:
            for line in self.assumptions():
                self._context.assume(line)

    def assumptions(self) -> list[str]:
        """What was assumed about virtual ranks, one line each."""
        stats = self.journal.stats
        lines = []
        if stats.nearest:
            lines.append(
                f"{stats.nearest} control payload(s) of virtual ranks were taken from another call of the "
                "same group, because the slice of their source ran fewer"
            )
        if stats.misses:
            lines.append(
                f"{stats.misses} small payload(s) of virtual ranks were in no journal: "
                "the rank kept its own values"
            )
        if stats.dropped:
            lines.append(f"{stats.dropped} payload(s) were too large to journal")
        if self._virtual_store.num_mirrored:
            lines.append(
                f"{self._virtual_store.num_mirrored} store key(s) of virtual ranks were answered by our own"
            )
        return lines

    # Patch table

    def patches(self) -> list[Patch]:
        """Everything in ``torch.distributed`` that is replaced, with its reason."""
        table = [
            Patch(
                target=c10d,
                name="_new_process_group_helper",
                replacement=self._wrap_helper(c10d._new_process_group_helper),
                why="every backend name makes our group, at the target's rank and world size",
            ),
            Patch(
                target=c10d,
                name="rendezvous",
                replacement=self._rendezvous,
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
                why="torch groups a batch only for `type(group) is ProcessGroup`, never for a subclass",
            ),
            Patch(
                target=c10d,
                name="split_group",
                replacement=self._wrap_split_group(c10d.split_group),
                why="ncclCommSplit of a virtual communicator",
            ),
            Patch(target=c10d, name="is_nccl_available", replacement=lambda: True, why="CPU builds say no"),
            Patch(
                target=c10d,
                name="default_pg_nccl_timeout",
                replacement=c10d.default_pg_nccl_timeout or _NCCL_TIMEOUT,
                why="None in CPU builds",
            ),
        ]
        for name, replacement in objects.REPLACEMENTS.items():
            original = getattr(c10d, name)
            table.append(
                Patch(
                    target=c10d,
                    name=name,
                    replacement=objects.for_virtual_groups(original, replacement),
                    why="objects must not go through device tensors whose values are not real",
                )
            )
        if self._all_real:
            stores = make_shared_store_classes(lambda: self._store)
        else:
            stores = make_store_classes(rank=self.spec.rank, world_size=self.spec.world_size)
        for name, cls in stores.items():
            table.append(
                Patch(target=dist, name=name, replacement=cls, why="its constructor waits for peers")
            )
        if not hasattr(c10d, "ProcessGroupNCCL"):
            for module in (c10d, dist):
                table.append(
                    Patch(
                        target=module,
                        name="ProcessGroupNCCL",
                        replacement=ProcessGroupNCCL,
                        why="CPU builds lack it; scripts make its Options",
                    )
                )
        if not hasattr(torch._C, "_nccl_version"):
            why = "CPU builds lack it; torch asks for it to log errors of nccl groups"
            for name, value in (("_nccl_version", _NCCL_VERSION), ("_nccl_version_suffix", b"")):
                replacement = functools.partial(_constant, value)
                table.append(Patch(target=torch._C, name=name, replacement=replacement, why=why))
        return table

    def apply(self) -> None:
        """Install all patches, in every module of torch that holds the replaced object by that name."""
        if _BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(_BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
        _active.append(self)
        self._kernels = functional.register()
        for patch in self.patches():
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
        if self._kernels is not None:
            self._kernels._destroy()
        _active.remove(self)

    # Groups

    def create_group(self, *, ranks: tuple[int, ...], rank: int, name: str) -> VirtualProcessGroup:
        """Make the group that c10d is asking for. Called back by torch within ``_new_process_group_helper``."""
        self.num_groups += 1
        shape = group_shape(ranks)
        ordinal = self._ordinals[shape]
        self._ordinals[shape] += 1
        peers = MirrorPeers(rank=rank, size=len(ranks), shape=shape, ordinal=ordinal, journal=self.journal)
        if self._real is not None and self._real.covers(ranks):
            peers = RealPeers(self._real, ranks=ranks, name=name, mirror=peers)
        return VirtualProcessGroup(
            recorder=self._recorder, peers=peers, ranks=ranks, rank=rank, name=name, **self._pending
        )

    def _wrap_helper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def helper(
            group_size: int,
            group_rank: int,
            global_ranks_in_group: Sequence[int],
            backend: Any,
            store: Any,
            group_name: str,
            backend_options: Any = None,
            device_id: torch.device | None = None,
            group_desc: str | None = None,
            **others: Any,
        ) -> Any:
            if not global_ranks_in_group:
                group_size, group_rank = self.spec.world_size, self.spec.rank
                store = dist.PrefixStore("default_pg", self._store)
            config = _backend_config(str(backend))
            self._pending = {
                "desc": group_desc or "undefined",
                "device_backends": dict(config.get_device_backend_map()),
                "options": backend_options,
            }
            num_before = self.num_groups
            pg, pg_store = original(
                group_size,
                group_rank,
                global_ranks_in_group,
                dist.Backend(_BACKEND),
                store,
                group_name,
                backend_options=None,
                group_desc=group_desc,
                **others,
            )
            if not global_ranks_in_group and self._real is not None:
                self._real.connect()
            if self.num_groups > num_before:
                pg.bound_device_id = device_id
                c10d._world.pg_map[pg] = (backend, pg_store)
                c10d._world.pg_backend_config[pg] = str(config)
            return pg, pg_store

        return helper

    def _wrap_split_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def split_group(*args: Any, **kwargs: Any) -> VirtualProcessGroup | None:
            arguments = signature.bind(*args, **kwargs).arguments
            default = c10d._get_default_group()
            split_ranks = arguments.get("split_ranks")
            if not split_ranks:
                raise ValueError("split_ranks cannot be None or empty")
            if default.bound_device_id is None:
                raise RuntimeError(
                    "No device associated with the default pg, not safe to split any process groups"
                )
            parent = arguments.get("parent_pg") or default
            for ranks in split_ranks:
                if len(ranks) == 0:
                    raise ValueError("the split group cannot be empty")
                if len(ranks) != len(set(ranks)):
                    raise ValueError("the split group cannot have duplicate ranks")
            mine = next((sorted(ranks) for ranks in split_ranks if parent.rank() in ranks), None)
            if mine is None:
                return None
            backend = dist.Backend(str(arguments.get("backend") or c10d._world.pg_map[parent][0]))
            ranks = [parent.ranks[r] for r in mine]
            pg, _ = c10d._new_process_group_helper(
                len(ranks),
                mine.index(parent.rank()),
                ranks,
                backend,
                c10d._get_default_store(),
                c10d._process_group_name(mine, use_hashed_name=True),
                backend_options=arguments.get("pg_options"),
                timeout=arguments.get("timeout") or c10d._get_default_timeout(backend),
                device_id=default.bound_device_id,
                group_desc=arguments.get("group_desc") or f"{parent.group_desc}:split",
            )
            c10d._world.pg_group_ranks[pg] = {r: i for i, r in enumerate(ranks)}
            return pg

        return split_group

    @property
    def _store(self) -> dist.Store:
        return self._real.store if self._all_real else self._virtual_store

    def _rendezvous(
        self, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        yield self._store, self.spec.rank, self.spec.world_size


def install_collectives(spec: SliceSpec, context: Any = None, *, recorder: Any = None) -> Collectives:
    """Make ``torch.distributed`` a virtual world in which this process is one rank.

    Args:
        spec: which rank of which world.
        context: the slice's context; told the assumptions when the journal is saved.
        recorder: receives the calls; the process's recorder if not given.
    """
    if recorder is None:
        from prism_plugins.capture.recorder import get_recorder

        recorder = get_recorder()
    collectives = Collectives(spec, recorder, context)
    collectives.apply()
    return collectives


def _constant(value: Any) -> Any:
    return value


_MISSING = object()
_active: list[Collectives] = []


def _create_group(options: Any, backend_options: Any) -> VirtualProcessGroup:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return _active[-1].create_group(ranks=ranks, rank=options.group_rank, name=options.group_id)


@functools.lru_cache
def _backend_config(backend: str) -> Any:
    return c10d.BackendConfig(dist.Backend(backend))


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


def _wrap_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d._get_default_group()
        if not isinstance(group, VirtualProcessGroup) or not group.supports_coalescing:
            return original(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        group._start_coalescing(device)
        try:
            for op in p2p_op_list:
                call = group.send if op.op is dist.isend else group.recv
                call([op.tensor], op.group_peer, op.tag)
        finally:
            work = group._end_coalescing(device)
        return [work]

    return batch_isend_irecv
