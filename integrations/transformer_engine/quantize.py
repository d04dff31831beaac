"""Quantized tensors: what the C++ ``Quantizer`` classes allocate, and the kernels they run.

Source: transformer_engine/pytorch/csrc/quantizer.cpp and extensions/cast.cpp, transpose.cpp, fp8_partial_cast.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prism_plugins.errors import PrismError
from prism_plugins.integration.kernels import dtype_name, empty, product, record
from prism_plugins.integrations.transformer_engine.calls import Call, implements
from prism_plugins.integrations.transformer_engine.dtypes import fp8_name, torch_dtype
from prism_plugins.integrations.transformer_engine.enums import enum_value
from prism_plugins.program.model import TensorSpec

DELAYED = "Float8Quantizer"
CURRENT = "Float8CurrentScalingQuantizer"
MXFP8 = "MXFP8Quantizer"
BLOCK = "Float8BlockQuantizer"

_PER_TENSOR = (DELAYED, CURRENT)
_BLOCK_LENGTH = 128
"""Elements that share a scale along each blocked dimension (Float8BlockQuantizer)."""
_MXFP8_LENGTH = 32


# --- questions about tensors, quantized or not ---


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Logical shape. A tensor that only has its transpose (or columns) left tells it by that."""
    if isinstance(tensor, torch.Tensor):
        return tuple(tensor.shape)
    for name in ("_data", "_rowwise_data"):
        if getattr(tensor, name, None) is not None:
            return tuple(getattr(tensor, name).shape)
    for name in ("_transpose", "_columnwise_data"):
        data = getattr(tensor, name, None)
        if data is not None:
            compact = getattr(getattr(tensor, "_data_format", None), "name", "") == "COMPACT"
            rotated = name == "_transpose" or ("Blockwise" in type(tensor).__name__ and not compact)
            return (*data.shape[1:], data.shape[0]) if rotated else tuple(data.shape)
    return tuple(tensor.size())


def element_type(tensor: Any) -> str:
    """Name of the type of the stored elements: ``bfloat16``, ``float8_e4m3fn``, …"""
    fp8_dtype = getattr(tensor, "_fp8_dtype", None)
    if fp8_dtype is not None:
        return fp8_name(fp8_dtype) or "uint8"
    return dtype_name(tensor.dtype)


def is_quantized(tensor: Any) -> bool:
    """Whether the elements are stored in 8 bits."""
    return getattr(tensor, "_fp8_dtype", None) is not None


def is_per_tensor(tensor: Any) -> bool:
    """Whether one scale serves the whole tensor (delayed and current scaling)."""
    return is_quantized(tensor) and hasattr(tensor, "_transpose")


def nominal_dtype(tensor: Any) -> torch.dtype:
    """The dtype that a quantized tensor stands for."""
    if isinstance(tensor, torch.Tensor):
        return tensor.dtype
    return getattr(tensor, "_dtype", None) or torch.bfloat16


def kind(quantizer: Any) -> str:
    """Class name of a quantizer; empty for None."""
    return "" if quantizer is None else type(quantizer).__name__


# --- making quantized tensors ---


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """``Quantizer::create_tensor``: the tensor that a kernel is going to fill. None makes a plain tensor."""
    shape = [int(n) for n in shape]
    name = kind(quantizer)
    if quantizer is None:
        return empty(shape, dtype)
    if name in _PER_TENSOR:
        return _create_per_tensor(quantizer, shape, dtype)
    if name == BLOCK:
        return _create_block(quantizer, shape, dtype)
    if name == MXFP8:
        return _create_mxfp8(quantizer, shape, dtype)
    raise PrismError(f"Transformer Engine's {name} is not emulated yet")


def _needs(quantizer: Any) -> tuple[bool, bool]:
    """Whether a per-tensor scaled tensor keeps its data and its transpose. Blackwell multiplies any layout and needs
    no transpose (``nvte_is_non_tn_fp8_gemm_supported``)."""
    any_layout = torch.cuda.get_device_capability() >= (10, 0)
    return quantizer.rowwise_usage or any_layout, quantizer.columnwise_usage and not any_layout


def _create_per_tensor(quantizer: Any, shape: list[int], dtype: torch.dtype) -> Any:
    with_data, with_transpose = _needs(quantizer)
    scale_inv = empty([1], torch.float32) if kind(quantizer) == DELAYED else None
    data = empty(shape, torch.uint8) if with_data else None
    transpose = empty([shape[-1], *shape[:-1]], torch.uint8) if with_transpose else None
    if scale_inv is None:
        scale_inv = empty([1], torch.float32)
    fields = {
        "data": data,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": transpose,
        "quantizer": quantizer,
    }
    return wrap_per_tensor(quantizer, shape, dtype, fields)


