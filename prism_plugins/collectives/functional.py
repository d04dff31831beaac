"""The functional collective that cannot reach a Python process group.

All others call virtual methods of the group, which torch's trampoline class hands on to Python;
``batch_p2p_ops`` asks for a C++ backend first. Kernels for CPU and CUDA take precedence over torch's own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


def batch_p2p_ops(
    op_list: list[str], peer_list: list[int], tag_list: list[int], tensors: list[Tensor], group_name: str
) -> list[Tensor]:
    """Send and receive as one group; every returned tensor is waited for by the same work."""
    group = c10d._resolve_process_group(group_name)
    group._start_coalescing()
    try:
        for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
            (group.send if op == "isend" else group.recv)([tensor], peer, tag)
    finally:
        work = group._end_coalescing()
    results = [
        tensor if op == "irecv" else tensor.new_empty(0) for op, tensor in zip(op_list, tensors, strict=True)
    ]
    for result in results:
        torch._C._distributed_c10d._register_work(result, work)
    return results


def register() -> torch.library.Library | None:
    """Register the kernels; the returned library undoes it with ``_destroy()``. None before torch 2.13."""
    if not hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("batch_p2p_ops", batch_p2p_ops, key)
    return library
