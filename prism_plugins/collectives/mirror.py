"""Mirror semantics: what a collective gives when every peer holds exactly what we hold.

Pure functions on tensors that have values (no recording, no process group), so that each can be checked by hand.
Those of large messages take no memory of their own: on a real GPU that would be counted as the job's.
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
    of equal values are the value itself, and so are logical sums and products (bool) and what one rank reduces alone
    (NCCL launches nothing for it either).
    """
    if op in ("AVG", "MIN", "MAX", "BAND", "BOR") or (n == 1 and op != "PREMUL_SUM"):
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
    rows = output.view(n, -1)
    if _overlap(output, shard):
        flat = shard.reshape(-1)
        if any(_overlap(row, flat) and row.data_ptr() != flat.data_ptr() for row in rows):
            flat = flat.clone()
        for row in rows:
            if row.data_ptr() != flat.data_ptr():
                row.copy_(flat)
    else:
        rows.copy_(shard.reshape(1, -1).expand(n, -1))


def reduce_scatter_flat(
    output: Tensor, full: Tensor, op: str, n: int, rank: int, factor: float | Tensor | None = None
) -> None:
    """Own chunk of ``full``, reduced with ``n - 1`` equal ones. ``output`` may be a part of ``full``."""
    if output.numel() == 0:
        return
    own = full.reshape(n, -1)[rank].view_as(output)
    if output.data_ptr() != own.data_ptr():
        output.copy_(own.clone() if _overlap(output, own) else own)
    reduce_(output, op, n, factor)


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
    if have < wanted and target.is_contiguous():
        rest = target.view(-1)
        for begin in range(0, wanted, have):
            piece = rest[begin : begin + have]
            piece.copy_(flat[: piece.numel()])
        return
    if have < wanted:
        flat = flat.repeat(-(-wanted // have))
    target.copy_(flat[:wanted].view_as(target))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    a_end = a.data_ptr() + a.numel() * a.element_size()
    b_end = b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end
