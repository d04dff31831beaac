"""Mirror semantics: what a collective gives when every peer holds exactly what we hold.

Pure functions on CPU tensors (no recording, no process group), so that each can be checked by hand.
``n`` is the group size, ``rank`` the own group rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NARROW = {torch.bool, *(getattr(torch, n) for n in dir(torch) if n.startswith("float8_"))}


def reduce_(view: Tensor, op: str, n: int, factor: float | Tensor | None = None) -> None:
    """Reduce ``n`` equal copies of ``view`` in place.

    SUM → n·x, PRODUCT → x**n, PREMUL_SUM → n·factor·x, BXOR → x for odd n, else 0; AVG, MIN, MAX, BAND and BOR
    of equal values are the value itself, and so are logical sums and products (bool).
    """
    if op in ("AVG", "MIN", "MAX", "BAND", "BOR"):
        return
    if op == "BXOR":
        if n % 2 == 0:
            view.zero_()
        return
    if view.dtype == torch.bool:
        return
    if view.dtype in _NARROW or view.dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = view.to(torch.float32 if view.dtype.is_floating_point else torch.int64)
        reduce_(wide, op, n, factor)
        view.copy_(wide)
    elif op == "SUM":
        view.mul_(n)
    elif op == "PRODUCT":
        view.pow_(n)
    elif op == "PREMUL_SUM":
        view.mul_(factor.item() if isinstance(factor, Tensor) else factor).mul_(n)
    else:
        raise ValueError(f"unknown reduce op {op}")


def all_gather_flat(output: Tensor, shard: Tensor, n: int) -> None:
    """``n`` copies of ``shard`` after one another. ``shard`` may be a part of ``output`` (in-place all_gather)."""
    if shard.numel() == 0:
        return
    if shard.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
        shard = shard.clone()
    output.view(n, -1).copy_(shard.reshape(1, -1).expand(n, -1))


def reduce_scatter_flat(
    output: Tensor, full: Tensor, op: str, n: int, rank: int, factor: float | Tensor | None = None
) -> None:
    """Own chunk of ``full``, reduced with ``n - 1`` equal ones. ``output`` may be a part of ``full``."""
    if output.numel() == 0:
        return
    own = full.reshape(n, -1)[rank].clone()
    reduce_(own, op, n, factor)
    output.copy_(own.view_as(output))


def all_to_all_flat(
    output: Tensor, source: Tensor, rank: int, recv_rows: Sequence[int], send_rows: Sequence[int]
) -> None:
    """Every peer sends us the rows we send to ourselves, repeated or cut to the size it was asked to send.

    ``recv_rows`` and ``send_rows`` split dimension 0. Where we send ourselves nothing, rows of the whole input
    stand in; without any row to copy the output stays untouched.
    """
    begin = sum(send_rows[:rank])
    own = source[begin : begin + send_rows[rank]]
    if own.shape[0] == 0:
        own = source
    if own.shape[0] == 0 or output.shape[0] == 0:
        return
    if len(set(recv_rows)) == 1 and recv_rows[0] == own.shape[0]:
        output.view(len(recv_rows), *own.shape).copy_(own.unsqueeze(0).expand(len(recv_rows), *own.shape))
        return
    position = 0
    for rows in recv_rows:
        fill_from(output[position : position + rows], own)
        position += rows


def fill_from(target: Tensor, source: Tensor) -> None:
    """Copy the elements of ``source`` to ``target``, repeated or cut to its size."""
    wanted, have = target.numel(), source.numel()
    if wanted == 0 or have == 0:
        return
    flat = source.reshape(-1)
    if have < wanted:
        flat = flat.repeat(-(-wanted // have))
    target.copy_(flat[:wanted].view_as(target))
