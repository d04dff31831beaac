"""Matrix products: ``generic_gemm`` and the grouped one of experts.

Source: transformer_engine/pytorch/csrc/extensions/gemm.cpp. cuBLAS is column-major, so D = op(B) @ op(A) in the row-major
terms used here: rows are tokens, and an op is recorded as torch's ``mm`` of the same operands would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from prism_plugins.integration.kernels import Operand, empty, matrix, product, record, synthesized
from prism_plugins.integrations.transformer_engine import userbuffers
from prism_plugins.integrations.transformer_engine.calls import Call, implements
from prism_plugins.integrations.transformer_engine.dtypes import torch_dtype
from prism_plugins.integrations.transformer_engine.quantize import (
    DELAYED,
    create,
    element_type,
    is_per_tensor,
    is_quantized,
    kind,
    nominal_dtype,
    run,
    shape_of,
)
from prism_plugins.program.model import TensorSpec


class Sizes(NamedTuple):
    """D (rows, columns) = op(B) (rows, inner) @ op(A) (inner, columns)."""

    rows: int
    columns: int
    inner: int
    out_shape: tuple[int, ...]


def sizes_of(a: Any, transa: bool, b: Any, transb: bool) -> Sizes:
    """Sizes of a product. Raises ValueError where the inner ones differ, as cuBLAS would refuse."""
    a_shape, b_shape = shape_of(a), shape_of(b)
    a0, a1, b0, b1 = product(a_shape[:-1]), a_shape[-1], product(b_shape[:-1]), b_shape[-1]
    columns, inner = (a0, a1) if transa else (a1, a0)
    rows, inner_b = (b1, b0) if transb else (b0, b1)
    if inner != inner_b:
        raise ValueError(f"GEMM of {a_shape} (transposed: {transa}) and {b_shape} (transposed: {transb})")
    leading = (b1,) if transb else b_shape[:-1]
    return Sizes(rows, columns, inner, (*leading, columns))


def operands(a: Any, transa: bool, b: Any, transb: bool, sizes: Sizes) -> list[TensorSpec]:
    """op(B) and op(A) as they lie in memory. Hopper multiplies FP8 in one layout only, from transposed copies."""
    if is_quantized(a) or is_quantized(b):
        transa, transb = True, False
    scales = [TensorSpec("float32", (), ())] * 2 if is_quantized(a) else []
    return [
        matrix(sizes.rows, sizes.inner, element_type(b), transposed=transb),
        matrix(sizes.inner, sizes.columns, element_type(a), transposed=transa),
        *scales,
    ]


@implements("generic_gemm")
def _generic_gemm(call: Call) -> list[Any]:
    a, b, quantizer, grad = call.A, call.B, call.quantizer, bool(call.grad)
    sizes = sizes_of(a, call.transA, b, call.transB)
    dtype = torch_dtype(call.output_dtype) if call.output_dtype is not None else nominal_dtype(a)
    out = create(quantizer, sizes.out_shape, dtype) if call.D is None else call.D
    low_precision = is_quantized(a) or is_quantized(b)
    writes_fp8 = kind(quantizer) == DELAYED and (is_per_tensor(a) or is_per_tensor(b))
    unquantized = None
    if quantizer is not None and not writes_fp8:
        unquantized = empty(sizes.out_shape, dtype)
    result = unquantized if unquantized is not None else out
    bias_grad = None
    if call.bias is not None and grad:
        bias_grad = empty([shape_of(b)[-1]], nominal_dtype(result))
    pre_gelu = call.gelu_in
    if call.gelu and not grad:
        pre_gelu = empty(
            sizes.out_shape, torch_dtype(call.bias_type) if low_precision else nominal_dtype(result)
        )
    layout = ("T" if call.transA else "N") + ("T" if call.transB else "N")
    overlap = userbuffers.begin(call)
    if product(sizes[:3]):
        inputs = operands(a, call.transA, b, call.transB, sizes)
        _record_gemm(call, inputs, result, layout, low_precision)
    elif isinstance(out, torch.Tensor) and out.numel() and not call.accumulate:
        out.zero_()
    userbuffers.end(overlap)
    if isinstance(result, torch.Tensor) and not is_quantized(result):
        synthesized(result)
    if unquantized is not None:
        run(quantizer, sizes.out_shape, dtype)
    return [out, bias_grad, pre_gelu if call.gelu and not grad else None, call.extra_output]


def _record_gemm(call: Call, inputs: list[TensorSpec], result: Any, layout: str, fp8: bool) -> None:
    scalars: dict[str, Any] = {"layout": layout}
    scalars |= {
        name: True
        for name, given in (
            ("accumulate", call.accumulate),
            ("bias", call.bias is not None and not call.grad),
            ("bias_grad", call.bias is not None and call.grad),
            ("gelu", call.gelu),
            ("split_accumulator", fp8 and call.use_split_accumulator),
        )
        if given
    }
    shape = (inputs[0].shape[0], inputs[1].shape[1])
    out = TensorSpec(element_type(result), shape, ())
    record("te::fp8_gemm" if fp8 else "te::gemm", inputs, [out], **scalars)


@implements("te_general_grouped_gemm")
def _grouped_gemm(call: Call) -> Any:
    """One GEMM an expert, over a few streams. Outputs are given, or made one by one."""
    outs = list(call.D) if call.D is not None else None
    single = bool(call.single_output)
    dtype = torch_dtype(call.D_type)
    inputs: list[Operand] = []
    results: list[Operand] = []
    counts: list[int] = []
    made: list[torch.Tensor] = []
    fp8 = False
    for i, (a, b) in enumerate(zip(call.A, call.B, strict=True)):
        sizes = sizes_of(a, call.transa, b, call.transb)
        if outs is None:
            made.append(empty(sizes.out_shape, dtype))
        if not product(sizes[:3]):
            out = made[-1] if outs is None else None if single else outs[i]
            if out is not None and out.numel() and not call.accumulate:
                out.zero_()
            continue
        fp8 = fp8 or is_quantized(a)
        inputs += operands(a, call.transa, b, call.transb, sizes)[:2]
        results.append(TensorSpec(_result_type(outs, i, single, dtype), (sizes.rows, sizes.columns), ()))
        counts.append(sizes.rows)
    for out in outs or ():
        synthesized(out)
    if inputs:
        layout = ("T" if call.transa else "N") + ("T" if call.transb else "N")
        flags = {"accumulate": True} if call.accumulate else {}
        record("te::fp8_grouped_gemm" if fp8 else "te::grouped_gemm", inputs, results, layout=layout, **flags)
    return call.bias


def _result_type(outs: Sequence[torch.Tensor] | None, i: int, single: bool, dtype: torch.dtype) -> str:
    dtype = dtype if outs is None else outs[0 if single else i].dtype
    return str(dtype).removeprefix("torch.")


@implements("get_num_cublas_streams")
def _num_cublas_streams(call: Call) -> int:
    """Four by default (common/util/multi_stream.cpp)."""
    return 4
