"""Communication overlapped with GEMMs (``--tp-comm-overlap``): collectives of the tensor-parallel group beside the GEMM.

Source: transformer_engine/pytorch/csrc/extensions/comm_gemm_overlap.cpp. A real userbuffer moves chunks while the GEMM
works on others. Here the whole collective is issued on the group before the GEMM (all-gather) or with it
(reduce-scatter) and waited for after the GEMM: the same bytes on the same group, the two stretched by what they share. How
chunks follow each other is not modelled, and the buffers are counted in torch's memory (really they lie beside it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from prism_plugins.integration.kernels import empty, product, record
from prism_plugins.integrations.transformer_engine.calls import Call


class CommOverlapHelper:
    """Which process groups userbuffers connect."""

    def __init__(self, world_group: Any = None, intra_domain_group: Any = None) -> None:
        self.group = intra_domain_group if intra_domain_group is not None else world_group


class CommOverlapCore:
    """What the bases of both kinds share."""

    def is_atomic_gemm(self) -> bool:
        """Whether chunks are handed over by counters in memory instead of events."""
        return False

    def is_p2p_overlap(self) -> bool:
        """Whether ranks exchange chunks around a ring."""
        return False


class CommOverlap(CommOverlapCore):
    """One communication buffer of the tensor-parallel group."""

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        *args: Any,
        **options: Any,
    ) -> None:
        self.shape = tuple(int(n) for n in buffer_shape)
        self.dtype = buffer_dtype
        self.group = helper.group
        self.tp_size = tp_size
        self._buffer = empty(self.shape, buffer_dtype)

    def is_fp8_ubuf(self) -> bool:
        """Whether the buffer holds 8-bit elements."""
        return self.dtype == torch.uint8

    def set_buffer_params(self, quantizer: Any) -> None:
        """The scale of an FP8 buffer is the quantizer's."""

    def copy_into_buffer(self, tensor: Any, local_chunk: bool = False) -> None:
        """Copy a tensor, or this rank's part of it, into the buffer."""
        part = self._chunk() if local_chunk else self._buffer
        record("te::userbuffers_copy", [tensor.contiguous()], [part])

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The buffer, or this rank's part, in a shape."""
        part = self._chunk() if local_chunk else self._buffer
        return part.view(tuple(shape)) if shape is not None else part

    def get_communication_stream(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams that send and receive."""
        stream = torch.cuda.current_stream()
        return stream, stream

    def start(self, kind: str) -> Any:
        """Issue the collective of an overlap: ``AG`` or ``RS``; returns its work."""
        if kind == "AG":
            return dist.all_gather_into_tensor(self._buffer, self._chunk(), group=self.group, async_op=True)
        return dist.reduce_scatter_tensor(self._chunk(), self._buffer, group=self.group, async_op=True)

    def _chunk(self) -> torch.Tensor:
        return self._buffer[: self.shape[0] // self.tp_size]


class CommOverlapP2P(CommOverlap):
    """The same, around a ring."""

    def is_p2p_overlap(self) -> bool:
        """Ranks exchange chunks around a ring."""
        return True


CLASSES = {
    "CommOverlapHelper": CommOverlapHelper,
    "CommOverlapCore": CommOverlapCore,
    "CommOverlapBase": CommOverlapCore,
    "CommOverlapP2PBase": CommOverlapCore,
    "CommOverlap": CommOverlap,
    "CommOverlapP2P": CommOverlapP2P,
}


def begin(call: Call) -> Any:
    """Issue the collective that a GEMM is overlapped with; returns what :func:`end` waits for."""
    overlap = call.comm_overlap
    return overlap.start(call.comm_type.name) if overlap is not None and product(overlap.shape) else None


def end(work: Any) -> None:
    """Wait on the stream of the GEMM for its collective."""
    if work is not None:
        work.wait()


def bulk_overlap_with_external_gemm(overlap: CommOverlap, *streams: Any) -> None:
    """An all-gather overlapped with a GEMM that follows."""
    overlap.start("AG").wait()
