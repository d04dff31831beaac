"""With no limit on real storage the virtual device computes what the CPU computes, to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.device.tensors import host_view, is_shape_only, is_synthesized

DEVICE = "cpu"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.qkv = torch.nn.Linear(64, 192)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)
        self.head = torch.nn.Linear(64, 512)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).view(-1, 512), labels.view(-1))


def test_training_equals_plain_cpu():
    torch.manual_seed(0)
    on_cpu = Block()
    on_device = copy.deepcopy(on_cpu).cuda()
    tokens, labels = torch.randint(0, 512, (2, 4, 32))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=True) for m in (on_cpu, on_device)]
    for _ in range(3):
        expected = on_cpu(tokens, labels)
        got = on_device(tokens.cuda(), labels.cuda())
        assert got.item() == expected.item()
        expected.backward()
        got.backward()
        for p, q in zip(on_cpu.parameters(), on_device.parameters(), strict=True):
            assert torch.equal(host_view(q.grad), p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not get_recorder().stats().synthesized_reads


def test_large_tensors_are_real():
    x = torch.randn(1024, 1024, device="cuda")
    assert not is_shape_only(x)
    expected = host_view(x).double().sum().item()
    assert abs(x.double().sum().item() - expected) < 1e-6
    assert (x > 0).nonzero().shape[0] == int((host_view(x) > 0).sum())


def test_attention_backends_agree_with_the_reference():
    q, k, v = (torch.randn(2, 4, 32, 16, device="cuda", requires_grad=True) for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.sum().backward()
    p, r, s = (host_view(t).clone().requires_grad_() for t in (q, k, v))
    z = F.scaled_dot_product_attention(p, r, s, is_causal=True)
    z.sum().backward()
    assert torch.equal(host_view(y), z.detach())
    assert torch.equal(host_view(q.grad), p.grad)


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_and_its_gradients_agree_with_the_reference(weighted):
    """The fused backward has no CPU kernel in torch."""
    x = torch.randn(3, 5, 16, device="cuda", requires_grad=True)
    weight = torch.randn(16, device="cuda", requires_grad=True) if weighted else None
    y = F.rms_norm(x, (16,), weight)
    (y * y.detach().roll(1)).sum().backward()
    leaves = [t for t in (x, weight) if t is not None]
    copies = [host_view(t).clone().requires_grad_() for t in leaves]
    p, w = copies[0], copies[1] if weighted else None
    z = F.rms_norm(p, (16,), w)
    (z * z.detach().roll(1)).sum().backward()
    torch.testing.assert_close(host_view(y), z.detach())
    for got, expected in zip(leaves, copies, strict=True):
        assert not is_synthesized(got.grad)
        torch.testing.assert_close(host_view(got.grad), expected.grad)
