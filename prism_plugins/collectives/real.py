"""Real peers: processes that run now, reached over gloo.

Groups whose members are all physical ranks really communicate. The values travel over torch's own gloo backend
on CPU memory (virtual-CUDA tensors through their host view), whatever backend the script asked for. Kinds gloo
lacks are made of those it has: everything but reductions moves as bytes, AVG and PREMUL_SUM are scaled sums,
16-bit floats are summed in float32, reduce_scatter is a part of an all_reduce.

Limits:
* Collectives block when they are issued, also asynchronous ones; point-to-point calls do not.
* On the ``virtual`` device only messages up to :data:`SHAPE_ONLY_BYTES` are exchanged (larger tensors have no
  values there), and all_to_all is answered by mirror semantics.
* A partner that does not come raises
  :class:`~prism_plugins.collectives.real_world.CollectiveTimeoutError` after ``PRISM_REAL_TIMEOUT_S`` seconds
  (default 300).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d

from prism_plugins.collectives import values
from prism_plugins.collectives.peers import Factor, Finish, MirrorPeers
from prism_plugins.collectives.real_world import RealWorld, explained

SHAPE_ONLY_BYTES = 64 << 10
_OBJECT_TAG = 0xFFFF
"""Tag of object lists; scripts' tags are taken modulo this."""
_WIDE = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
_OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.SUM,
    "PREMUL_SUM": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}


