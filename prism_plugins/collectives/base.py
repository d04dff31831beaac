"""What every call of a process group of ours needs: identity, the record of a call, work ids."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prism_plugins.collectives.call_site import call_site
from prism_plugins.collectives.peers import MirrorPeers
from prism_plugins.collectives.values import DTYPE_NAMES
from prism_plugins.collectives.work import CompletedWork, VirtualWork
from prism_plugins.program.model import CommSignature, GroupInfo

COMPLETED = CompletedWork()
_NO_COALESCING = ("gloo", "mpi", "ucc")


class RecordingGroup(dist.ProcessGroup):
    """A process group that records calls; the kinds are added by subclasses.

    Args:
        recorder: see :class:`~prism_plugins.capture.recorder.Recorder`.
        peers: moves the values.
        ranks: global ranks in group-rank order.
        rank: own group rank.
        name: torch's group name.
        desc: torch's group description.
        device_backends: device type → backend name, as torch would have registered them.
        options: what the script passed as ``pg_options``.
    """

    def __init__(
        self,
        *,
        recorder: Any,
        peers: Any,
        ranks: tuple[int, ...],
        rank: int,
        name: str,
        desc: str,
        device_backends: dict[str, str],
        options: Any = None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._recorder = recorder
        self._peers: MirrorPeers = peers
        self._rank = rank
        self._size = len(ranks)
        self._ranks = ranks
        self._name = name
        self._desc = desc
        self._device_backends = device_backends
        self._options = options
        self._bound_device: torch.device | None = None
        self._sequence = 0
        self._coalescing: int | None = None
        self._coalesced: list[Tensor] = []
        self._finish: list[Any] = []
        self._groups: dict[str, int] = {}
        self._signatures: dict[tuple, CommSignature] = {}

    # Identity

    def rank(self) -> int:
        """Own group rank."""
        return self._rank

    def size(self) -> int:
        """Group size."""
        return self._size

    def name(self) -> str:
        """Backend name, as the script asked for it."""
        return self._default_backend()

    _get_backend_name = name

    def getBackendName(self) -> str:
        """For C++ callers, who take the name of a built-in backend for its class."""
        return "prism"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in group-rank order."""
        return self._ranks

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """torch's description of the group."""
        return self._desc

    def getGroupName(self) -> str:
        """For C++ callers."""
        return self._name

    def getGroupDesc(self) -> str:
        """For C++ callers."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device given to ``init_process_group``."""
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device

    @property
    def options(self) -> Any:
        """What the script passed as ``pg_options``."""
        return self._options

    # A group is its own backend: `_get_backend(device)` gives it for every device it serves.

    def _get_backend(self, device: torch.device | str) -> RecordingGroup:
        self._check_device(torch.device(device).type)
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for d in self._device_backends]

    def coalesces(self, device_type: str) -> bool:
        """Whether a point-to-point batch of tensors of this device type runs as one, as NCCL's does."""
        return self._device_backends.get(device_type) not in _NO_COALESCING

    @property
    def supports_coalescing(self) -> bool:
        """Whether the backend of the accelerator (of the CPU, if there is none) groups calls."""
        return self._default_backend() not in _NO_COALESCING

    supports_splitting = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """No registered memory pools."""
        return False

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def _enable_collectives_timing(self) -> None:
        pass

    def _set_default_backend(self, backend: Any) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        """Virtual peers are never late; real ones have their own limit."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Nothing to connect."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing to split."""

    def comm_split_count(self) -> int:
        """Number of communicators split off."""
        return 0

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """No registered memory pools."""

    def deregister_mem_pool(self, pool: Any) -> None:
        """No registered memory pools."""

    def shutdown(self) -> None:
        """Close."""

    abort = shutdown

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    setSequenceNumberForGroup = _set_sequence_number_for_group

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    getSequenceNumberForGroup = _get_sequence_number_for_group

    # Recording

    def _begin(self, opts: Any) -> tuple[int, bool]:
        """A work id, and whether the call is asynchronous (plain calls of the method are)."""
        self._sequence += 1
        if self._coalescing is not None:
            return self._coalescing, True
        return self._recorder.new_work(), getattr(opts, "asyncOp", True)

    def _end(
        self, work: int, is_async: bool, writes: Sequence[Tensor], reads: Sequence[Tensor] = ()
    ) -> dist.Work:
        if self._coalescing is not None:
            self._coalesced += [*writes, *reads]
            return COMPLETED
        if is_async:
            return VirtualWork(self._recorder, work=work, tensors=writes, reads=reads)
        return COMPLETED

    def _record(
        self,
        kind: str,
        device_type: str,
        dtype: torch.dtype | None,
        in_numel: int,
        out_numel: int,
        work: int,
        is_async: bool,
        *,
        peer: int = -1,
        op: str = "",
        send: tuple[int, ...] = (),
        recv: tuple[int, ...] = (),
    ) -> None:
        site = call_site()
        key = (kind, device_type, dtype, in_numel, out_numel, peer, op, send, recv, site)
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = CommSignature(
                kind=kind,
                group=self._group(device_type),
                dtype=DTYPE_NAMES[dtype] if dtype is not None else "",
                in_numel=in_numel,
                out_numel=out_numel,
                peer=peer,
                reduce_op=op,
                send_splits=send,
                recv_splits=recv,
                site=site,
            )
        self._recorder.comm(signature, work=work, is_async=is_async)

    def _group(self, device_type: str) -> int:
        """Index of this group, as seen by tensors of a device type (``cpu:gloo,cuda:nccl`` is two)."""
        self._check_device(device_type)
        index = self._groups.get(device_type)
        if index is None:
            backend = self._device_backends[device_type]
            info = GroupInfo(ranks=self._ranks, name=self._name, desc=self._desc, backend=backend)
            index = self._groups[device_type] = self._recorder.group(info)
        return index

    def _default_backend(self) -> str:
        return self._device_backends.get("cuda") or next(iter(self._device_backends.values()))

    def _object_device(self) -> str:
        """Device type torch uses for object collectives and barriers."""
        return "cpu" if "cpu" in self._device_backends else next(iter(self._device_backends))

    # What NCCL and gloo check

    def _check_device(self, device_type: str) -> None:
        if device_type not in self._device_backends:
            raise RuntimeError(f"No backend type associated with device type {device_type}")

    def _check_length(self, tensors: Sequence[Tensor], what: str) -> None:
        if len(tensors) != self._size:
            raise ValueError(
                f"{what} tensor list has {len(tensors)} entries for a group of {self._size} ranks "
                f"({self._desc or self._name})"
            )
