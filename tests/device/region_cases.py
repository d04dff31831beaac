"""Regions as frameworks compile them, each with inputs, for measuring on a GPU and for planning without one.

Pure torch: the same file runs on a real GPU (``scripts/measure_regions.py``) and in a slice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def swiglu(y):
    a, b = torch.chunk(y, 2, -1)
    return F.silu(a) * b


def swiglu_back(g, y):
    a, b = torch.chunk(y, 2, -1)
    s = torch.sigmoid(a)
    return torch.cat((g * s * (1 + a * (1 - s)) * b, g * F.silu(a)), -1)


def weighted_swiglu(y, weights):
    return (swiglu(y) * weights).to(y.dtype)


def weighted_swiglu_back(g, y, weights):
    weights_grad = torch.sum(swiglu(y) * g.to(weights.dtype), dim=-1, keepdim=True)
    return swiglu_back(g * weights, y).to(y.dtype), weights_grad.to(weights.dtype)


def bias_gelu(bias, y):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def bias_dropout_add(x, bias, residual, prob, training):
    out = x if bias is None else x + bias
    return residual + F.dropout(out, p=prob, training=training)


def bias_dropout_add_inplace(x, bias, residual):
    x.add_(bias)
    out = F.dropout(x, p=0.1, training=False, inplace=True)
    out.add_(residual)
    return out


def logits_max(logits):
    logits = logits.float()
    return logits, torch.max(logits, dim=-1)[0]


def predicted_logits(logits, target, maximum):
    logits -= maximum.unsqueeze(dim=-1)
    mask = (target < 0) | (target >= logits.size(-1))
    masked = target.clone()
    masked[mask] = 0
    flat = logits.view(-1, logits.size(-1))
    rows = torch.arange(start=0, end=flat.size(0), device=flat.device)
    picked = flat[rows, masked.view(-1)].clone().contiguous().view_as(target)
    picked[mask] = 0.0
    exp = logits
    torch.exp(logits, out=exp)
    return mask, masked.view(-1), torch.cat((picked, exp.sum(dim=-1))), exp


def cross_entropy_gradient(softmax, grad_output, mask, masked):
    grad = softmax
    flat = grad.view(-1, softmax.size(-1))
    rows = torch.arange(start=0, end=flat.size(0), device=flat.device)
    update = 1.0 - mask.view(-1).float()
    flat[rows, masked] -= update
    grad.mul_(grad_output.unsqueeze(dim=-1))
    return grad.to(BF16)


def rotary(t, cos, sin):
    a, b = torch.chunk(t, 2, dim=-1)
    return (t * cos) + (torch.cat((-b, a), dim=-1) * sin)


def rms_norm(x, weight):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def mlp(x, up, down):
    return F.gelu(x @ up) @ down


def block(x, weight, up, down):
    h = F.layer_norm(x, (x.size(-1),), weight)
    h = F.dropout(F.gelu(h @ up), 0.1) @ down
    return x + F.dropout(h, 0.1)


def softmax_cross_entropy(logits, target):
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), target.view(-1))


def squared_relu(x):
    return torch.pow(F.relu(x), 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One region: its function, its inputs as (dtype, shape) or constants, and whether it is differentiated."""

    function: Callable
    inputs: tuple
    grad: bool


TOKENS, HIDDEN, FFN, VOCAB = (512, 4), 2048, 5504, 32000
WIDE, GATED, NARROW = (*TOKENS, HIDDEN), (*TOKENS, 2 * FFN), (*TOKENS, FFN)
LOGITS = (512, 2, VOCAB)


def case(function, *inputs, grad=False):
    return Case(function=function, inputs=inputs, grad=grad)


