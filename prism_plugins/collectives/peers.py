"""Virtual peers: they answer every call by mirror semantics or from the journal.

:class:`MirrorPeers` and :class:`~prism_plugins.collectives.real.RealPeers` have the same methods; the process
group records a call and then lets one of them move the values. All tensors are the script's own, on any device;
values are touched only where the storage is real. ``finish`` callables returned by :meth:`MirrorPeers.send`
and :meth:`MirrorPeers.recv` are for calls that complete later; virtual peers never need one.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prism_plugins.collectives import mirror, plain, values
from prism_plugins.collectives.journal import (
    MAX_INTEGER_BYTES,
    MAX_OBJECT_BYTES,
    MAX_TENSOR_BYTES,
    Journal,
    StandIns,
    channel,
)
from prism_plugins.errors import FileFormatError

Factor = float | Tensor | None
Finish = Callable[[], int | None]


class MirrorPeers:
    """Peers that hold what we hold.

    Args:
        rank: own group rank.
        ranks: global ranks of the group.
        shape: of the group, see :func:`~prism_plugins.collectives.journal.group_shape`.
        ordinal: of the group among this rank's groups of that shape.
        journal: control payloads.
    """

    def __init__(
        self, *, rank: int, ranks: Sequence[int], shape: str, ordinal: int, journal: Journal
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._size = len(ranks)
        self._shape = shape
        self._ordinal = ordinal
        self._journal = journal
        self._num_p2p: Counter[tuple[str, int, int]] = Counter()

    def all_reduce(self, tensor: Tensor, op: str, factor: Factor = None) -> None:
        """Reduce in place."""
        view = values.real_view(tensor)
        if view is not None:
            mirror.reduce_(view, op, self._size, factor)

    def reduce(self, tensor: Tensor, op: str, root: int, factor: Factor = None) -> None:
        """Reduce in place on the root; other ranks keep their values."""
        if root == self._rank:
            self.all_reduce(tensor, op, factor)

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """``size`` copies of ``shard``."""
        out = values.real_view(output)
        if out is None:
            return
        own = values.real_view(shard)
        if own is None:
            values.fill_plausible(output, out)
        else:
            mirror.all_gather_flat(out, own, self._size)
            values.copy_provenance(output, shard)

    def all_gather_list(self, outputs: Sequence[Tensor], shard: Tensor) -> None:
        """A copy of ``shard`` for each output; uneven outputs are filled by repetition."""
        for output in outputs:
            self._copy(output, shard)

    def gather(self, outputs: Sequence[Tensor], shard: Tensor, root: int) -> None:
        """Like all_gather_list, on the root only."""
        if root == self._rank:
            self.all_gather_list(outputs, shard)

    def broadcast(self, tensor: Tensor, root: int, *, sequence: int, slot: int = 0) -> None:
        """The root journals a control payload; others read it, or keep what they hold. What a later pipeline stage
        computed (the loss) cannot be known."""
        name = self._channel(f"broadcast.{tensor.dtype}", root)
        if root == self._rank:
            self._record(name, tensor, sequence, slot)
        else:
            view = values.real_view(tensor)
            if view is not None and tensor.is_floating_point() and self._is_later_stage(root):
                values.fill_plausible(tensor, view)
            else:
                self._receive(name, tensor, sequence, slot)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, *, sequence: int) -> None:
        """The root journals small payloads for every member; others read theirs, or get finite values."""
        if root != self._rank:
            view = values.real_view(output)
            name = self._channel(f"scatter.{output.dtype}", root, self._rank)
            if view is not None and not self._look_up(name, output, view, sequence, 0):
                values.fill_plausible(output, view)
            return
        for member, tensor in enumerate(inputs):
            if member != self._rank:
                self._record(self._channel(f"scatter.{output.dtype}", root, member), tensor, sequence, 0)
        self._copy(output, inputs[self._rank])

    def reduce_scatter(self, output: Tensor, full: Tensor, op: str, factor: Factor = None) -> None:
        """Own chunk of ``full``, reduced."""
        out = values.real_view(output)
        if out is None:
            return
        whole = values.real_view(full)
        if whole is None:
            values.fill_plausible(output, out)
        else:
            mirror.reduce_scatter_flat(out, whole, op, self._size, self._rank, factor)
            values.copy_provenance(output, full)

    def reduce_scatter_list(
        self, output: Tensor, inputs: Sequence[Tensor], op: str, factor: Factor = None
    ) -> None:
        """Own entry of ``inputs``, reduced."""
        self._copy(output, inputs[self._rank])
        self.all_reduce(output, op, factor)

    def all_to_all(
        self, output: Tensor, source: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int]
    ) -> None:
        """Peers send us what we send ourselves, in the sizes they were asked for."""
        out = values.real_view(output)
        if out is None or out.numel() == 0:
            return
        src = values.real_view(source)
        if src is None or src.numel() == 0:
            values.fill_plausible(output, out)
        else:
            mirror.all_to_all_flat(out, src, self._rank, recv_rows, send_rows)
            values.copy_provenance(output, source)

    def all_to_all_list(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Peers send us what we send ourselves, in the sizes they were asked for."""
        own = inputs[self._rank]
        if own.numel() == 0:
            own = max(inputs, key=Tensor.numel)
        for output in outputs:
            self._copy(output, own)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Finish | None:
        """Dropped; small integer payloads are journalled."""
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            name = self._p2p_channel(tensor, self._rank, peer, tag)
            self._record(name, tensor, self._next("p2p", peer, tag, sending=True), 0)
        return None

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Finish | None:
        """From the journal, else finite values."""
        view = values.real_view(tensor)
        integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        if integer and peer >= 0:
            sequence = self._next("p2p", peer, tag, sending=False)
            name = self._p2p_channel(tensor, peer, self._rank, tag)
            standins = StandIns(sent=self._p2p_channel(tensor, self._rank, peer, tag), like=self._alike(name))
            if view is not None and self._look_up(name, tensor, view, sequence, 0, standins):
                return None
        if view is not None:
            # A gradient of a mean loss is small: one over the root of its size has a norm of 1.
            gradient = peer >= 0 and self._is_later_stage(peer)
            scale = max(1, tensor.numel()) ** -0.5 if gradient else 1.0
            values.fill_plausible(tensor, view, scale=scale)
        return None

    def any_source(self) -> int:
        """Group rank that a recv from anyone is taken to come from."""
        return 0 if self._rank != 0 else min(1, self._size - 1)

    def barrier(self) -> None:
        """Nobody is late."""

    def all_gather_objects(self, payload: bytes) -> list[bytes]:
        """The pickle of every member."""
        return [payload] * self._size

    def broadcast_objects(self, payloads: Sequence[bytes], root: int, *, sequence: int) -> list[bytes | None]:
        """Pickles of the root; None for what no journal holds."""
        name = self._channel("broadcast_object", root)
        if root == self._rank:
            for slot, payload in enumerate(payloads):
                self._record_object(name, payload, sequence, slot)
            return list(payloads)
        return [self._look_up_object(name, sequence, slot) for slot in range(len(payloads))]

    def scatter_objects(
        self, payloads: Sequence[bytes], root: int, *, sequence: int
    ) -> tuple[bytes | None, int]:
        """Own pickle from the root (None if no journal holds it), and the size of the largest one."""
        if root != self._rank:
            name = self._channel("scatter_object", root, self._rank)
            payload = self._look_up_object(name, sequence, 0)
            return payload, len(payload or b"")
        for member, payload in enumerate(payloads):
            if member != self._rank:
                self._record_object(self._channel("scatter_object", root, member), payload, sequence, 0)
        return payloads[self._rank], max(map(len, payloads))

    def send_objects(self, payloads: Sequence[bytes], peer: int) -> None:
        """Journalled."""
        sequence = self._next("objects", peer, 0, sending=True)
        for slot, payload in enumerate(payloads):
            self._record_object(self._channel("p2p_object", self._rank, peer), payload, sequence, slot)

    def recv_objects(self, count: int, peer: int) -> list[bytes | None]:
        """Pickles of the sender; None for what no journal holds."""
        sequence = self._next("objects", peer, 0, sending=False)
        name = self._channel("p2p_object", peer, self._rank)
        return [self._look_up_object(name, sequence, slot) for slot in range(count)]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        out = values.real_view(target)
        if out is None or out.numel() == 0:
            return
        src = values.real_view(source)
        if src is None or src.numel() == 0:
            values.fill_plausible(target, out)
            return
        if out.data_ptr() != src.data_ptr():
            mirror.fill_from(out, src)
        values.copy_provenance(target, source)

    def _channel(self, kind: str, root: int, peer: int = -1, tag: int = 0) -> str:
        return channel(kind, shape=self._shape, ordinal=self._ordinal, root=root, peer=peer, tag=tag)

    def _p2p_channel(self, tensor: Tensor, sender: int, receiver: int, tag: int) -> str:
        kind, layout = f"p2p.{tensor.dtype}", self._journal.layout
        if layout is not None:
            here, there = (layout.coords(self._ranks[rank]) for rank in (sender, receiver))
            step = there["pp"] - here["pp"]
            if step:
                kind += f".stages{step:+d}.tp{here['tp']}.cp{here['cp']}"
                return self._channel(kind, here["pp"], there["pp"], tag)
        return self._channel(kind, sender, receiver, tag)

    def _alike(self, name: str) -> list[str]:
        """Prefixes of channels like a point-to-point one, the most alike first."""
        kind = name.partition("/")[0]
        like = [f"{kind}/{self._shape}/{self._ordinal}/"]
        plain, _, stages = kind.partition(".stages")
        if stages:
            step, _, position = stages.partition(".")
            back = f"{-int(step):+d}"
            like += [f"{plain}.stages{back}.{position}/", f"{plain}.stages{step}.", f"{plain}.stages{back}."]
        return like

    def _is_later_stage(self, member: int) -> bool:
        layout = self._journal.layout
        if layout is None:
            return False
        own, its = (layout.coords(self._ranks[rank])["pp"] for rank in (self._rank, member))
        return its > own

    def _next(self, kind: str, peer: int, tag: int, *, sending: bool) -> int:
        key = (kind + (">" if sending else "<"), peer, tag)
        self._num_p2p[key] += 1
        return self._num_p2p[key]

    def _record(self, name: str, tensor: Tensor, sequence: int, slot: int) -> None:
        if not _fits_journal(tensor) or (values.on_gpu(tensor) and not self._journal.reads_gpu()):
            return
        view = values.real_view(tensor)
        if view is not None and not values.is_synthesized(tensor):
            self._journal.record(name, sequence=sequence, slot=slot, payload=_to_bytes(view))

    def _record_object(self, name: str, pickled: bytes, sequence: int, slot: int) -> None:
        """Journal an object of this process in its plain form, if it has one."""
        payload = plain.encode(pickle.loads(pickled)) if len(pickled) <= MAX_OBJECT_BYTES else None
        if payload is None:
            self._journal.stats.dropped += 1
        else:
            self._journal.record(name, sequence=sequence, slot=slot, payload=payload)

    def _look_up_object(self, name: str, sequence: int, slot: int) -> bytes | None:
        """The pickle of an object that a virtual rank sends us; None if no journal holds it."""
        payload = self._journal.look_up(name, sequence=sequence, slot=slot)
        if payload is None:
            return None
        try:
            return pickle.dumps(plain.decode(payload))
        except ValueError as error:
            raise FileFormatError(f"the journal's payload {name} is damaged: {error}") from error

    def _receive(self, name: str, tensor: Tensor, sequence: int, slot: int) -> None:
        """A broadcast from a virtual root: the journal's payload, else what we hold (if it is a number)."""
        view = values.real_view(tensor)
        if view is None or self._look_up(name, tensor, view, sequence, slot):
            return
        if values.on_gpu(view):  # its values are real, and asking would wait for the GPU
            return
        if view.dtype.is_floating_point and view.element_size() > 1 and not view.isfinite().all():
            values.fill_plausible(tensor, view)

    def _look_up(
        self,
        name: str,
        tensor: Tensor,
        view: Tensor,
        sequence: int,
        slot: int,
        standins: StandIns | None = None,
    ) -> bool:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes == 0 or not _fits_journal(tensor):
            return False
        payload = self._journal.look_up(
            name, sequence=sequence, slot=slot, num_bytes=num_bytes, standins=standins
        )
        if payload is None:
            return False
        view.copy_(torch.frombuffer(bytearray(payload), dtype=view.dtype).view(view.shape))
        values.mark_real(tensor)
        return True


def _fits_journal(tensor: Tensor) -> bool:
    limit = MAX_INTEGER_BYTES if tensor.dtype in (torch.int32, torch.int64) else MAX_TENSOR_BYTES
    return tensor.numel() * tensor.element_size() <= limit


def _to_bytes(view: Tensor) -> bytes:
    return view.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
