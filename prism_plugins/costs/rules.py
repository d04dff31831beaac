"""The rules of the roofline model: FLOPs, bytes and seconds of an op by its family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from prism_plugins.costs.families import base_name, is_inplace
from prism_plugins.costs.traffic import (
    destination,
    footprint,
    is_dense,
    is_vectorised,
    largest,
    operands_read,
    scalar,
    traffic,
)
from prism_plugins.program.model import OpSignature

if TYPE_CHECKING:
    from prism_plugins.costs.roofline import Roofline


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says about one op."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float
    """Without the fixed kernel latency."""
    kernels: int = 1


Rule = Callable[["Roofline", OpSignature], Work]


def bytes_bound(
    r: Roofline, s: OpSignature, efficiency: float, *, nbytes: float | None = None, kernels: int = 1
) -> Work:
    """Work of an op that only moves memory, by default all it reads and writes."""
    n = traffic(s) if nbytes is None else nbytes
    return Work(bytes=n, seconds=r.hbm_seconds(n, efficiency), kernels=kernels)


def _elementwise(r: Roofline, s: OpSignature) -> Work:
    nbytes = traffic(s)
    out = destination(s)
    numel = max([t.numel for t in s.outputs] or ([out.numel] if out else [0]), default=0)
    seconds = r.hbm_seconds(nbytes, r.eff.elementwise)
    inputs = operands_read(s)
    operands = (*inputs, *s.outputs)
    if not is_vectorised(operands):
        big = [t for t in inputs if t.numel > 1]
        rate = r.eff.generic_elements_per_s_per_sm
        if len(big) <= 1:
            rate = r.eff.generic_copy_elements_per_s_per_sm
        elif len({t.dtype for t in big} - {"bool"}) > 1:
            rate = r.eff.mixed_elements_per_s_per_sm
        seconds = max(seconds, numel / r.elements_per_s(rate))
    return Work(flops=float(numel), bytes=nbytes, seconds=seconds)


def _copy(r: Roofline, s: OpSignature) -> Work:
    # copy_(self, src) lists its destination first and does not read it; functional copies list only the source.
    source = (
        s.inputs[1]
        if base_name(s.op) == "copy" and len(s.inputs) > 1
        else (s.inputs[0] if s.inputs else None)
    )
    target = destination(s)
    if source is None or target is None:
        return bytes_bound(r, s, r.eff.cast)
    nbytes = footprint(source) + footprint(target)
    if s.attrs.get("direction") in ("h2d", "d2h"):
        moved = footprint(target)
        speed = 1.0 if s.attrs.get("host") == "pinned" else r.host.pageable_copy_fraction
        return Work(bytes=moved, seconds=moved / (r.pcie_bytes_per_s * speed))
    if source.dtype == target.dtype and is_vectorised((source, target)):
        return Work(bytes=nbytes, seconds=r.hbm_seconds(nbytes, r.eff.elementwise))
    if (
        is_dense(source)
        and is_dense(target)
        and source.strides == target.strides
        and source.shape == target.shape
    ):
        return Work(bytes=nbytes, seconds=r.hbm_seconds(nbytes, r.eff.cast))
    rate = r.elements_per_s(r.eff.generic_copy_elements_per_s_per_sm)
    seconds = max(r.hbm_seconds(nbytes, r.eff.elementwise), target.numel / rate)
    return Work(bytes=nbytes, seconds=seconds)


def _cat(r: Roofline, s: OpSignature) -> Work:
    nbytes = traffic(s)
    out = destination(s)
    if sum(t.numel > 0 for t in s.inputs) == 1:  # the others are empty
        return bytes_bound(r, s, r.eff.elementwise)
    dim = scalar(s, "dim")
    outermost = out is not None and (
        dim == 0 or len(out.shape) <= 1 or (isinstance(dim, int) and dim == -len(out.shape))
    )
    in_blocks = outermost and not any(t.strides for t in s.inputs)
    seconds = r.hbm_seconds(nbytes, r.eff.memcpy)
    if out is not None and not in_blocks:  # element by element
        seconds = max(seconds, out.numel / r.elements_per_s(r.eff.cat_elements_per_s_per_sm))
    return Work(bytes=nbytes, seconds=seconds)


def _fill(r: Roofline, s: OpSignature) -> Work:
    written = sum(footprint(t) for t in s.outputs) or sum(footprint(t) for t in s.inputs[:1])
    return Work(bytes=written, seconds=r.hbm_seconds(written, r.eff.fill))


def _random(r: Roofline, s: OpSignature) -> Work:
    written = sum(footprint(t) for t in s.outputs) or sum(footprint(t) for t in s.inputs[:1])
    out = destination(s)
    numel = out.numel if out else 0
    # Philox with one normal per element: about as many elements per second as an unvectorised elementwise kernel.
    seconds = max(
        r.hbm_seconds(written, r.eff.fill), numel / r.elements_per_s(r.eff.generic_elements_per_s_per_sm)
    )
    return Work(bytes=written, seconds=seconds)


def gemm_sizes(s: OpSignature) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of a matrix product, None for what is none."""
    name = base_name(s.op)
    addend = name in ("addmm", "_addmm_activation", "addmv", "addr", "baddbmm", "addbmm")
    operands = s.inputs[1:3] if addend and len(s.inputs) >= 3 else s.inputs[:2]
    if len(operands) < 2 or not operands[0].shape or not operands[1].shape:
        return None
    a, b = operands
    if name == "te_grouped_gemm":
        if len(s.inputs) % 2 or min(len(t.shape) for t in s.inputs) < 2:
            return None
        pairs = len(s.inputs) // 2
        tokens = sum(t.shape[0] for t in s.inputs[::2])
        inner = sum(t.shape[-1] for t in s.inputs[::2])
        return pairs, max(1, tokens // pairs), b.shape[-1], max(1, inner // pairs)
    if name in ("outer", "ger", "addr"):
        return 1, a.numel, b.numel, 1
    k = a.shape[-1]
    if len(a.shape) >= 3 and len(b.shape) >= 3:
        return max(1, a.numel // max(1, a.shape[-2] * k)), a.shape[-2], b.shape[-1], k
    if name == "linear":
        n = b.shape[0] if len(b.shape) > 1 else 1
    else:
        n = b.shape[-1] if len(b.shape) > 1 else 1
    return 1, max(1, a.numel // max(1, k)), n, k


def attention_sizes(s: OpSignature) -> tuple[int, int, int, int] | None:
    """(batch times heads, queries, keys, head width) of torch's attention ops, (B, H, S, D)."""
    tensors = s.inputs[1:4] if "backward" in base_name(s.op) else s.inputs[:3]
    if len(tensors) < 2 or len(tensors[0].shape) != 4 or len(tensors[1].shape) != 4:
        return None
    b, h, queries, width = tensors[0].shape
    return b * h, queries, tensors[1].shape[-2], width


def _gemm(r: Roofline, s: OpSignature) -> Work:
    """mm, addmm, linear, mv, dot: the last operand pair of rank ≤ 2 (linear's input is flattened)."""
    name = base_name(s.op)
    operands = (
        s.inputs[1:3]
        if name in ("addmm", "_addmm_activation", "addmv", "addr") and len(s.inputs) >= 3
        else s.inputs[:2]
    )
    if len(operands) < 2 or not operands[0].shape or not operands[1].shape:
        return bytes_bound(r, s, r.eff.elementwise)
    a, b = operands
    k = a.shape[-1]
    m = max(1, a.numel // max(1, k))
    if name in ("outer", "ger", "addr"):
        m, k, n = a.numel, 1, b.numel
    elif name == "linear":
        n = b.shape[0] if len(b.shape) > 1 else 1
    elif len(b.shape) > 2 and name == "matmul":
        return _batched_gemm(r, s)
    else:
        n = b.shape[-1] if len(b.shape) > 1 else 1
    nbytes = traffic(s)
    seconds = r.gemm_seconds(batch=1, m=m, n=n, k=k, dtype=a.dtype, nbytes=nbytes)
    factor = 2.0 if name == "linear_backward" else 1.0
    return Work(flops=factor * 2.0 * m * n * k, bytes=nbytes, seconds=factor * seconds)


def _batched_gemm(r: Roofline, s: OpSignature) -> Work:
    name = base_name(s.op)
    operands = s.inputs[1:3] if name in ("baddbmm", "addbmm") and len(s.inputs) >= 3 else s.inputs[:2]
    nbytes = traffic(s)
    beta = scalar(s, "beta")
    if (
        name == "baddbmm"
        and s.inputs
        and (beta == 0 or (beta is None and s.outputs and s.inputs[0].shape == s.outputs[0].shape))
    ):
        # beta 0, or not recorded and a buffer of the full size: attention's scratch buffer, which is not read.
        nbytes -= footprint(s.inputs[0])
    if len(operands) < 2 or len(operands[0].shape) < 2 or len(operands[1].shape) < 2:
        return bytes_bound(r, s, r.eff.elementwise)
    a, b = operands
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = max(1, a.numel // max(1, m * k))
    seconds = r.gemm_seconds(batch=batch, m=m, n=n, k=k, dtype=a.dtype, nbytes=nbytes)
    return Work(flops=2.0 * batch * m * n * k, bytes=nbytes, seconds=seconds)


def _scaled_gemm(r: Roofline, s: OpSignature) -> Work:
    if len(s.inputs) < 2 or min(len(s.inputs[0].shape), len(s.inputs[1].shape)) < 2:
        return bytes_bound(r, s, r.eff.elementwise)
    a, b = s.inputs[0], s.inputs[1]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    nbytes = traffic(s)
    return Work(
        flops=2.0 * m * n * k,
        bytes=nbytes,
        seconds=r.gemm_seconds(batch=1, m=m, n=n, k=k, dtype=a.dtype, nbytes=nbytes),
    )


def _grouped_gemm(r: Roofline, s: OpSignature) -> Work:
    """Experts' GEMMs in one launch: ``a`` (tokens, k) times ``b`` (experts, k, n); balanced tokens per expert.

    Transformer Engine lists the pairs; they run beside each other on a few streams.
    """
    if base_name(s.op) == "te_grouped_gemm" and (sizes := gemm_sizes(s)) is not None:
        batch, m, n, k = sizes
        nbytes = traffic(s)
        seconds = r.gemm_seconds(batch=batch, m=m, n=n, k=k, dtype=s.inputs[0].dtype, nbytes=nbytes)
        return Work(flops=2.0 * batch * m * n * k, bytes=nbytes, seconds=seconds, kernels=batch)
    if len(s.inputs) < 2 or min(len(s.inputs[0].shape), len(s.inputs[1].shape)) < 2:
        return bytes_bound(r, s, r.eff.elementwise)
    a, b = s.inputs[0], s.inputs[1]
    nbytes = traffic(s)
    if len(b.shape) == 3:
        experts, k, n = b.shape[0], b.shape[1], b.shape[2]
        m = max(1, a.numel // max(1, a.shape[-1]) // experts)
    else:  # weight gradient: (k, tokens) × (tokens, n) per expert
        experts, m, n = 1, a.shape[0], b.shape[-1]
        k = a.shape[-1]
    seconds = r.gemm_seconds(batch=experts, m=m, n=n, k=k, dtype=a.dtype, nbytes=nbytes)
    return Work(flops=2.0 * experts * m * n * k, bytes=nbytes, seconds=seconds)


def _convolution(r: Roofline, s: OpSignature, *, factor: float = 1.0) -> Work:
    inputs = [t for t in s.inputs if len(t.shape) >= 3]
    if len(inputs) < 2:
        return bytes_bound(r, s, r.eff.elementwise)
    weight, image = inputs[-1], inputs[0]
    out = next((t for t in s.outputs if len(t.shape) >= 3), image) if factor == 1.0 else inputs[0]
    k = weight.numel // max(1, weight.shape[0])
    m = out.numel // max(1, out.shape[1])
    nbytes = traffic(s)
    seconds = r.gemm_seconds(batch=1, m=m, n=weight.shape[0], k=k, dtype=weight.dtype, nbytes=nbytes)
    return Work(flops=factor * 2.0 * m * weight.shape[0] * k, bytes=nbytes, seconds=factor * seconds)


def _attention(r: Roofline, s: OpSignature, *, efficiency: float, gemms: int, backward: bool) -> Work:
    """Flash attention: two GEMMs of 2·B·H·Sq·Sk·D forward, five backward; half of it under a causal mask.

    Sequence lengths come from k's second-to-last (torch: B, H, S, D) or second (flash_attn: B, S, H, D) dimension.
    Dao et al., FlashAttention, NeurIPS 2022; FlashAttention-2, section 4.
    """
    tensors = s.inputs[1:4] if backward else s.inputs[:3]
    if len(tensors) < 2 or min(len(tensors[0].shape), len(tensors[1].shape)) < 3:
        return bytes_bound(r, s, r.eff.elementwise, kernels=2)
    q, k = tensors[0], tensors[1]
    torch_order = "scaled_dot_product" in base_name(s.op)
    sequence_axis = -2 if torch_order or len(k.shape) == 3 else 1
    if len(k.shape) == 3 and not torch_order:  # packed (tokens, heads, dim): sequences of max_seqlen_k
        longest = scalar(s, "max_k") or scalar(s, "max_seqlen_k") or k.shape[0]
        keys = int(longest) if isinstance(longest, (int, float)) else k.shape[0]
    else:
        keys = k.shape[sequence_axis]
    flops = gemms * 2.0 * q.numel * keys
    if scalar(s, "is_causal") or scalar(s, "causal"):
        flops /= 2
    nbytes = traffic(s)
    seconds = max(flops / (r.peak_flops(q.dtype) * efficiency), r.hbm_seconds(nbytes, r.eff.elementwise))
    return Work(flops=flops, bytes=nbytes, seconds=seconds, kernels=3 if backward else 1)


def _streamed(r: Roofline, s: OpSignature) -> Work:
    """Kernels that read and write every operand once, whatever they compute."""
    return bytes_bound(r, s, r.eff.elementwise)


def _softmax_forward(r: Roofline, s: OpSignature) -> Work:
    """torch's kernel reads a long row three times; the fused ones of Megatron (Apex, TE: ``scaled_*_softmax``) hold it in
    registers, and read half of it under a causal mask."""
    row = s.inputs[0].shape[-1] if s.inputs and s.inputs[0].shape else 1
    fused = not s.op.startswith("aten::")
    efficiency = r.eff.softmax if row <= 1024 or fused else r.eff.softmax_long
    return bytes_bound(r, s, efficiency, nbytes=_fused_softmax_bytes(s))


def _fused_softmax_bytes(s: OpSignature) -> float:
    unread = sum(footprint(t) for t in s.inputs) / 2 if "upper_triang" in s.op else 0.0
    return traffic(s) - unread


def _softmax_backward(r: Roofline, s: OpSignature) -> Work:
    """softmax's backward first multiplies gradient and output into a temporary (aten/native/cuda/SoftMax.cu,
    ``softmax_backward_cuda_out``), with a kernel as long as its own; log_softmax's does not."""
    passes = 1 if "log_softmax" in s.op or not s.op.startswith("aten::") else 2
    return bytes_bound(r, s, r.eff.elementwise, nbytes=passes * _fused_softmax_bytes(s), kernels=passes)


def _norm_forward(r: Roofline, s: OpSignature) -> Work:
    return bytes_bound(r, s, r.eff.norm)


def _norm_backward(r: Roofline, s: OpSignature) -> Work:
    return bytes_bound(r, s, r.eff.norm_backward, kernels=2)


def _reduction(r: Roofline, s: OpSignature) -> Work:
    big = largest(s)
    kernels = 2 if big is not None and big.numel > 1 << 20 and sum(t.numel for t in s.outputs) <= 1 else 1
    return bytes_bound(r, s, r.eff.reduction, kernels=kernels)


def _scan(r: Roofline, s: OpSignature) -> Work:
    return bytes_bound(r, s, r.eff.reduction / 2, kernels=2)


def _gather(r: Roofline, s: OpSignature) -> Work:
    """Reads only the rows it takes: the output twice and the indices."""
    out = sum(footprint(t) for t in s.outputs)
    indices = sum(footprint(t) for t in s.inputs[1:] if t.dtype in ("int64", "int32", "bool", "uint8"))
    return bytes_bound(r, s, r.eff.gather, nbytes=2 * out + indices)


def _scatter(r: Roofline, s: OpSignature) -> Work:
    """Touches the destination where a source element lands; functional forms copy the destination first."""
    name = base_name(s.op)
    if name.startswith("embedding") or name.endswith("_backward"):
        # zero fill of the weight gradient, sort of the indices, segmented sum: 446 us for 8192 rows of 4096 on an H200.
        source = max((footprint(t) for t in s.inputs), default=0.0)
        target = sum(footprint(t) for t in s.outputs)
        return bytes_bound(r, s, r.eff.norm_backward, nbytes=2 * source + target, kernels=5)
    sources = [t for t in s.inputs[1:] if t.dtype not in ("int64", "int32", "bool")]
    moved = 3 * max((footprint(t) for t in sources), default=0.0) + sum(
        footprint(t) for t in s.inputs[1:] if t.dtype in ("int64", "int32", "bool")
    )
    if not is_inplace(s.op) and s.outputs:
        moved += 2 * footprint(s.outputs[0])
    sorts = 4 if scalar(s, "accumulate") else 1
    return bytes_bound(r, s, r.eff.gather / (2 if sorts > 1 else 1), nbytes=moved, kernels=sorts)


def _sort(r: Roofline, s: OpSignature) -> Work:
    """Radix sort: about eight passes over keys and values of 4 bytes (CUB's onesweep: 4 bits to 8 bits a pass)."""
    passes = (
        2
        if base_name(s.op) in ("topk", "nonzero", "histc", "bincount", "searchsorted", "bucketize", "isin")
        else 8
    )
    return bytes_bound(r, s, r.eff.reduction, nbytes=passes * traffic(s), kernels=passes)


def _loss(r: Roofline, s: OpSignature) -> Work:
    # One element a row is read forward; backward fills the whole gradient.
    out = sum(footprint(t) for t in s.outputs)
    targets = sum(footprint(t) for t in s.inputs[1:])
    return bytes_bound(r, s, r.eff.fill, nbytes=out + targets)


_FOREACH_LISTS = {"addcdiv": 3, "addcmul": 3, "lerp": 2, "copy": 2, "norm": 1}


def _foreach(r: Roofline, s: OpSignature) -> Work:
    """Tensor lists flattened; in-place forms write the first list.

    ``addcmul`` of the Adam step squares one list (``addcmul_(exp_avg_sq, grad, grad)``), read once.
    """
    inputs = sum(footprint(t) for t in s.inputs)
    written = sum(footprint(t) for t in s.outputs)
    name = base_name(s.op).removeprefix("_foreach_")
    lists = _FOREACH_LISTS.get(name, 2 if _is_two_lists(s) else 1)
    if not written and is_inplace(s.op):
        written = inputs / lists
    if name == "addcmul":
        inputs -= inputs / lists
    if name in ("zero",):
        inputs = 0.0
    if name == "copy":
        inputs /= 2
    launches = max(1, math.ceil(len(s.inputs) / lists / 100))
    return bytes_bound(r, s, r.eff.foreach, nbytes=inputs + written, kernels=launches)


def _is_two_lists(s: OpSignature) -> bool:
    half = len(s.inputs) // 2
    return (
        "List" in s.op
        and half > 0
        and [t.shape for t in s.inputs[:half]] == [t.shape for t in s.inputs[half : 2 * half]]
    )


def _fused_optimizer(r: Roofline, s: OpSignature) -> Work:
    """Reads parameter, gradient and both moments, writes parameter and both moments (Adam): 7 of 4 lists. LAMB writes
    its update as well, and reads it and the parameter again once it knows their norms: 10 of 4. With one moment
    (Lion, SGD) 5 of 3."""
    total = sum(footprint(t) for t in s.inputs)
    nbytes = total * (7 / 4 if "adam" in s.op else 10 / 4 if "lamb" in s.op else 5 / 3)
    return bytes_bound(r, s, r.eff.foreach, nbytes=nbytes, kernels=max(1, math.ceil(len(s.inputs) / 4 / 100)))


def _multi_tensor(r: Roofline, s: OpSignature) -> Work:
    return bytes_bound(r, s, r.eff.foreach, kernels=max(1, math.ceil(len(s.inputs) / 100)))


def _dropout(r: Roofline, s: OpSignature) -> Work:
    return bytes_bound(r, s, r.eff.elementwise * 0.8)


def _sync(r: Roofline, s: OpSignature) -> Work:
    del r, s
    return Work(bytes=8.0, seconds=0.0)


def _linalg(r: Roofline, s: OpSignature) -> Work:
    """Dense factorisations: n³ FLOPs at 5 % of float32 peak; launch-bound when small."""
    big = largest(s)
    if big is None or len(big.shape) < 2:
        return bytes_bound(r, s, r.eff.reduction)
    n = big.shape[-1]
    flops = 2.0 * big.numel * n
    return Work(flops=flops, bytes=traffic(s), seconds=flops / (0.05 * r.peak_flops("float32")), kernels=4)


def _fft(r: Roofline, s: OpSignature) -> Work:
    return bytes_bound(r, s, r.eff.reduction, nbytes=2 * traffic(s), kernels=2)


def _fused(r: Roofline, s: OpSignature) -> Work:
    """A compiled region: bytes and FLOPs as the compiler's plan gave them."""
    flops = float(s.attrs.get("flops", 0.0))
    nbytes = float(s.attrs.get("read_bytes", 0.0)) + float(s.attrs.get("write_bytes", 0.0))
    nbytes = nbytes or traffic(s)
    strided = any(word in str(s.attrs.get("name", "")) for word in ("cat", "stack"))
    efficiency = r.eff.fused_strided if strided else r.eff.fused
    dtype = s.inputs[0].dtype if s.inputs else "bfloat16"
    gemm_like = s.attrs.get("kind") == "gemm"
    arithmetic = flops / (
        r.peak_flops(dtype if gemm_like else "float32") * (r.eff.gemm if gemm_like else 0.5)
    )
    return Work(
        flops=flops,
        bytes=nbytes,
        seconds=max(arithmetic, r.hbm_seconds(nbytes, efficiency)),
        kernels=int(s.attrs.get("kernels", 1)),
    )


RULES: dict[str, Rule] = {
    "gemm": _gemm,
    "batched_gemm": _batched_gemm,
    "scaled_gemm": _scaled_gemm,
    "grouped_gemm": _grouped_gemm,
    "convolution": _convolution,
    "convolution_backward": lambda r, s: _convolution(r, s, factor=2.0),
    "attention_forward": lambda r, s: _attention(
        r, s, efficiency=r.eff.attention_forward, gemms=2, backward=False
    ),
    "attention_backward": lambda r, s: _attention(
        r, s, efficiency=r.eff.attention_backward, gemms=5, backward=True
    ),
    "cudnn_attention_forward": lambda r, s: _attention(
        r, s, efficiency=r.eff.cudnn_attention_forward, gemms=2, backward=False
    ),
    "cudnn_attention_backward": lambda r, s: _attention(
        r, s, efficiency=r.eff.cudnn_attention_backward, gemms=5, backward=True
    ),
    "quantize": _streamed,
    "activation": _streamed,
    "routing": lambda r, s: bytes_bound(r, s, r.eff.gather),
    "packed_sequences": _streamed,
    "softmax_forward": _softmax_forward,
    "softmax_backward": _softmax_backward,
    "norm_forward": _norm_forward,
    "norm_backward": _norm_backward,
    "copy": _copy,
    "cat": _cat,
    "fill": _fill,
    "random": _random,
    "dropout": _dropout,
    "reduction": _reduction,
    "scan": _scan,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _sort,
    "loss": _loss,
    "foreach": _foreach,
    "fused_optimizer": _fused_optimizer,
    "multi_tensor": _multi_tensor,
    "sync": _sync,
    "linalg": _linalg,
    "fft": _fft,
    "elementwise": _elementwise,
    "fused": _fused,
}