CASES = {
    "swiglu": case(swiglu, (BF16, GATED)),
    "swiglu_back": case(swiglu_back, (BF16, NARROW), (BF16, GATED)),
    "swiglu_grad": case(swiglu, (BF16, GATED), grad=True),
    "weighted_swiglu": case(weighted_swiglu, (BF16, (2048, 2 * FFN)), (F32, (2048, 1))),
    "weighted_swiglu_back": case(
        weighted_swiglu_back, (BF16, (2048, FFN)), (BF16, (2048, 2 * FFN)), (F32, (2048, 1))
    ),
    "bias_gelu_grad": case(bias_gelu, (BF16, (FFN,)), (BF16, NARROW), grad=True),
    "bda_p0": case(bias_dropout_add, (BF16, WIDE), None, (BF16, WIDE), 0.0, True, grad=True),
    "bda_p0.1": case(bias_dropout_add, (BF16, WIDE), None, (BF16, WIDE), 0.1, True, grad=True),
    "bda_bias_p0.1": case(
        bias_dropout_add, (BF16, WIDE), (BF16, (HIDDEN,)), (BF16, WIDE), 0.1, True, grad=True
    ),
    "bda_eval": case(bias_dropout_add, (BF16, WIDE), (BF16, (HIDDEN,)), (BF16, WIDE), 0.1, False),
    "bda_inplace": case(bias_dropout_add_inplace, (BF16, WIDE), (BF16, (HIDDEN,)), (BF16, WIDE)),
    "logits_max": case(logits_max, (BF16, LOGITS)),
    "predicted_logits": case(predicted_logits, (F32, LOGITS), (I64, LOGITS[:2]), (F32, LOGITS[:2])),
    "cross_entropy_gradient": case(
        cross_entropy_gradient, (F32, LOGITS), (F32, LOGITS[:2]), (torch.bool, LOGITS[:2]), (I64, (1024,))
    ),
    "rotary_grad": case(
        rotary, (BF16, (512, 4, 16, 128)), (BF16, (512, 1, 1, 128)), (BF16, (512, 1, 1, 128)), grad=True
    ),
    "rms_norm_grad": case(rms_norm, (BF16, WIDE), (BF16, (HIDDEN,)), grad=True),
    "mlp_grad": case(mlp, (BF16, WIDE), (BF16, (HIDDEN, FFN)), (BF16, (FFN, HIDDEN)), grad=True),
    "block_grad": case(
        block, (BF16, WIDE), (BF16, (HIDDEN,)), (BF16, (HIDDEN, FFN)), (BF16, (FFN, HIDDEN)), grad=True
    ),
    "softmax_cross_entropy_grad": case(softmax_cross_entropy, (BF16, LOGITS), (I64, LOGITS[:2]), grad=True),
    "squared_relu_grad": case(squared_relu, (BF16, NARROW), grad=True),
}


def make_inputs(case: Case) -> list:
    """Tensors on ``cuda`` and constants; float tensors require grad if the case is differentiated."""
    values = []
    for spec in case.inputs:
        if isinstance(spec, tuple):
            dtype, shape = spec
            if dtype.is_floating_point:
                tensor = torch.randn(shape, dtype=dtype, device="cuda").requires_grad_(case.grad)
            else:
                tensor = torch.zeros(shape, dtype=dtype, device="cuda")
            values.append(tensor)
        else:
            values.append(spec)
    return values


def requested(which: str) -> int:
    """Requested bytes of torch's allocator, ``current`` or ``peak``."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def measure(case: Case, compiled: Callable, *, warmup: int = 2) -> dict[str, int]:
    """Requested bytes relative to before the call: live after forward, peak of forward, and the same of backward."""
    for _ in range(warmup + 1):
        gc.collect()  # compiling leaves tensors in reference cycles
        inputs = make_inputs(case)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        outputs = compiled(*inputs)
        result = {"forward_live": requested("current") - before, "forward_peak": requested("peak") - before}
        if case.grad:
            gradient = torch.ones_like(outputs)
            wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.cuda.reset_peak_memory_stats()
            before = requested("current")
            gradients = torch.autograd.grad(outputs, wanted, gradient)
            result["backward_live"] = requested("current") - before
            result["backward_peak"] = requested("peak") - before
            del gradients, gradient, wanted
        del outputs, inputs
    return result
