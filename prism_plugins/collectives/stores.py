"""Key-value stores whose other clients are virtual ranks.

A script may wait in a store for peers that no process runs. A virtual peer is taken to do what we do: to have
added what we add, and to have set the keys we set with its own rank in them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NUMBER = re.compile(r"\d+")


class VirtualStore(dist.Store):
    """A store shared with ``world_size - 1`` virtual ranks.

    ``add`` counts for all: with each of our calls every rank adds the same amount, in rank order, so that
    our return value is what the rank would see if all ranks below it had come first; reading (``add(key, 0)``
    or ``get``) sees all of them. ``wait`` returns at once. ``get`` of a key nobody set gives the value of our
    own key of the same form (``addr/3`` → ``addr/<our rank>``), else an empty value.

    Args:
        rank: own rank.
        world_size: ranks that share the store.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._queues: dict[str, list[bytes]] = {}
        self._timeout = timedelta(minutes=5)
        self.num_mirrored = 0
        """Keys asked for that only a virtual rank could have set."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with self._lock:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """The value of a key; never blocks."""
        with self._lock:
            if key in self._counters:
                return str(self._counters[key] * self._world_size).encode()
            value = self._values.get(key)
            if value is None:
                self.num_mirrored += 1
                value = self._mirrored(key)
            return value

    def add(self, key: str, value: int) -> int:
        """Add to a counter, on behalf of all ranks."""
        with self._lock:
            before = self._counters.get(key)
            if before is None:
                before = int(self._values.pop(key, b"0") or b"0")
            self._counters[key] = before + value
            if value == 0:
                return before * self._world_size
            return before * self._world_size + (self._rank % self._world_size + 1) * value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it holds ``expected`` (or does not exist and ``expected`` is empty)."""
        with self._lock:
            current = self._values.get(key)
            wanted = expected.encode() if isinstance(expected, str) else expected
            if (current is None and not wanted) or current == wanted:
                self._values[key] = desired.encode() if isinstance(desired, str) else desired
                return self._values[key]
            return wanted if current is None else current

    def check(self, keys: list[str]) -> bool:
        """Virtual ranks are never late."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Virtual ranks are never late."""

    def delete_key(self, key: str) -> bool:
        """Remove a key; tells whether it existed."""
        with self._lock:
            return (self._values.pop(key, None) is not None) | (self._counters.pop(key, None) is not None)

    def num_keys(self) -> int:
        """Number of keys."""
        return len(self._values) + len(self._counters)

    def list_keys(self) -> list[str]:
        """All keys."""
        return [*self._values, *self._counters]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key."""
        with self._lock:
            self._values[key] = self._values.get(key, b"") + (
                value.encode() if isinstance(value, str) else bytes(value)
            )

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to a queue."""
        with self._lock:
            self._queues.setdefault(key, []).append(value.encode() if isinstance(value, str) else value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the head of a queue; an empty one gives an empty value, as no real rank will push."""
        with self._lock:
            queue = self._queues.get(key)
            return queue.pop(0) if queue else b""

    def queue_len(self, key: str) -> int:
        """Length of a queue."""
        return len(self._queues.get(key, ()))

    def has_extended_api(self) -> bool:
        """Whether append and the multi-key calls exist."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Kept, never used: nothing blocks."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """As set."""
        return self._timeout

    def clone(self) -> VirtualStore:
        """The same store: nothing blocks, so no second connection is needed."""
        return self

    def _mirrored(self, key: str) -> bytes:
        for match in _NUMBER.finditer(key):
            ours = f"{key[: match.start()]}{self._rank}{key[match.end() :]}"
            if ours in self._values:
                return self._values[ours]
        return b""


def make_store_classes(*, rank: int, world_size: int) -> dict[str, type]:
    """Stand-ins for ``TCPStore`` and ``FileStore``, whose constructors would wait for peers.

    Two objects for one address share their keys. ``HashStore`` and ``PrefixStore`` are left alone: the first
    is local to the process by definition, the second wraps whatever it is given.
    """

    default_world_size = world_size

    class TCPStore(VirtualStore):
        """A TCPStore whose other clients are virtual."""

        _shared: dict[tuple[str, int], VirtualStore] = {}  # noqa: RUF012

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = timedelta(minutes=5),
            wait_for_workers: bool = True,
            multi_tenant: bool = False,
            master_listen_fd: int | None = None,
            use_libuv: bool = True,
        ) -> None:
            super().__init__(rank=rank, world_size=world_size or default_world_size)
            self.set_timeout(timeout)
            self.host = host_name
            self.port = port
            self.libuvBackend = use_libuv
            _share(self, self._shared.setdefault((host_name, port), self))

    class FileStore(VirtualStore):
        """A FileStore whose other clients are virtual."""

        _shared: dict[str, VirtualStore] = {}  # noqa: RUF012

        def __init__(self, file_name: str, world_size: int = -1) -> None:
            super().__init__(rank=rank, world_size=world_size if world_size > 0 else default_world_size)
            self.path = file_name
            _share(self, self._shared.setdefault(file_name, self))

    return {"TCPStore": TCPStore, "FileStore": FileStore}


def _share(store: VirtualStore, first: VirtualStore) -> None:
    store._lock, store._values = first._lock, first._values
    store._counters, store._queues = first._counters, first._queues


def make_shared_store_classes(open_store: Callable[[], dist.Store]) -> dict[str, Callable[..., dist.Store]]:
    """Stand-ins for ``TCPStore`` and ``FileStore`` where every rank really runs: one place in the shared store
    for each address.
    """

    def tcp_store(host_name: str, port: int, *args: Any, **kwargs: Any) -> dist.Store:
        return dist.PrefixStore(f"script/tcp/{host_name}:{port}", open_store())

    def file_store(file_name: str, world_size: int = -1) -> dist.Store:
        return dist.PrefixStore(f"script/file/{file_name}", open_store())

    return {"TCPStore": tcp_store, "FileStore": file_store}
