"""Operands for replayed ops: random values in pools larger than the L2 cache, handed out at moving offsets.

An op that ran on zeros or on data already in the cache would be too fast. Each call gets operands at another place
of a pool, so that a loop over one op reads from memory; operands of one call overlap only when they are together
larger than the pool. Operands that an op writes come from pools of their own, which :meth:`Operands.refresh` restores.
"""

from __future__ import annotations

import torch

from prism_plugins.program.model import TensorSpec

_ALIGN = 512
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Operands:
    """Makes tensors of a given geometry. ``pool_bytes`` is the least size of a pool."""

    def __init__(self, device: torch.device, *, pool_bytes: int) -> None:
        self.device = device
        self.pool_bytes = pool_bytes
        self._pools: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self._cursors: dict[tuple[torch.dtype, bool], int] = {}
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._largest: dict[torch.dtype, int] = {}

    def expect(self, spec: TensorSpec) -> None:
        """Tell the largest operands in advance, so that pools need not grow."""
        dtype = dtype_of(spec)
        self._largest[dtype] = max(self._largest.get(dtype, 0), span(spec))

    def take(self, spec: TensorSpec, *, written: bool = False, below: int = 2) -> torch.Tensor:
        """A tensor of this geometry: normal values, integers in ``[0, below)``, or bits."""
        dtype = dtype_of(spec)
        shape, strides = spec.shape, spec.strides or _contiguous(spec.shape)
        if dtype == torch.bool and len(shape) >= 2 and shape[-1] == shape[-2] > 1 and not written:
            return self._causal_mask(shape)
        if not dtype.is_floating_point and dtype != torch.bool:
            flat = torch.randint(0, max(1, below), (max(1, span(spec)),), device=self.device)
            return flat.to(dtype).as_strided(shape, strides)
        pool, start = self._place(dtype, span(spec), written)
        return pool.as_strided(shape, strides, start)

    def causal_scores(self, spec: TensorSpec) -> torch.Tensor:
        """Attention scores of this geometry, the upper triangle masked with -10000 as Megatron does. Its own memory."""
        scores = torch.empty_strided(
            spec.shape, spec.strides or _contiguous(spec.shape), dtype=dtype_of(spec), device=self.device
        )
        mask = torch.ones(spec.shape[-2:], dtype=torch.bool, device=self.device).triu_(1)
        return scores.normal_().masked_fill_(mask, -10000.0)

    def refresh(self) -> None:
        """Restore the values of operands that ops have written."""
        for (dtype, written), pool in self._pools.items():
            clean = self._pools.get((dtype, False))
            if written and clean is not None:
                n = min(len(pool), len(clean))
                pool[:n].copy_(clean[:n])

    def _place(self, dtype: torch.dtype, length: int, written: bool) -> tuple[torch.Tensor, int]:
        key = (dtype, written)
        pool = self._pools.get(key)
        if pool is None or len(pool) < length:
            pool = self._pools[key] = self._fill(dtype, max(length, self._largest.get(dtype, 0)))
            self._cursors[key] = 0
        start = self._cursors[key]
        if start + length > len(pool):
            start = 0
        step = _ALIGN // dtype.itemsize
        self._cursors[key] = start + -(-length // step) * step
        return pool, start

    def _fill(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        length = max(length, self.pool_bytes // dtype.itemsize)
        if dtype in _FLOATS:
            return torch.randn(length, dtype=dtype, device=self.device)
        if dtype == torch.bool:
            return torch.rand(length, device=self.device) < 0.5
        pool = torch.empty(length, dtype=dtype, device=self.device)  # fp8: converted in pieces
        for begin in range(0, length, 1 << 26):
            piece = pool[begin : begin + (1 << 26)]
            piece.copy_(torch.randn(len(piece), dtype=torch.bfloat16, device=self.device))
        return pool

    def _causal_mask(self, shape: tuple[int, ...]) -> torch.Tensor:
        if shape not in self._masks:
            square = torch.ones(shape[-2:], dtype=torch.bool, device=self.device).triu_(1)
            self._masks[shape] = square.expand(shape).contiguous()
        return self._masks[shape]


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """torch's dtype of a spec."""
    return getattr(torch, spec.dtype)


def span(spec: TensorSpec) -> int:
    """Elements between the first and the last one in memory, inclusive."""
    if not spec.numel:
        return 1
    strides = spec.strides or _contiguous(spec.shape)
    return 1 + sum((n - 1) * stride for n, stride in zip(spec.shape, strides, strict=True))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))