def wrap_per_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    """The Python object around the buffers of a per-tensor scaled tensor."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    if quantizer.internal:
        return _storage_class(Float8Tensor)(**fields)
    return Float8Tensor(shape=list(shape), dtype=dtype, **fields)


def _create_block(quantizer: Any, shape: list[int], dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    fields: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if quantizer.rowwise_usage:
        fields["rowwise_data"] = empty(shape, torch.uint8)
        fields["rowwise_scale_inv"] = empty(block_scale_shape(quantizer, shape, False), torch.float32)
    if quantizer.columnwise_usage:
        fields["columnwise_data"] = empty(_block_columns(quantizer, shape), torch.uint8)
        fields["columnwise_scale_inv"] = empty(block_scale_shape(quantizer, shape, True), torch.float32)
    fields |= {
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
    }
    if is_compact(quantizer) is not None:
        name = "COMPACT" if is_compact(quantizer) else "GEMM_READY"
        fields["data_format"] = enum_value("Float8BlockScaleTensorFormat", name)
    return _wrap(Float8BlockwiseQTensor, quantizer, shape, dtype, fields)


def _create_mxfp8(quantizer: Any, shape: list[int], dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

    rows, columns = product(shape[:-1]), shape[-1]
    fields: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if quantizer.rowwise_usage:
        fields["rowwise_data"] = empty(shape, torch.uint8)
        scales = [_round_up(rows, 128), _round_up(columns // _MXFP8_LENGTH, 4)]
        fields["rowwise_scale_inv"] = empty(scales, torch.uint8)
    if quantizer.columnwise_usage:
        fields["columnwise_data"] = empty(shape, torch.uint8)
        scales = [_round_up(rows // _MXFP8_LENGTH, 4), _round_up(columns, 128)]
        fields["columnwise_scale_inv"] = empty(scales, torch.uint8)
    fields |= {
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": bool(getattr(quantizer, "optimize_for_gemm", False)),
    }
    return _wrap(MXFP8Tensor, quantizer, shape, dtype, fields)


def is_compact(quantizer: Any) -> bool | None:
    """Up to 2.11: whether a blockwise scaled tensor is to be gathered, and neither columns nor scales are transposed;
    None in versions without that format."""
    return getattr(quantizer, "all_gather_usage", None)


def _block_columns(quantizer: Any, shape: list[int]) -> list[int]:
    return list(shape) if is_compact(quantizer) else [shape[-1], *shape[:-1]]


def block_scale_shape(quantizer: Any, shape: Sequence[int], columnwise: bool) -> list[int]:
    """``Float8BlockQuantizer::get_scale_shape``."""
    k = shape[-1] if shape else 1
    m = product(shape) // max(1, k)
    if columnwise:
        m, k = k, m
    if quantizer.block_scaling_dim == 2:
        return [_blocks(m), _round_up(_blocks(k), 4)]
    if is_compact(quantizer):
        return [_blocks(k), m] if columnwise else [m, _blocks(k)]
    return [_blocks(k), _round_up(m, 4)]


def _wrap(cls: Any, quantizer: Any, shape: list[int], dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    """The Python object around buffers; fields that this version does not know are left out."""
    target = _storage_class(cls) if quantizer.internal else cls
    known = _parameters(target)
    fields = {name: value for name, value in fields.items() if known is None or name in known}
    return target(**fields) if quantizer.internal else target(shape=shape, dtype=dtype, **fields)


def _parameters(cls: Any) -> set[str] | None:
    """Names that the constructor of a tensor class of TE takes."""
    import inspect

    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("transformer_engine") and "__new__" in vars(base):
            names |= set(inspect.signature(base.__new__).parameters)
    return names or None


def _storage_class(cls: Any) -> Any:
    """The class without autograd: the nearest base that is no tensor and holds the buffers."""
    return next(
        base for base in cls.__mro__[1:] if not issubclass(base, torch.Tensor) and "__new__" in vars(base)
    )


def update(quantizer: Any, tensor: Any) -> Any:
    """``convert_and_update_tensor``: make the buffers of an existing tensor match what the quantizer asks for."""
    if quantizer is None or not is_quantized(tensor):
        return tensor
    shape = list(shape_of(tensor))
    if is_per_tensor(tensor):
        need_data, need_transpose = _needs(quantizer)
        _coerce(tensor, "_data", need_data, shape, torch.uint8)
        _coerce(tensor, "_transpose", need_transpose, [shape[-1], *shape[:-1]], torch.uint8)
        tensor._transpose_invalid = not need_transpose
        tensor._fp8_dtype = quantizer.dtype
        return tensor
    rows, columns = product(shape[:-1]), shape[-1]
    if kind(quantizer) == BLOCK:
        scales = [block_scale_shape(quantizer, shape, c) for c in (False, True)]
        column_shape, scale_dtype = _block_columns(quantizer, shape), torch.float32
    else:
        scales = [
            [_round_up(rows, 128), _round_up(columns // _MXFP8_LENGTH, 4)],
            [_round_up(rows // _MXFP8_LENGTH, 4), _round_up(columns, 128)],
        ]
        column_shape, scale_dtype = shape, torch.uint8
    _coerce(tensor, "_rowwise_data", quantizer.rowwise_usage, shape, torch.uint8)
    _coerce(tensor, "_rowwise_scale_inv", quantizer.rowwise_usage, scales[0], scale_dtype)
    _coerce(tensor, "_columnwise_data", quantizer.columnwise_usage, column_shape, torch.uint8)
    _coerce(tensor, "_columnwise_scale_inv", quantizer.columnwise_usage, scales[1], scale_dtype)
    return tensor


def _coerce(tensor: Any, name: str, needed: bool, shape: Sequence[int], dtype: torch.dtype) -> None:
    present = getattr(tensor, name, None) is not None
    if present and not needed:
        setattr(tensor, name, None)
    elif needed and not present:
        setattr(tensor, name, empty(shape, dtype))


# --- kernels ---


def run(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *, compute_amax: bool = True) -> None:
    """The kernels of ``Quantizer::quantize``. Current scaling first finds the largest value (over the group that
    shares the tensor, if any), then casts."""
    source = TensorSpec(dtype_name(dtype), tuple(shape), ())
    if not source.numel:
        return
    if kind(quantizer) == CURRENT:
        amax = TensorSpec("float32", (1,), ())
        if compute_amax:
            record("te::compute_amax", [source], [amax])
        if getattr(quantizer, "with_amax_reduction", False):
            group = quantizer._canonicalized_amax_reduction_group()
            # From 2.16 on the quantizer keeps no buffer for it.
            largest = getattr(quantizer, "amax", None)
            largest = empty([1], torch.float32) if largest is None else largest
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        record("te::compute_scale_from_amax", [amax], [amax])
    record("te::quantize", [source], quantized_specs(quantizer, shape), recipe=recipe_name(quantizer))


def quantized_specs(quantizer: Any, shape: Sequence[int]) -> list[TensorSpec]:
    """Geometry of what a quantization writes: data, and its transpose or columns."""
    name = fp8_name(quantizer.dtype) or "uint8"
    rowwise, columnwise = (
        _needs(quantizer)
        if kind(quantizer) in _PER_TENSOR
        else (quantizer.rowwise_usage, quantizer.columnwise_usage)
    )
    return [TensorSpec(name, tuple(shape), ())] * (bool(rowwise) + bool(columnwise))


def recipe_name(quantizer: Any) -> str:
    """``delayed``, ``current``, ``block``, ``mxfp8``."""
    return {DELAYED: "delayed", CURRENT: "current", BLOCK: "block", MXFP8: "mxfp8"}.get(
        kind(quantizer), kind(quantizer)
    )


def is_fused_with(quantizer: Any, *, mxfp8: bool = False) -> bool:
    """Whether a norm (or, with ``mxfp8``, an activation) writes the quantized output itself."""
    return quantizer is None or kind(quantizer) == DELAYED or (mxfp8 and kind(quantizer) == MXFP8)


@implements("quantize")
def _quantize(call: Call) -> Any:
    tensor, quantizer = call.tensor, call.quantizer
    out = (
        create(quantizer, tensor.shape, tensor.dtype)
        if call.output is None
        else update(quantizer, call.output)
    )
    has_amax = bool(getattr(quantizer, "use_existing_amax", False))
    run(quantizer, tensor.shape, tensor.dtype, compute_amax=not has_amax)
    return out


@implements("create_empty_quantized_tensor")
def _create_empty(call: Call) -> Any:
    return create(call.quantizer, call.shape, call.dtype)


@implements("bulk_allocate")
def _bulk_allocate(call: Call) -> list[torch.Tensor]:
    """Views of one buffer."""
    sizes = [product(shape) * dtype.itemsize for shape, dtype in zip(call.shapes, call.dtypes, strict=True)]
    alignments = call.alignments or [dtype.itemsize for dtype in call.dtypes]
    offsets, end = [], 0
    for size, alignment in zip(sizes, alignments, strict=True):
        offsets.append(_round_up(end, alignment))
        end = offsets[-1] + size
    buffer = empty([end + max(alignments, default=0)], torch.uint8)
    return [
        buffer[offset : offset + size].view(dtype).view(tuple(shape))
        for offset, size, dtype, shape in zip(offsets, sizes, call.dtypes, call.shapes, strict=True)
    ]


@implements("dequantize")
def _dequantize(call: Call) -> Any:
    out = empty(shape_of(call.input), torch_dtype(call.otype))
    record("te::dequantize", [TensorSpec(element_type(call.input), tuple(out.shape), ())], [out])
    return out


@implements("bgrad_quantize")
def _bgrad_quantize(call: Call) -> Any:
    grad, quantizer = call.first(), call.quantizer
    bias = empty([grad.shape[-1]], grad.dtype)
    if quantizer is None:
        record("te::bias_grad", [grad], [bias])
        return [bias, grad]
    out = create(quantizer, grad.shape, grad.dtype)
    fused = kind(quantizer) == MXFP8 or (
        kind(quantizer) == DELAYED
        and (
            torch.cuda.get_device_capability() >= (10, 0)
            or (quantizer.rowwise_usage and quantizer.columnwise_usage)
        )
    )
    if fused:
        record("te::bgrad_quantize", [grad], [*quantized_specs(quantizer, grad.shape), bias])
    else:
        record("te::bias_grad", [grad], [bias])
        run(quantizer, grad.shape, grad.dtype)
    return [bias, out]


@implements("multi_tensor_quantize")
def _multi_tensor_quantize(call: Call) -> list[Any]:
    pairs = list(zip(call.tensor_list, call.quantizer_list, strict=True))
    outs = [create(quantizer, tensor.shape, tensor.dtype) for tensor, quantizer in pairs]
    for tensor, quantizer in pairs:
        run(quantizer, tensor.shape, tensor.dtype)
    return outs


@implements("split_quantize")
def _split_quantize(call: Call) -> list[Any]:
    rest = list(call.tensor.shape[1:])
    pairs = list(zip(call.split_sections, call.quantizer_list, strict=True))
    outs = [create(quantizer, [n, *rest], call.tensor.dtype) for n, quantizer in pairs]
    for n, quantizer in pairs:
        run(quantizer, [n, *rest], call.tensor.dtype)
    return outs


@implements("fp8_transpose")
def _fp8_transpose(call: Call) -> torch.Tensor:
    shape = list(call.input.shape)
    out = call.out if call.out is not None else call.output
    if out is None:
        out = empty([shape[-1], *shape[:-1]], torch.uint8)
    record("te::fp8_transpose", [call.input], [out])
    return out


@implements("swap_first_dims")
def _swap_first_dims(call: Call) -> torch.Tensor:
    shape = list(call.tensor.shape)
    shape[0], shape[1] = shape[1], shape[0]
    out = call.out if call.out is not None else empty(shape, call.tensor.dtype)
    record("te::swap_first_dims", [call.tensor], [out])
    return out


@implements("compute_amax")
def _compute_amax(call: Call) -> None:
    record("te::compute_amax", [call.first()], [call.amax] if call.amax is not None else [])


@implements("fused_amax_and_scale_update_after_reduction")
def _amax_and_scale_update(call: Call) -> None:
    record("te::amax_and_scale_update", [call.amax_reduction_buffer, *call.amax_histories], list(call.scales))


@implements(
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
)
def _partial(call: Call) -> None:
    tensors = [value for value in vars(call).values() if isinstance(value, torch.Tensor)]
    record(f"te::{call.name}", tensors)


@implements("swizzle_scales_for_gemm_")
def _swizzle(call: Call) -> None:
    tensor = call.first()
    scales = [
        s for s in (getattr(tensor, f"_{d}wise_scale_inv", None) for d in ("row", "column")) if s is not None
    ]
    for scale in scales:
        record("te::swizzle_scales", [scale], [scale])
    tensor._with_gemm_swizzled_scales = True


def _blocks(n: int) -> int:
    return -(-n // _BLOCK_LENGTH)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
