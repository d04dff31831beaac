"""Multi-tensor kernels of optimizers and gradient clipping: one launch over lists of tensors.

Source: transformer_engine/pytorch/csrc/extensions/multi_tensor/.
"""

from __future__ import annotations

import torch

from prism_plugins.integration.kernels import empty, record, record_adam, record_scale, record_sgd, zeros
from prism_plugins.integrations.transformer_engine.calls import Call, implements

_CHUNKS_PER_LAUNCH = 320
"""Rows of partial sums (common/multi_tensor/multi_tensor_apply.cuh)."""


@implements("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")
def _l2norm(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = call.tensor_lists[0]
    partial = zeros([_CHUNKS_PER_LAUNCH], torch.float32)
    result = empty([1], torch.float32)
    per_tensor = bool(call.per_tensor if call.per_tensor is not None else call.per_tensor_python)
    if per_tensor:
        chunks = max(-(-tensor.numel() // call.chunk_size) for tensor in tensors)
        partial_per_tensor = zeros([len(tensors) * chunks], torch.float32)
    else:
        partial_per_tensor = empty([0], torch.float32)
    result_per_tensor = empty([len(tensors) if per_tensor else 0], torch.float32)
    record(f"te::{call.name}", tensors)
    del partial, partial_per_tensor
    return result, result_per_tensor


@implements(
    "multi_tensor_adam",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
)
def _adam(call: Call) -> None:
    record_adam(f"te::{call.name}", call.tensor_lists)


@implements("multi_tensor_sgd")
def _sgd(call: Call) -> None:
    record_sgd("te::multi_tensor_sgd", call.tensor_lists)


@implements("multi_tensor_scale", "multi_tensor_scale_tensor")
def _scale(call: Call) -> None:
    record_scale(f"te::{call.name}", call.tensor_lists)


@implements("multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0")
def _compute_scale(call: Call) -> None:
    sources, *targets = call.tensor_lists
    record(f"te::{call.name}", sources, [tensor for tensors in targets for tensor in tensors])
