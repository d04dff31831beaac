"""Control payloads that one rank decides and others obey, kept from slice to slice.

Mirror semantics (peers hold what we hold) are wrong for a flag, a size or an object that one rank broadcasts,
scatters or sends: the receiver has nothing to mirror. The slice that runs as the source writes such payloads to
its journal; later slices, which run as other ranks, read them there.

What is journalled: objects of plain data, and tensors of at most :data:`MAX_TENSOR_BYTES` (of 32- and 64-bit
integers: :data:`MAX_INTEGER_BYTES`) whose values are real; of point-to-point tensors only integers and booleans (headers; activations are not control data). The whole journal
is limited to :data:`MAX_JOURNAL_BYTES`; what does not fit is counted.

A key must not name ranks, because the journal of rank 0 also serves rank 9, whose tensor-parallel source is
rank 8. A group is therefore known by its shape (size and stride pattern of its ranks) and its ordinal among
this rank's groups of that shape, a payload by the root's group rank, the sequence number of the call in the
group and its slot in the call. Transfers between pipeline stages are named by the stages instead of group ranks as
soon as the layout is known: in a group that spans data-parallel replicas, group ranks tell nothing.

The file is JSON. Objects are in it as plain data (:mod:`.plain`), never as pickles; what has no plain form is counted.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from prism_plugins.errors import FileFormatError
from prism_plugins.program.slices import SliceSpec
from prism_plugins.rundir import write_bytes
from prism_plugins.world.layout import Layout

SCHEMA = 2
MAX_TENSOR_BYTES = 4096
MAX_INTEGER_BYTES = 64 << 10
"""The largest tensors that have values on the virtual device: lists of integers that ranks compare are control data."""
MAX_OBJECT_BYTES = 1 << 20
MAX_JOURNAL_BYTES = 64 << 20


class JournalStats(msgspec.Struct):
    """What the journal did in this slice, in payloads."""

    recorded: int = 0
    hits: int = 0
    """Payloads of virtual ranks found under their exact key."""
    nearest: int = 0
    """Payloads taken from another call of the same group and geometry, because the journals know no better."""
    mirrored: int = 0
    """Payloads taken as equal to what this rank sent the virtual rank before."""
    alike: int = 0
    """Payloads taken from the same call between other ranks, because no journal is of the sender's slice."""
    misses: int = 0
    """Payloads of virtual ranks that no journal holds; mirror semantics answered."""
    dropped: int = 0
    """Payloads not recorded because of the size limits, and objects that are not plain data."""


class _File(msgspec.Struct):
    schema: int
    rank: int
    payloads: list[str]
    entries: dict[str, list[list[int]]]
    """Channel → [[sequence number, slot, index into payloads], …]."""


def group_shape(ranks: Sequence[int]) -> str:
    """Size and stride pattern of a group, equal for groups that are shifts of each other: ``8x1``, ``4x16``."""
    if len(ranks) == 1:
        return "1"
    steps = [b - a for a, b in itertools.pairwise(ranks)]
    if len(set(steps)) == 1:
        return f"{len(ranks)}x{steps[0]}"
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][0] == step:
            runs[-1][1] += 1
        else:
            runs.append([step, 1])
    period = next(p for p in range(1, len(runs) + 1) if all(runs[i] == runs[i % p] for i in range(len(runs))))
    pattern = ",".join(f"{step}*{count}" for step, count in runs[:period])
    return f"{len(ranks)}x({pattern})"


class StandIns(NamedTuple):
    """What answers a receive whose channel no journal holds."""

    sent: str
    """Our own channel to the sender: the header of a gradient looks like that of the activation we sent."""
    like: list[str]
    """Prefixes of other channels, first those most like it: a header from stage 2 to 3 looks like the one from
    stage 1 to 2. Of the journals the last one, which is of the nearest stage, comes first."""


