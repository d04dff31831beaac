"""Replace ``torch.distributed``'s backends by the virtual process group."""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from prism_plugins.collectives import functional
from prism_plugins.collectives.bracketed import BracketedPeers
from prism_plugins.collectives.call_site import call_site
from prism_plugins.collectives.group import VirtualProcessGroup
from prism_plugins.collectives.journal import Journal, group_shape
from prism_plugins.collectives.patches import AppliedPatches, patch_table
from prism_plugins.collectives.peers import MirrorPeers
from prism_plugins.collectives.real import RealPeers
from prism_plugins.collectives.real_world import RealWorld
from prism_plugins.collectives.stores import VirtualStore
from prism_plugins.program.slices import SliceSpec

_BACKEND = "prism"


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
        self.all_real = self._real is not None and self._real.covers(range(spec.world_size))
        """Whether every rank of the target world is a process that runs now."""
        self._virtual_store = VirtualStore(rank=spec.rank, world_size=spec.world_size)
        self._ordinals: Counter[str] = Counter()
        self._pending: dict[str, Any] = {}
        self._kernels: torch.library.Library | None = None
        self._patches: AppliedPatches | None = None

    def resize(self, spec: SliceSpec) -> None:
        """Be rank ``spec.rank`` of another world. Only before the script made a group."""
        self.spec = spec
        self._virtual_store = VirtualStore(rank=spec.rank, world_size=spec.world_size)

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
                f"{stats.nearest} small payload(s) of virtual ranks were taken from another call of the "
                "same group, as the journals do not know the call itself"
            )
        if stats.mirrored:
            lines.append(
                f"{stats.mirrored} header(s) of virtual ranks were taken as equal to what this rank had sent them"
            )
        if stats.alike:
            lines.append(
                f"{stats.alike} header(s) of virtual ranks were taken from the same call between other ranks"
            )
        if stats.misses:
            lines.append(
                f"{stats.misses} small payload(s) of virtual ranks were in no journal: "
                "the rank kept its own values"
            )
        if stats.dropped:
            lines.append(
                f"{stats.dropped} payload(s) were too large to journal, or objects that are not plain data"
            )
        if self._virtual_store.num_mirrored:
            lines.append(
                f"{self._virtual_store.num_mirrored} store key(s) of virtual ranks were answered by our own"
            )
        return lines

    def apply(self) -> None:
        """Register the backend and install all patches."""
        if _BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(_BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
        _active.append(self)
        self._kernels = functional.register()
        self._patches = AppliedPatches(patch_table(self))

    def undo(self) -> None:
        """Put everything back."""
        self._patches.undo()
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
        peers: Any = MirrorPeers(rank=rank, ranks=ranks, shape=shape, ordinal=ordinal, journal=self.journal)
        if self.spec.device == "cuda":
            peers = BracketedPeers(peers, self._recorder)
        if self._real is not None and self._real.covers(ranks):
            peers = RealPeers(self._real, ranks=ranks, name=name, mirror=peers)
        return VirtualProcessGroup(
            recorder=self._recorder, peers=peers, ranks=ranks, rank=rank, name=name, **self._pending
        )

    def wrap_helper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``_new_process_group_helper`` that makes our group and keeps the backend's name."""

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
                store = dist.PrefixStore("default_pg", self.store)
            config = _backend_config(str(backend))
            # Groups with hashed names are made by their members alone (use_local_synchronization).
            if global_ranks_in_group and group_name.isdigit():
                self._recorder.group_made(
                    tuple(global_ranks_in_group), group_desc or "undefined", call_site()
                )
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

    def wrap_split_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``split_group`` of our groups; checks what torch checks."""
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
    def store(self) -> dist.Store:
        """What ``init_process_group`` gets as its store, whatever the script gave it."""
        return self._real.store if self.all_real else self._virtual_store

    def rendezvous(
        self, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        """``rendezvous`` for any URL: meets nobody, knows rank and world size."""
        yield self.store, self.spec.rank, self.spec.world_size


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


_active: list[Collectives] = []


def _create_group(options: Any, backend_options: Any) -> VirtualProcessGroup:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return _active[-1].create_group(ranks=ranks, rank=options.group_rank, name=options.group_id)


@functools.lru_cache
def _backend_config(backend: str) -> Any:
    return c10d.BackendConfig(dist.Backend(backend))
