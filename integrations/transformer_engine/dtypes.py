"""``DType`` of the compiled module, and what it stores tensors of each as."""

from __future__ import annotations

import enum
from typing import Any

import torch


class DType(enum.IntEnum):
    """``transformer_engine::DType`` (common/include/transformer_engine/transformer_engine.h)."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


_STORED_AS = {
    DType.kByte: torch.uint8,
    DType.kInt16: torch.int16,
    DType.kInt32: torch.int32,
    DType.kInt64: torch.int64,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
_FP8_NAMES = {DType.kFloat8E4M3: "float8_e4m3fn", DType.kFloat8E5M2: "float8_e5m2"}


def torch_dtype(dtype: Any) -> torch.dtype:
    """What torch stores a ``DType`` (or a dtype of its own) as; bytes for formats of 8 and 4 bits."""
    return dtype if isinstance(dtype, torch.dtype) else _STORED_AS.get(DType(int(dtype)), torch.uint8)


def fp8_name(dtype: Any) -> str | None:
    """Element type of an FP8 format as torch names it; None for other formats."""
    return _FP8_NAMES.get(DType(int(dtype)))
