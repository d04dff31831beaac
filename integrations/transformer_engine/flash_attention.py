"""A virtual flash-attn 2, visible to Transformer Engine only: what its kernels allocate, one op each.

Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp and flash_attn/flash_attn_interface.py of 2.7. Tensors are
(batch, length, heads, width), packed ones (tokens, heads, width).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from prism_plugins.integration.kernels import dtype_name, empty, empty_like, record, synthesized
from prism_plugins.program.model import TensorSpec

VERSION = "2.7.4.post1"
"""What is taken where flash-attn is not installed: the version in NVIDIA's containers of 2025."""
_ROWS = 128
"""Rows of a block: lengths are rounded up to it in the backward pass."""


def installed_version() -> str | None:
    """Of the real package, None without it."""
    try:
        return importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return None


def modules(on_use: Callable[[], None]) -> dict[str, ModuleType]:
    """The modules that Transformer Engine imports. ``on_use`` is called by every forward kernel."""
    package, interface, compiled = (
        ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda")
    )
    package.__path__ = []
    package.flash_attn_interface = interface
    compiled.varlen_bwd = None

    def forward(*args: Any, **options: Any) -> Any:
        on_use()
        return _forward(*args, **options)

    def varlen_forward(*args: Any, **options: Any) -> Any:
        on_use()
        return _varlen_forward(*args, **options)

    interface._flash_attn_forward = forward
    interface._flash_attn_backward = _backward
    interface._flash_attn_varlen_forward = varlen_forward
    interface._flash_attn_varlen_backward = _varlen_backward

    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        **options: Any,
    ) -> Any:
        on_use()
        return _Attention.apply(q, k, v, causal, bool(options.get("deterministic")), None)

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        *args: Any,
        causal: bool = False,
        **options: Any,
    ) -> Any:
        on_use()
        return _Attention.apply(
            q, k, v, causal, bool(options.get("deterministic")), (cu_q, cu_k, max_q, max_k)
        )

    interface.flash_attn_func = flash_attn_func
    interface.flash_attn_varlen_func = flash_attn_varlen_func
    return {m.__name__: m for m in (package, interface, compiled)}


def _forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    batch, length, heads, _ = q.shape
    out = empty([*q.shape[:-1], v.shape[-1]], q.dtype)
    statistics = empty([batch, heads, length], torch.float32)
    rng_state = empty([2], torch.int64)
    record("flash_attn::fwd", _specs(q, k, v), [_spec(out), statistics], is_causal=bool(causal))
    return out, statistics, None, rng_state


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, *args: Any, **options: Any,
) -> torch.Tensor:  # fmt: skip
    batch, length, heads, width = q.shape
    rows = -(-length // _ROWS) * _ROWS
    softmax_d = empty([batch, heads, rows], torch.float32)
    splits = _splits(batch * heads) if options.get("deterministic") else 1
    accumulated = empty([splits, batch, rows, heads, -(-width // 32) * 32], torch.float32)
    expanded = []
    if k.shape[2] != heads:
        expanded = [empty([batch, k.shape[1], heads, x.shape[-1]], x.dtype) for x in (k, v)]
    record(
        "flash_attn::bwd",
        [_spec(dout), *_specs(q, k, v)],
        [_spec(g) for g in (q, k, v)],
        is_causal=bool(causal),
    )
    del accumulated, expanded
    for grad in (dq, dk, dv):
        synthesized(grad)
    return softmax_d


def _varlen_forward(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    tokens, heads, _ = q.shape
    out = empty([tokens, heads, v.shape[-1]], q.dtype)
    statistics = empty([heads, tokens], torch.float32)
    rng_state = empty([2], torch.int64)
    record(
        "flash_attn::varlen_fwd",
        [q, k, v],
        [out, statistics],
        is_causal=bool(causal),
        max_seqlen_k=int(max_k),
    )
    return out, statistics, None, rng_state


def _varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
    cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, *args: Any, **options: Any,
) -> torch.Tensor:  # fmt: skip
    tokens, heads, width = q.shape
    padded = tokens + _ROWS * (cu_q.numel() - 1)
    softmax_d = empty([heads, padded], torch.float32)
    accumulated = empty([padded, heads, -(-width // 32) * 32], torch.float32)
    expanded = []
    if k.shape[1] != heads:
        expanded = [empty([k.shape[0], heads, x.shape[-1]], x.dtype) for x in (k, v)]
    record(
        "flash_attn::varlen_bwd", [dout, q, k, v], [q, k, v], is_causal=bool(causal), max_seqlen_k=int(max_k)
    )
    del accumulated, expanded
    for grad in (dq, dk, dv):
        synthesized(grad)
    return softmax_d


class _Attention(torch.autograd.Function):
    """``FlashAttnFunc`` and ``FlashAttnVarlenFunc``."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, deterministic: bool, packed: Any) -> Any:
        """As ``FlashAttnFunc.forward``."""
        if packed is None:
            out, statistics, _, rng_state = _forward(q, k, v, causal=causal)
        else:
            out, statistics, _, rng_state = _varlen_forward(q, k, v, *packed, causal=causal)
        ctx.save_for_backward(q, k, v, out, statistics, rng_state)
        ctx.settings = (causal, deterministic, packed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """As ``FlashAttnFunc.backward``."""
        q, k, v, out, statistics, _ = ctx.saved_tensors
        causal, deterministic, packed = ctx.settings
        dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
        gradients = (grad.contiguous(), q, k, v, out, statistics, dq, dk, dv)
        if packed is None:
            _backward(*gradients, causal=causal, deterministic=deterministic)
        else:
            _varlen_backward(*gradients, *packed, causal=causal, deterministic=deterministic)
        return dq, dk, dv, None, None, None


def _spec(x: Any) -> TensorSpec:
    """A (batch, length, heads, width) tensor as torch's attention has it: heads before the length."""
    batch, length, heads, width = x.shape
    row = heads * width
    return TensorSpec(dtype_name(x.dtype), (batch, heads, length, width), (length * row, width, row, 1))


def _specs(q: Any, k: Any, v: Any) -> list[TensorSpec]:
    return [_spec(q), _spec(k), _spec(v)]


def _splits(heads: int) -> int:
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return -(-sms // heads)