class RealPeers:
    """Members of a group that all run now. The methods are those of :class:`MirrorPeers`.

    Args:
        world: the real ranks.
        ranks: members of the group.
        name: of the group, equal on all members.
        mirror: answers what cannot be exchanged.
    """

    def __init__(self, world: RealWorld, *, ranks: tuple[int, ...], name: str, mirror: MirrorPeers) -> None:
        self._world = world
        self._ranks = ranks
        self._rank = ranks.index(world.rank)
        self._size = len(ranks)
        self._name = name
        self._mirror = mirror
        self._group: Any = None
        self._tag = (zlib.crc32(name.encode()) & 0x7FFF) << 16
        self._num_calls = 0

    def all_reduce(self, tensor: Tensor, op: str, factor: Factor = None) -> None:
        """Reduce in place."""
        with self._exchange(tensor) as view:
            if view is not None:
                self._reduce(view, op, factor)

    def reduce(self, tensor: Tensor, op: str, root: int, factor: Factor = None) -> None:
        """Reduce in place on the root; other ranks keep their values."""
        with self._exchange(tensor) as view:
            if view is not None:
                reduced = view.clone()
                self._reduce(reduced, op, factor)
                if root == self._rank:
                    view.copy_(reduced)

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """Shards of all members in one tensor."""
        size = shard.numel()
        if size:
            self.all_gather_list(
                [output.view(-1)[i * size : (i + 1) * size] for i in range(self._size)], shard
            )

    def all_gather_list(self, outputs: Sequence[Tensor], shard: Tensor) -> None:
        """Shards of all members. Uneven ones are padded on the wire."""
        largest = max(t.numel() for t in outputs) * shard.element_size()
        if not self._exchanges(largest) or largest == 0:
            return
        own = _padded(_bytes_of(shard), largest)
        pieces = [torch.empty(largest, dtype=torch.uint8) for _ in outputs]
        self._wait("all_gather", lambda: self._gloo.allgather([pieces], [own]))
        for output, piece in zip(outputs, pieces, strict=True):
            _write(output, piece)

    def gather(self, outputs: Sequence[Tensor], shard: Tensor, root: int) -> None:
        """Shards of all members, on the root."""
        num_bytes = shard.numel() * shard.element_size()
        if not self._exchanges(num_bytes) or num_bytes == 0:
            return
        pieces = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(self._size)]
        self._wait("gather", lambda: self._gloo.allgather([pieces], [_bytes_of(shard)]))
        for output, piece in zip(outputs, pieces, strict=root == self._rank):
            _write(output, piece)

    def broadcast(self, tensor: Tensor, root: int, *, sequence: int, slot: int = 0) -> None:
        """Broadcast from the root."""
        if self._exchanges(tensor.numel() * tensor.element_size()) and tensor.numel():
            payload = _bytes_of(tensor)
            self._broadcast(payload, root)
            if root != self._rank:
                _write(tensor, payload)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, *, sequence: int) -> None:
        """Scatter from the root."""
        num_bytes = output.numel() * output.element_size()
        if not self._exchanges(num_bytes) or num_bytes == 0:
            return
        payload = torch.empty(num_bytes * self._size, dtype=torch.uint8)
        if root == self._rank:
            payload = torch.cat([_bytes_of(t) for t in inputs])
        self._broadcast(payload, root)
        _write(output, payload[self._rank * num_bytes : (self._rank + 1) * num_bytes])

    def reduce_scatter(self, output: Tensor, full: Tensor, op: str, factor: Factor = None) -> None:
        """Own chunk of the reduced input."""
        size = output.numel()
        if size:
            parts = full.reshape(-1).split(size)
            self.reduce_scatter_list(output, parts, op, factor)

    def reduce_scatter_list(
        self, output: Tensor, inputs: Sequence[Tensor], op: str, factor: Factor = None
    ) -> None:
        """Own entry of the reduced inputs."""
        if not self._exchanges(output.numel() * output.element_size()):
            return
        full = torch.cat([_values_of(t).reshape(-1) for t in inputs])
        self._reduce(full, op, factor)
        begin = sum(t.numel() for t in inputs[: self._rank])
        view = values.real_view(output)
        if view is not None:
            view.copy_(full[begin : begin + output.numel()].view(output.shape))

    def all_to_all(
        self, output: Tensor, source: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int]
    ) -> None:
        """Exchange rows."""
        if not self._world.exchanges_all:
            self._mirror.all_to_all(output, source, recv_rows, send_rows)
            return
        row = source.shape[1:].numel() * source.element_size()
        received = self._all_to_all(
            _bytes_of(source), [r * row for r in send_rows], [r * row for r in recv_rows]
        )
        _write(output, received)

    def all_to_all_list(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Exchange tensors."""
        if not self._world.exchanges_all:
            self._mirror.all_to_all_list(outputs, inputs)
            return
        sent = [_bytes_of(t) for t in inputs]
        recv_bytes = [t.numel() * t.element_size() for t in outputs]
        received = self._all_to_all(torch.cat(sent), [len(t) for t in sent], recv_bytes)
        for output, piece in zip(outputs, received.split(recv_bytes), strict=True):
            _write(output, piece)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Finish | None:
        """Send; the values are copied now, the partner may take them later."""
        if not self._exchanges(tensor.numel() * tensor.element_size()) or tensor.numel() == 0:
            return None
        payload = _bytes_of(tensor)
        return self._send_bytes(payload, peer, tag % _OBJECT_TAG)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Finish | None:
        """Receive; the values are there once the returned function has run."""
        if not self._exchanges(tensor.numel() * tensor.element_size()) or tensor.numel() == 0:
            return None
        payload = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        tag = self._tag + (tag % _OBJECT_TAG)
        if peer >= 0:
            work = self._world.p2p.recv([payload], self._index(peer), tag)
        else:
            work = self._world.p2p.recv_anysource([payload], tag)

        def finish() -> int:
            self._wait("recv", lambda: work, ranks=(self._ranks[peer],) if peer >= 0 else self._ranks)
            _write(tensor, payload)
            return peer if peer >= 0 else self._ranks.index(self._world.ranks[work._source_rank()])

        return finish

    def any_source(self) -> int:
        """Unknown until the message has come."""
        return -1

    def barrier(self) -> None:
        """Wait for all members."""
        self._wait("barrier", lambda: self._gloo.barrier())

    def all_gather_objects(self, payload: bytes) -> list[bytes]:
        """The pickle of every member."""
        return self._gather_bytes(payload)

    def broadcast_objects(self, payloads: Sequence[bytes], root: int, *, sequence: int) -> list[bytes | None]:
        """Pickles of the root."""
        return _unpack(self._broadcast_bytes(_pack(payloads), root))

    def scatter_objects(
        self, payloads: Sequence[bytes], root: int, *, sequence: int
    ) -> tuple[bytes | None, int]:
        """Own pickle from the root, and the size of the largest one."""
        scattered = _unpack(self._broadcast_bytes(_pack(payloads), root))
        return scattered[self._rank], max(map(len, scattered))

    def send_objects(self, payloads: Sequence[bytes], peer: int) -> None:
        """Send pickles."""
        packed = torch.frombuffer(bytearray(_pack(payloads)), dtype=torch.uint8)
        for message in (torch.tensor([len(packed)]).view(torch.uint8), packed):
            self._send_bytes(message, peer, _OBJECT_TAG)()

    def recv_objects(self, count: int, peer: int) -> list[bytes | None]:
        """Receive pickles."""
        size = torch.empty(1, dtype=torch.int64)
        self._recv_bytes(size.view(torch.uint8), peer)
        packed = torch.empty(int(size), dtype=torch.uint8)
        self._recv_bytes(packed, peer)
        return _unpack(packed.numpy().tobytes())

    def _send_bytes(self, payload: Tensor, peer: int, tag: int) -> Callable[[], None]:
        work = self._world.p2p.send([payload], self._index(peer), self._tag + tag)
        self._world.keep(work, payload)
        return lambda: self._wait("send", lambda: work, ranks=(self._ranks[peer],))

    def _recv_bytes(self, payload: Tensor, peer: int) -> None:
        work = self._world.p2p.recv([payload], self._index(peer), self._tag + _OBJECT_TAG)
        self._wait("recv", lambda: work, ranks=(self._ranks[peer],))

    # Gloo

    @property
    def _gloo(self) -> Any:
        if self._group is None:
            self._group = self._world.make_gloo(f"group/{self._name}", self._ranks)
        return self._group

    def _index(self, peer: int) -> int:
        return self._world.ranks.index(self._ranks[peer])

    def _wait(self, kind: str, start: Callable[[], Any], *, ranks: tuple[int, ...] = ()) -> None:
        self._num_calls += 1
        what = f"{kind} (call {self._num_calls} of group {self._name})"
        with explained(what, ranks or self._ranks, self._world.timeout):
            work = start()
            if work is not None:
                work.wait()

    def _reduce(self, view: Tensor, op: str, factor: Factor) -> None:
        """Reduce CPU values in place."""
        if op not in _OPS:
            raise ValueError(f"unknown reduce op {op}")
        dtype = _WIDE.get(
            view.dtype,
            torch.float32 if view.dtype.is_floating_point and view.element_size() == 1 else view.dtype,
        )
        wide = view.to(dtype).contiguous() if dtype != view.dtype or not view.is_contiguous() else view
        if op == "PREMUL_SUM":
            wide.mul_(factor.item() if isinstance(factor, Tensor) else factor)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]
        if view.dtype == torch.bool and op in ("SUM", "PRODUCT"):
            options.reduceOp = dist.ReduceOp.MAX if op == "SUM" else dist.ReduceOp.MIN
        if wide.numel():
            self._wait("all_reduce", lambda: self._gloo.allreduce([wide.view(-1)], options))
        if op == "AVG":
            wide.div_(self._size)
        if wide is not view:
            view.copy_(wide)

    def _broadcast(self, payload: Tensor, root: int) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._wait("broadcast", lambda: self._gloo.broadcast([payload], options))

    def _all_to_all(self, payload: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Tensor:
        received = torch.empty(sum(recv_bytes), dtype=torch.uint8)
        self._wait("all_to_all", lambda: self._gloo.alltoall_base(received, payload, recv_bytes, send_bytes))
        return received

    def _gather_bytes(self, payload: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self._ranks]
        own = torch.tensor([len(payload)])
        self._wait("all_gather_object", lambda: self._gloo.allgather([sizes], [own]))
        largest = int(max(sizes))
        pieces = [torch.empty(largest, dtype=torch.uint8) for _ in self._ranks]
        data = _padded(torch.frombuffer(bytearray(payload), dtype=torch.uint8), largest)
        self._wait("all_gather_object", lambda: self._gloo.allgather([pieces], [data]))
        return [p.numpy().tobytes()[: int(n)] for p, n in zip(pieces, sizes, strict=True)]

    def _broadcast_bytes(self, payload: bytes, root: int) -> bytes:
        size = torch.tensor([len(payload)])
        self._broadcast(size, root)
        data = torch.empty(int(size), dtype=torch.uint8)
        if root == self._rank:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._broadcast(data, root)
        return data.numpy().tobytes()

    # Values

    def _exchanges(self, num_bytes: int) -> bool:
        return self._world.exchanges_all or num_bytes <= SHAPE_ONLY_BYTES

    @contextmanager
    def _exchange(self, tensor: Tensor) -> Any:
        """The values of a tensor to change in place; None if the message is too large to have any."""
        if not self._exchanges(tensor.numel() * tensor.element_size()) or tensor.numel() == 0:
            yield None
            return
        view = values.real_view(tensor)
        yield view if view is not None else _values_of(tensor)


def _values_of(tensor: Tensor) -> Tensor:
    """The values of a tensor, or plausible ones where there are none."""
    view = values.real_view(tensor)
    if view is None:
        view = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return view


def _bytes_of(tensor: Tensor) -> Tensor:
    """A copy of the values as bytes."""
    return _values_of(tensor).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _write(tensor: Tensor, payload: Tensor) -> None:
    """Write the leading bytes of ``payload`` into a tensor, where it has memory."""
    view = values.real_view(tensor)
    num_bytes = tensor.numel() * tensor.element_size()
    if view is not None and num_bytes:
        view.copy_(payload[:num_bytes].clone().view(view.dtype).view(view.shape))
        values.mark_real(tensor)


def _padded(payload: Tensor, num_bytes: int) -> Tensor:
    if len(payload) == num_bytes:
        return payload
    return torch.cat([payload, payload.new_zeros(num_bytes - len(payload))])


def _pack(payloads: Sequence[bytes]) -> bytes:
    return struct.pack(f"<q{len(payloads)}q", len(payloads), *map(len, payloads)) + b"".join(payloads)


def _unpack(packed: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", packed)
    sizes = struct.unpack_from(f"<{count}q", packed, 8)
    position = 8 + 8 * count
    payloads = []
    for size in sizes:
        payloads.append(packed[position : position + size])
        position += size
    return payloads
