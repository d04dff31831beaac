"""The process group every backend name resolves to: records each call, then answers it.

A Python subclass of ``torch.distributed.ProcessGroup``; c10d's functions call its methods directly, C++ code
(functional collectives, DDP) through torch's trampoline class. Both sets of method names are there: torch 2.13
renamed ``_allgather_base`` to ``all_gather_single`` and so on, and looks for the old names too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prism_plugins.collectives.base import COMPLETED
from prism_plugins.collectives.object_calls import ObjectCalls
from prism_plugins.collectives.work import CompletedWork, VirtualWork

_SUM = dist.ReduceOp.SUM
_barrier_tensor: Tensor | None = None
_KEPT_BEFORE = (2, 13)
"""``ProcessGroup::barrier`` has its tensor in a ``static`` in torch 2.11, as a local in 2.13 (``ProcessGroup.hpp``)."""
_OP_NAMES = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class VirtualProcessGroup(ObjectCalls):
    """A process group whose peers are virtual, or real processes that run now."""

    # Coalescing (ncclGroupStart/End): calls in between share one work id

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalescing = self._recorder.new_work()

    def _end_coalescing(self, device: Any = None) -> CompletedWork:
        work, self._coalescing = self._coalescing, None
        reads, self._coalesced = self._coalesced, []
        finish, self._finish = self._finish, []
        return VirtualWork(
            self._recorder,
            work=work,
            reads=reads,
            finish=(lambda: _finish_all(finish)) if finish else None,
        )

    startCoalescing = _group_start = _start_coalescing
    endCoalescing = _group_end = _end_coalescing

    # Collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """all_reduce in place."""
        return self.allreduce_coalesced(tensors if isinstance(tensors, list) else [tensors], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """all_reduce of several tensors as one."""
        op, factor = _reduce_op(opts)
        work, is_async = self._begin(opts)
        for tensor in tensors:
            count = tensor.numel()
            self._record("all_reduce", tensor.device.type, tensor.dtype, count, count, work, is_async, op=op)
            self._peers.all_reduce(tensor, op, factor)
        return self._end(work, is_async, tensors)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce to the root. ``opts`` may be the root's group rank."""
        root, opts = (opts, op) if isinstance(opts, int) else (opts.rootRank, opts)
        op, factor = _reduce_op(opts)
        tensors = _as_list(tensors)
        work, is_async = self._begin(opts)
        for tensor in tensors:
            count = tensor.numel()
            self._record(
                "reduce",
                tensor.device.type,
                tensor.dtype,
                count,
                count if root == self._rank else 0,
                work,
                is_async,
                peer=root,
                op=op,
            )
            self._peers.reduce(tensor, op, root, factor)
        return self._end(work, is_async, tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Broadcast from the root. ``opts`` may be the root's group rank."""
        root = opts if isinstance(opts, int) else opts.rootRank
        tensors = _as_list(tensors)
        work, is_async = self._begin(opts)
        for slot, tensor in enumerate(tensors):
            count = tensor.numel()
            self._record(
                "broadcast", tensor.device.type, tensor.dtype, count, count, work, is_async, peer=root
            )
            self._peers.broadcast(tensor, root, sequence=self._sequence, slot=slot)
        return self._end(work, is_async, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """all_gather into lists: ``outputs[i]`` has a tensor a member for ``inputs[i]``."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work, is_async = self._begin(opts)
        for gathered, shard in zip(outputs, inputs, strict=True):
            self._check_length(gathered, "output")
            out_numel = sum(t.numel() for t in gathered)
            self._record(
                "all_gather", shard.device.type, shard.dtype, shard.numel(), out_numel, work, is_async
            )
            self._peers.all_gather_list(gathered, shard)
        return self._end(work, is_async, [t for gathered in outputs for t in gathered], inputs)

    def allgather_coalesced(self, output_lists: Any, inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """all_gather of several tensors: ``output_lists[member][i]`` receives ``inputs[i]`` of a member."""
        return self.allgather([list(column) for column in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: Tensor, shard: Tensor, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """all_gather into one tensor."""
        return self.all_gather_single_coalesced([output], [shard], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], shards: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several all_gathers into one tensor each, as one."""
        work, is_async = self._begin(opts)
        for output, shard in zip(outputs, shards, strict=True):
            _check_same_dtype(output, shard)
            if output.numel() != shard.numel() * self._size:
                raise ValueError("output tensor size must be equal to world_size times input tensor size")
            self._record(
                "all_gather", shard.device.type, shard.dtype, shard.numel(), output.numel(), work, is_async
            )
            self._peers.all_gather(output, shard)
        return self._end(work, is_async, outputs, shards)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather to the root. ``opts`` may be the root's group rank."""
        root = opts if isinstance(opts, int) else opts.rootRank
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work, is_async = self._begin(opts)
        for i, shard in enumerate(inputs):
            gathered = outputs[i] if root == self._rank else []
            out_numel = sum(t.numel() for t in gathered)
            self._record(
                "gather", shard.device.type, shard.dtype, shard.numel(), out_numel, work, is_async, peer=root
            )
            self._peers.gather(gathered, shard, root)
        return self._end(work, is_async, [t for gathered in outputs or () for t in gathered], inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Scatter from the root. ``opts`` may be the root's group rank."""
        root = opts if isinstance(opts, int) else opts.rootRank
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work, is_async = self._begin(opts)
        for i, output in enumerate(outputs):
            parts = inputs[i] if root == self._rank else []
            in_numel = sum(t.numel() for t in parts)
            self._record(
                "scatter",
                output.device.type,
                output.dtype,
                in_numel,
                output.numel(),
                work,
                is_async,
                peer=root,
            )
            self._peers.scatter(output, parts, root, sequence=self._sequence)
        return self._end(work, is_async, outputs, [t for parts in inputs or () for t in parts])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """reduce_scatter of lists: ``inputs[i]`` has a tensor a member."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        op, factor = _reduce_op(opts)
        work, is_async = self._begin(opts)
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_length(parts, "input")
            in_numel = sum(t.numel() for t in parts)
            self._record(
                "reduce_scatter",
                output.device.type,
                output.dtype,
                in_numel,
                output.numel(),
                work,
                is_async,
                op=op,
            )
            self._peers.reduce_scatter_list(output, parts, op, factor)
        return self._end(work, is_async, outputs, [t for parts in inputs for t in parts])

    def reduce_scatter_single(
        self, output: Tensor, full: Tensor, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """reduce_scatter of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [full], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several reduce_scatters of one tensor each, as one."""
        op, factor = _reduce_op(opts)
        work, is_async = self._begin(opts)
        for output, full in zip(outputs, inputs, strict=True):
            _check_same_dtype(output, full)
            if full.numel() != output.numel() * self._size:
                raise ValueError("input tensor must be the same size as output size times world size")
            self._record(
                "reduce_scatter",
                output.device.type,
                output.dtype,
                full.numel(),
                output.numel(),
                work,
                is_async,
                op=op,
            )
            self._peers.reduce_scatter(output, full, op, factor)
        return self._end(work, is_async, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        """all_to_all along dimension 0, in even or given splits."""
        _check_same_dtype(output, source)
        recv_rows = self._split_rows(output, output_split_sizes)
        send_rows = self._split_rows(source, input_split_sizes)
        work, is_async = self._begin(opts)
        self._record(
            "all_to_all",
            source.device.type,
            source.dtype,
            source.numel(),
            output.numel(),
            work,
            is_async,
            send=_uneven(send_rows, _row_numel(source)),
            recv=_uneven(recv_rows, _row_numel(output)),
        )
        self._peers.all_to_all(output, source, recv_rows, send_rows)
        return self._end(work, is_async, [output], [source])

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """all_to_all of lists."""
        self._check_length(outputs, "output")
        self._check_length(inputs, "input")
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]
        work, is_async = self._begin(opts)
        self._record(
            "all_to_all",
            inputs[0].device.type,
            inputs[0].dtype,
            sum(send),
            sum(recv),
            work,
            is_async,
            send=_uneven(send, 1),
            recv=_uneven(recv, 1),
        )
        self._peers.all_to_all_list(outputs, inputs)
        return self._end(work, is_async, outputs, inputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Barrier."""
        work, is_async = self._begin(opts)
        device = getattr(opts, "device", None)
        device_type = device.type if device is not None else self._object_device()
        if device_type not in self._device_backends:
            device_type = self._object_device()
        keep_barrier_tensor(device_type)
        self._record("barrier", device_type, None, 0, 0, work, is_async)
        self._peers.barrier()
        return self._end(work, is_async, ())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Barrier on the host."""
        work, _ = self._begin(None)
        self._record("barrier", self._object_device(), None, 0, 0, work, False)
        self._peers.barrier()

    monitoredBarrier = monitored_barrier

    # Point to point: always asynchronous, c10d's send and recv wait at once

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send to a group rank."""
        return self._p2p("send", tensors[0], dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive from a group rank."""
        return self._p2p("recv", tensors[0], src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive from whoever sends."""
        return self._p2p("recv", tensors[0], -1, tag)

    recvAnysource = recv_anysource

    def _p2p(self, kind: str, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = self._recorder.new_work() if self._coalescing is None else self._coalescing
        count = tensor.numel()
        self._recorder.message(tensor)
        if kind == "send":
            self._record(kind, tensor.device.type, tensor.dtype, count, 0, work, True, peer=peer)
            finish = self._peers.send(tensor, peer, tag)
        else:
            self._record(kind, tensor.device.type, tensor.dtype, 0, count, work, True, peer=peer)
            finish = self._peers.recv(tensor, peer, tag)
        source = peer if peer >= 0 else self._peers.any_source()
        if self._coalescing is None:
            return VirtualWork(self._recorder, work=work, tensors=[tensor], source=source, finish=finish)
        self._coalesced.append(tensor)
        if finish is not None:
            self._finish.append(finish)
        return COMPLETED

    # torch < 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _split_rows(self, tensor: Tensor, splits: Sequence[int] | None) -> Sequence[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if splits is None or len(splits) == 0:  # may be a numpy array
            if rows % self._size:
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            return (rows // self._size,) * self._size
        if len(splits) != self._size:
            raise ValueError("Number of tensor splits not equal to group size")
        if sum(splits) != rows:
            raise ValueError("Split sizes doesn't match total dim 0 size")
        return tuple(int(n) for n in splits)


def _reduce_op(opts: Any) -> tuple[str, float | Tensor | None]:
    op = _SUM if opts is None else getattr(opts, "reduceOp", opts)
    factor = None
    if type(op) is not dist.ReduceOp.RedOpType:
        op, factor = op.__getstate__()
    return _OP_NAMES[op.value], factor


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _row_numel(tensor: Tensor) -> int:
    return tensor.shape[1:].numel()


def _uneven(rows: Sequence[int], row_numel: int) -> tuple[int, ...]:
    """Splits in elements; empty when even."""
    return () if len(set(rows)) <= 1 else tuple(r * row_numel for r in rows)


def _check_same_dtype(output: Tensor, source: Tensor) -> None:
    if output.dtype != source.dtype:
        raise ValueError("output tensor must have the same type as input tensor")


def _finish_all(finish: list[Any]) -> None:
    for one in finish:
        one()


def keep_barrier_tensor(device_type: str) -> None:
    """What a barrier leaves allocated: torch makes a tensor of one byte to choose the backend by, and earlier releases keep that of
    the last barrier of any group (512 bytes of the caching allocator)."""
    global _barrier_tensor
    if _torch_release() < _KEPT_BEFORE:
        _barrier_tensor = torch.empty(1, dtype=torch.uint8, device=device_type)


def _torch_release() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
