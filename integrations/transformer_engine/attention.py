"""Fused attention by cuDNN: which backend there is, what it allocates, and the helpers of packed sequences.

Source: transformer_engine/pytorch/csrc/extensions/attention.cpp, common/fused_attn/fused_attn.cpp (the backend) and
fused_attn_f16_arbitrary_seqlen.cu (auxiliary tensors).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from prism_plugins.integration.kernels import empty, record, synthesized
from prism_plugins.integrations.transformer_engine.calls import Call, assume, implements
from prism_plugins.integrations.transformer_engine.dtypes import torch_dtype
from prism_plugins.integrations.transformer_engine.enums import enum_value
from prism_plugins.integrations.transformer_engine.quantize import (
    CURRENT,
    DELAYED,
    create,
    element_type,
    is_quantized,
    kind,
    shape_of,
    wrap_per_tensor,
)
from prism_plugins.program.model import TensorSpec

_NO_BIAS = ("NVTE_NO_BIAS", "NVTE_ALIBI")
_PADDED = ("NVTE_PADDING_MASK", "NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK")


class Sizes(NamedTuple):
    """Of one attention: batch, query and key lengths, query and key heads, head widths of q·k and of v."""

    layout: str
    """``sbhd``, ``bshd`` or ``thd``."""
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    v_width: int


@implements("get_fused_attn_backend")
def _backend(call: Call) -> Any:
    """The conditions of ``nvte_get_fused_attn_backend`` for cuDNN 9.15 that depend on the job. From 2.20 on they come in
    one object, and the reason of a refusal goes with the answer."""
    params = call.fused_attn_params
    if params is None:
        return enum_value("NVTE_Fused_Attn_Backend", _backend_name(call))
    fields = {name: getattr(params, name) for name in dir(params) if not name.startswith("__")}
    given = Call(call.name, fields | {"q_dtype": params.qkv_dtype, "p_dropout": params.dropout})
    name = _backend_name(given)
    refused = "no fused kernel takes this attention" if name == "NVTE_No_Backend" else ""
    return enum_value("NVTE_Fused_Attn_Backend", name), refused


def _backend_name(call: Any) -> str:
    none = "NVTE_No_Backend"
    dtype = getattr(call.q_dtype, "name", str(call.q_dtype))
    widths = (int(call.head_dim_qk), int(call.head_dim_v))
    mask, bias = call.attn_mask_type.name, call.bias_type.name
    capability = torch.cuda.get_device_capability()
    if dtype in ("kFloat8E4M3", "kFloat8E5M2"):
        plain = bias == "NVTE_NO_BIAS" and max(widths) <= 128 and all(w % 16 == 0 for w in widths)
        return "NVTE_FP8" if plain and capability >= (9, 0) else none
    if dtype not in ("kBFloat16", "kFloat16") or capability < (8, 0) or any(w % 8 for w in widths):
        return none
    widest = 256 if capability[0] == 9 else 128
    blackwell_mla = capability[0] >= 10 and widths == (192, 128)
    unequal_on_hopper = (
        capability[0] == 9
        and call.is_training
        and min(widths) >= 128
        and widths[0] != widths[1]
        and widths != (192, 128)
    )
    if (max(widths) > widest and call.is_training and not blackwell_mla) or unequal_on_hopper:
        return none
    packed = "THD" in call.qkv_layout.name
    if packed and (capability < (9, 0) or mask not in _PADDED):
        return none
    dropout = float(call.p_dropout or 0.0) > 0
    if mask in _PADDED and (dropout or bias != "NVTE_NO_BIAS"):
        return none
    if bias == "NVTE_ALIBI" and (mask != "NVTE_CAUSAL_MASK" or capability < (9, 0)):
        return none
    if bias == "NVTE_PRE_SCALE_BIAS":
        return none
    window = (int(call.window_size_left), int(call.window_size_right))
    sliding = window[0] > 0 or window[1] > 0
    if sliding and (dropout or bias != "NVTE_NO_BIAS" or int(call.max_seqlen_q) > int(call.max_seqlen_kv)):
        return none
    if capability >= (10, 0) and call.is_training and call.deterministic:
        return none
    return "NVTE_F16_arbitrary_seqlen"


# --- attention ---


@implements("fused_attn_fwd")
def _forward(call: Call) -> list[Any]:
    assume("attention runs cuDNN's fused kernels, as Transformer Engine chooses for this GPU, cuDNN and mask")
    sizes = _sizes(call)
    quantizer, dtype = call.o_quantizer, call.fake_dtype
    o_shape = [*shape_of(call.Q)[:-1], sizes.v_width]
    # Current scaling: the kernel writes high precision, Python quantizes it.
    out = create(quantizer if kind(quantizer) == DELAYED else None, o_shape, dtype)
    if sizes.layout == "thd" and isinstance(out, torch.Tensor) and not is_quantized(out):
        out.zero_()
    rng_state = empty([2], torch.int64)
    packed = sizes.layout == "thd"
    stats_shape = (
        [shape_of(call.Q)[0], sizes.heads, 1] if packed else [sizes.batch, sizes.heads, sizes.queries, 1]
    )
    statistics = [empty(stats_shape, torch.float32)]
    if call.return_max_logit or is_quantized(call.Q):
        statistics.append(empty(stats_shape, torch.float32))
    extra = []
    if call.bias_type.name not in _NO_BIAS and call.Bias is not None:
        extra.append(call.Bias)
    if call.softmax_type is not None and call.softmax_type.name != "NVTE_VANILLA_SOFTMAX":
        extra += [call.SoftmaxOffset] if call.SoftmaxOffset is not None else []
    q, k, v = _operand_specs(call, sizes)
    o = TensorSpec(element_type(out), (*q.shape[:-1], sizes.v_width), ())
    record("te::fused_attn_fwd", [q, k, v], [o, statistics[0]], **_scalars(call, sizes))
    return [out, *statistics, rng_state, *extra]


@implements("fused_attn_bwd")
def _backward(call: Call) -> list[Any]:
    sizes = _sizes(call)
    quantizer = call.dqkv_quantizer
    grads = _gradients(call, _gradient_dtype(call))
    if sizes.layout == "thd" and not kind(quantizer):
        for grad in grads:
            grad.zero_()
    results: list[Any] = grads
    if kind(quantizer) == DELAYED:
        results = [_as_fp8(call, grad) for grad in grads]
    bias_grad = None
    if call.bias_type.name not in _NO_BIAS:
        bias_grad = empty([1, sizes.heads, sizes.queries, sizes.keys], grads[0].dtype)
    offset_grad = None
    if call.softmax_type is not None and call.softmax_type.name != "NVTE_VANILLA_SOFTMAX":
        offset_grad = empty([1, sizes.heads, 1, 1], torch.float32)
    # cuDNN does not document its workspace; this is what the algorithm needs: dQ summed in float32, rows of dO·O.
    workspace = empty([sizes.batch, sizes.heads, sizes.queries, sizes.width + 1], torch.float32)
    q, k, v = _operand_specs(call, sizes)
    d_out = TensorSpec(element_type(call.dO), (*q.shape[:-1], sizes.v_width), ())
    record("te::fused_attn_bwd", [d_out, q, k, v], [q, k, v], **_scalars(call, sizes))
    del workspace
    return [*results, bias_grad, offset_grad]


def _sizes(call: Call) -> Sizes:
    q, k, v = shape_of(call.Q), shape_of(call.K), shape_of(call.V)
    layout = _layout(call.qkv_layout.name)
    if layout == "sbhd":
        batch, queries, keys = q[1], q[0], k[0]
    elif layout == "bshd":
        batch, queries, keys = q[0], q[1], k[1]
    else:
        batch, queries, keys = call.cu_seqlens_q.shape[0] - 1, call.max_seqlen_q, call.max_seqlen_kv
    return Sizes(layout, batch, queries, keys, q[-2], k[-2], q[-1], v[-1])


def _layout(name: str) -> str:
    """Of the queries: ``NVTE_SBHD_SB2HD`` → ``sbhd``; ``NVTE_Paged_KV_BSHD_…`` → ``bshd``."""
    words = name.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")
    letters = "".join(c for c in words[0] if c.isalpha())
    return {"SB": "sbhd", "BS": "bshd"}.get(letters[:2], "thd")


def _operand_specs(call: Call, sizes: Sizes) -> list[TensorSpec]:
    """q, k, v as torch's attention has them, (batch, heads, length, width), lying in memory as they do; packed
    sequences as (tokens, heads, width)."""
    specs = []
    for tensor, heads, length, width in (
        (call.Q, sizes.heads, sizes.queries, sizes.width),
        (call.K, sizes.kv_heads, sizes.keys, sizes.width),
        (call.V, sizes.kv_heads, sizes.keys, sizes.v_width),
    ):
        name = element_type(tensor)
        if sizes.layout == "thd":
            specs.append(TensorSpec(name, (shape_of(tensor)[0], heads, width), ()))
        else:
            row = heads * width
            strides = (
                (row, width, sizes.batch * row, 1)
                if sizes.layout == "sbhd"
                else (length * row, width, row, 1)
            )
            specs.append(TensorSpec(name, (sizes.batch, heads, length, width), strides))
    return specs


def _scalars(call: Call, sizes: Sizes) -> dict[str, Any]:
    mask = call.attn_mask_type.name
    scalars: dict[str, Any] = {"is_causal": "CAUSAL" in mask, "backend": "cudnn"}
    if sizes.layout == "thd":
        scalars["max_seqlen_k"] = int(sizes.keys)
    window = tuple(int(n) for n in call.window_size or (-1, -1))
    if max(window) > 0:
        scalars["window"] = window
    if call.deterministic:
        scalars["deterministic"] = True
    return scalars


def _gradient_dtype(call: Call) -> torch.dtype:
    if kind(call.dqkv_quantizer) == CURRENT or call.dqkv_type is None:
        return call.fake_dtype
    return torch_dtype(call.dqkv_type)


def _gradients(call: Call, dtype: torch.dtype) -> list[torch.Tensor]:
    """dQ, dK, dV: parts of one tensor where q, k and v are."""
    q, k, v = list(shape_of(call.Q)), list(shape_of(call.K)), list(shape_of(call.V))
    name = call.qkv_layout.name
    if "3HD" in name:
        whole = empty([*q[:-2], 3, *q[-2:]], dtype)
        return [whole[..., i, :, :] for i in range(3)]
    if "H3D" in name:
        whole = empty([*q[:-1], 3, q[-1]], dtype)
        return [whole[..., i, :] for i in range(3)]
    query = empty(q, dtype)
    if "2HD" in name:
        both = empty([*k[:-2], 2, *k[-2:]], dtype)
        return [query, both[..., 0, :, :], both[..., 1, :, :]]
    if "H2D" in name:
        both = empty([*k[:-1], 2, k[-1]], dtype)
        return [query, both[..., 0, :], both[..., 1, :]]
    return [query, empty(k, dtype), empty(v, dtype)]


def _as_fp8(call: Call, grad: torch.Tensor) -> Any:
    quantizer = call.dqkv_quantizer
    fields = {
        "data": grad,
        "fp8_scale_inv": empty([1], torch.float32),
        "fp8_dtype": quantizer.dtype,
        "data_transpose": None,
        "quantizer": quantizer,
    }
    return wrap_per_tensor(quantizer, grad.shape, call.fake_dtype, fields)


# --- packed sequences ---


@implements("thd_read_half_tensor")
def _read_half(call: Call) -> torch.Tensor:
    shape = list(call.tensor.shape)
    shape[0 if len(shape) == 3 else 1] //= 2
    out = empty(shape, call.tensor.dtype)
    record("te::thd_read_half_tensor", [call.tensor], [out])
    return out


@implements("thd_read_second_half_lse")
def _read_half_lse(call: Call) -> torch.Tensor:
    length = call.second_half_lse_seqlen or call.lse.shape[-1] // 2
    out = empty([*call.lse.shape[:-1], length], call.lse.dtype)
    record("te::thd_read_second_half_lse", [call.lse], [out])
    return out


@implements("thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction")
def _correction(call: Call) -> None:
    tensors = [value for value in vars(call).values() if isinstance(value, torch.Tensor)]
    record(f"te::{call.name}", tensors, [tensors[0]])
    synthesized(tensors[0])


@implements("thd_get_partitioned_indices")
def _partitioned_indices(call: Call) -> torch.Tensor:
    out = torch.arange(call.total_tokens // call.world_size, dtype=torch.int32, device="cuda")
    record("te::thd_get_partitioned_indices", [call.cu_seqlens], [out])
    return out


@implements("convert_thd_to_bshd")
def _thd_to_bshd(call: Call) -> torch.Tensor:
    out = empty([call.b, call.max_seq_len, *call.tensor.shape[1:]], call.tensor.dtype)
    record("te::convert_thd_to_bshd", [call.tensor], [out])
    return out


@implements("convert_bshd_to_thd")
def _bshd_to_thd(call: Call) -> torch.Tensor:
    out = empty([call.t, *call.tensor.shape[2:]], call.tensor.dtype)
    record("te::convert_bshd_to_thd", [call.tensor], [out])
    return out


@implements("fa_prepare_fwd")
def _prepare_fwd(call: Call) -> torch.Tensor:
    s = call.qkvi.shape
    out = empty([3, s[1], s[0], s[2], s[3]], call.qkvi.dtype)
    record("te::fa_prepare_fwd", [call.qkvi], [out])
    return out


@implements("fa_prepare_bwd")
def _prepare_bwd(call: Call) -> torch.Tensor:
    s = call.q.shape
    out = empty([s[1], s[0], s[2], 3 * s[3]], call.q.dtype)
    record("te::fa_prepare_bwd", [call.q, call.k, call.v], [out])
    return out
