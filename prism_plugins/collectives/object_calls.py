"""Object collectives of a process group: values travel as pickles, calls are recorded as torch makes them.

torch's object collectives send an int64 size and a byte tensor; an object of a 100 KiB pickle broadcast to 8
ranks is two broadcasts. The same calls are recorded here, without tensors (see ``objects.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prism_plugins.collectives.base import RecordingGroup


class ObjectCalls(RecordingGroup):
    """Adds the object collectives. Payloads are pickles; None stands for what nobody told us."""

    def all_gather_objects(self, payload: bytes) -> list[bytes]:
        """Pickles of all members."""
        gathered = self._peers.all_gather_objects(payload)
        largest = max(map(len, gathered))
        self._record_object("all_gather", torch.int64, 1, self._size)
        self._record_object("all_gather", torch.uint8, largest, largest * self._size)
        return gathered

    def gather_objects(self, payload: bytes, root: int) -> list[bytes]:
        """Pickles of all members, on the root; elsewhere the result has no meaning."""
        gathered = self._peers.all_gather_objects(payload)
        largest = max(map(len, gathered))
        out_numel = largest * self._size if root == self._rank else 0
        self._record_object("all_gather", torch.int64, 1, self._size)
        self._record_object("gather", torch.uint8, largest, out_numel, peer=root)
        return gathered

    def broadcast_objects(
        self, payloads: Sequence[bytes], root: int, device_type: str | None = None
    ) -> list[bytes | None]:
        """The root's pickles. Others pass their own, whose sizes stand in for what no journal holds."""
        received = self._peers.broadcast_objects(payloads, root, sequence=self._sequence)
        total = _total(received, payloads)
        self._record_object("broadcast", torch.int64, len(payloads), len(payloads), root, device_type)
        self._record_object("broadcast", torch.uint8, total, total, root, device_type)
        return received

    def scatter_objects(self, payloads: Sequence[bytes], root: int) -> bytes | None:
        """Own pickle of the root's list. Others pass nothing."""
        is_root = root == self._rank
        received, largest = self._peers.scatter_objects(payloads, root, sequence=self._sequence)
        members = self._size if is_root else 0
        self._record_object("broadcast", torch.int64, 1, 1, peer=root)
        self._record_object("scatter", torch.uint8, largest * members, largest, peer=root)
        self._record_object("scatter", torch.int64, members, 1, peer=root)
        return received

    def send_objects(self, payloads: Sequence[bytes], peer: int, device_type: str | None = None) -> None:
        """Send pickles to a group rank."""
        self._peers.send_objects(payloads, peer)
        total = _total(payloads, payloads)
        self._record_object("send", torch.int64, len(payloads), 0, peer, device_type)
        self._record_object("send", torch.uint8, total, 0, peer, device_type)

    def recv_objects(
        self, payloads: Sequence[bytes], peer: int, device_type: str | None = None
    ) -> list[bytes | None]:
        """Pickles from a group rank. Own pickles stand in for sizes nobody told us."""
        received = self._peers.recv_objects(len(payloads), peer)
        total = _total(received, payloads)
        self._record_object("recv", torch.int64, 0, len(payloads), peer, device_type)
        self._record_object("recv", torch.uint8, 0, total, peer, device_type)
        return received

    def any_source(self) -> int:
        """Group rank that a recv from anyone is taken to come from."""
        return self._peers.any_source()

    def _record_object(
        self,
        kind: str,
        dtype: torch.dtype,
        in_numel: int,
        out_numel: int,
        peer: int = -1,
        device_type: str | None = None,
    ) -> None:
        if kind not in ("send", "recv"):
            self._sequence += 1
        work = self._recorder.new_work()
        device_type = device_type or self._object_device()
        self._record(kind, device_type, dtype, in_numel, out_numel, work, False, peer=peer)


def _total(payloads: Sequence[bytes | None], fallback: Sequence[bytes]) -> int:
    return sum(len(p if p is not None else f) for p, f in zip(payloads, fallback, strict=True))