class Journal:
    """Payloads of this slice, and those of the slices that ran before.

    Args:
        spec: ``journals`` are read in order (the first that holds a key wins).

    Raises:
        FileFormatError: a journal file is truncated, foreign, or of a newer schema.
    """

    def __init__(self, spec: SliceSpec) -> None:
        self.rank = spec.rank
        self.stats = JournalStats()
        self.layout: Layout | None = None
        """Of the target world, once it is known."""
        self.reads_gpu: Callable[[], bool] = lambda: True
        """Whether payloads may be read back from a real GPU now."""
        self._payload_index: dict[bytes, int] = {}
        self._entries: dict[str, list[list[int]]] = {}
        self._bytes = 0
        self._earlier = [_Earlier(path) for path in spec.journals]

    def record(self, channel: str, *, sequence: int, slot: int, payload: bytes) -> None:
        """Keep a payload this rank sends. Larger ones than the limits are counted and dropped."""
        index = self._payload_index.get(payload)
        if index is None:
            if self._bytes + len(payload) > MAX_JOURNAL_BYTES:
                self.stats.dropped += 1
                return
            self._bytes += len(payload)
            index = self._payload_index[payload] = len(self._payload_index)
        self._entries.setdefault(channel, []).append([sequence, slot, index])
        self.stats.recorded += 1

    def look_up(
        self,
        channel: str,
        *,
        sequence: int,
        slot: int,
        num_bytes: int | None = None,
        standins: StandIns | None = None,
    ) -> bytes | None:
        """A payload that a virtual rank sends us, or None.

        Args:
            channel: group, kind and root, see :func:`channel`.
            sequence: number of the call on that channel's group.
            slot: position within the call.
            num_bytes: required size. With it, a call that no journal holds is answered by the nearest earlier
                one of the same channel and size (the source's slice may have run fewer iterations).
            standins: what may answer (with ``num_bytes``) if no journal knows the channel.
        """
        payload = self._exact(channel, sequence, slot, num_bytes)
        if payload is None and any([earlier.refresh() for earlier in self._earlier]):
            payload = self._exact(channel, sequence, slot, num_bytes)
        if payload is not None:
            self.stats.hits += 1
            return payload
        if num_bytes is not None:
            for earlier in self._earlier:
                payload = earlier.nearest(channel, sequence, slot, num_bytes)
                if payload is not None:
                    self.stats.nearest += 1
                    return payload
        if num_bytes is not None and standins is not None:
            payload = self._sent(standins.sent, num_bytes)
            if payload is not None:
                self.stats.mirrored += 1
                return payload
            for prefix, earlier in itertools.product(standins.like, reversed(self._earlier)):
                payload = earlier.similar(prefix, sequence, slot, num_bytes)
                if payload is not None:
                    self.stats.alike += 1
                    return payload
        self.stats.misses += 1
        return None

    def _sent(self, channel: str, num_bytes: int) -> bytes | None:
        """The last payload of this size that this rank sent on a channel."""
        payloads = list(self._payload_index)
        for _, _, index in reversed(self._entries.get(channel, ())):
            if len(payloads[index]) == num_bytes:
                return payloads[index]
        return None

    def _exact(self, channel: str, sequence: int, slot: int, num_bytes: int | None) -> bytes | None:
        for earlier in self._earlier:
            payload = earlier.exact(channel, sequence, slot)
            if payload is not None and (num_bytes is None or len(payload) == num_bytes):
                return payload
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the payloads of this slice, atomically. Raises PrismError when it cannot be written (full disk)."""
        payloads = [base64.b64encode(p).decode() for p in self._payload_index]
        journal = {"schema": SCHEMA, "rank": self.rank, "payloads": payloads, "entries": self._entries}
        write_bytes(Path(path), json.dumps(journal).encode())


def channel(kind: str, *, shape: str, ordinal: int, root: int, peer: int = -1, tag: int = 0) -> str:
    """Name a stream of payloads without naming ranks.

    Args:
        kind: ``broadcast.torch.int64``, ``scatter.torch.float32``, ``broadcast_object``, …
        shape: :func:`group_shape` of the group.
        ordinal: of the group among this rank's groups of that shape.
        root: group rank that sends.
        peer: group rank that receives, for point-to-point and scatter.
        tag: of point-to-point calls.
    """
    return f"{kind}/{shape}/{ordinal}/{root}/{peer}/{tag}"


class _Earlier:
    """The journal of a slice that ran before, or that is some iterations ahead and saves it after each."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read()

    def refresh(self) -> bool:
        """Read the file again if it was replaced; whether it was."""
        try:
            changed = _version(self._path) != self._version
        except OSError:
            return False
        if changed:
            self._read()
        return changed

    def _read(self) -> None:
        path = self._path
        try:
            self._version = _version(path)
            raw = Path(path).read_bytes()
        except OSError as error:
            raise FileFormatError(f"journal {path} cannot be read: {error.strerror}") from error
        try:
            schema = json.loads(raw).get("schema")
            if isinstance(schema, int) and schema != SCHEMA:
                raise FileFormatError(
                    f"journal {path} has schema {schema}, this version reads {SCHEMA}: "
                    "upgrade prism_plugins or run again with --prism-no-cache"
                )
            file = msgspec.json.decode(raw, type=_File)
            self._payloads = [base64.b64decode(p, validate=True) for p in file.payloads]
        except (ValueError, AttributeError, msgspec.MsgspecError) as error:
            raise FileFormatError(f"journal {path} is truncated or not a prism journal: {error}") from error
        self._calls: dict[tuple[str, int], dict[int, int]] = {}
        for name, entries in file.entries.items():
            for entry in entries:
                if len(entry) != 3 or not 0 <= entry[2] < len(self._payloads):
                    raise FileFormatError(f"journal {path} is damaged: bad entry {entry} of {name}")
                sequence, slot, index = entry
                self._calls.setdefault((name, slot), {})[sequence] = index
        self._order = {key: sorted(calls) for key, calls in self._calls.items()}

    def exact(self, name: str, sequence: int, slot: int) -> bytes | None:
        index = self._calls.get((name, slot), {}).get(sequence)
        return None if index is None else self._payloads[index]

    def nearest(self, name: str, sequence: int, slot: int, num_bytes: int) -> bytes | None:
        calls, order = self._calls.get((name, slot)), self._order.get((name, slot), [])
        position = bisect.bisect_right(order, sequence)
        for candidate in [*reversed(order[:position]), *order[position:]]:
            payload = self._payloads[calls[candidate]]
            if len(payload) == num_bytes:
                return payload
        return None

    def similar(self, prefix: str, sequence: int, slot: int, num_bytes: int) -> bytes | None:
        for name, its_slot in self._calls:
            if its_slot == slot and name.startswith(prefix):
                payload = self.nearest(name, sequence, slot, num_bytes)
                if payload is not None:
                    return payload
        return None


def _version(path: str) -> tuple[int, ...]:
    """What changes when a file is replaced, also within one tick of the file system's clock."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size
