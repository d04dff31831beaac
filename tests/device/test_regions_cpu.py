"""On the cpu device a compiled region really computes, at any size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

DEVICE = "cpu"


def setup():
    if "regions_setup" not in sys.modules:
        path = Path(__file__).parent / "regions_setup.py"
        spec = importlib.util.spec_from_file_location("regions_setup", path)
        sys.modules["regions_setup"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["regions_setup"])
    return sys.modules["regions_setup"]


def block(x, weight, up, down):
    h = F.layer_norm(x, (x.size(-1),), weight)
    return x + F.gelu(h @ up) @ down


def test_training_through_a_region_equals_plain_cpu():
    setup()
    torch.manual_seed(0)
    values = [torch.randn(64, 128), torch.ones(128), torch.randn(128, 256), torch.randn(256, 128)]
    plain = [v.clone().requires_grad_() for v in values]
    virtual = [v.to("cuda").requires_grad_() for v in values]
    compiled = torch.compile(block)
    for _ in range(2):
        for tensor in (*plain, *virtual):
            tensor.grad = None
        expected = block(*plain).square().sum()
        actual = compiled(*virtual).square().sum()
        expected.backward()
        actual.backward()
    torch.testing.assert_close(actual.item(), expected.item())
    for ours, theirs in zip(virtual, plain, strict=True):
        # Elements are sums of large terms that cancel: rounding is relative to the largest, not to each.
        torch.testing.assert_close(
            ours.grad.cpu(), theirs.grad, rtol=0, atol=1e-5 * theirs.grad.abs().max().item()
        )


def test_extern_kernels_do_not_change_inputs_twice():
    setup()

    def accumulate(total, index, x):
        total.index_put_((index,), x @ x.t(), accumulate=True)
        return total.sum()

    total, x = torch.zeros(512, 512), torch.randn(512, 64)
    index = torch.arange(512)
    virtual = total.to("cuda")
    result = torch.compile(accumulate)(virtual, index.to("cuda"), x.to("cuda"))
    torch.testing.assert_close(virtual.cpu(), x @ x.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.item(), (x @ x.t()).sum().item(), rtol=1e-3, atol=1e-3)
