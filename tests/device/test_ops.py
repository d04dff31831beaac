"""What training scripts do on a GPU runs on the virtual one: shapes, devices, control flow."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

DEVICE = "virtual"
HALF = {"device": "cuda", "dtype": torch.bfloat16}
VOCABULARY, WIDTH, HEADS = 32000, 1024, 16


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.dropout = torch.nn.Dropout(0.125)

    def block(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.dropout(self.out(y))
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, tokens, labels, checkpoint=None):
        x = self.embedding(tokens)
        for _ in range(2):
            if checkpoint is None:
                x = self.block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=checkpoint)
        return F.cross_entropy(self.head(x).float().view(-1, VOCABULARY), labels.view(-1))


def setup():
    model = Gpt().to(**HALF)
    tokens = torch.randint(0, VOCABULARY, (4, 512), device="cuda")
    labels = torch.randint(0, VOCABULARY, (4, 512)).cuda()
    return model, tokens, labels


@pytest.mark.parametrize("checkpoint", [None, True, False])
def test_forward_and_backward(checkpoint):
    model, tokens, labels = setup()
    loss = model(tokens, labels, checkpoint)
    loss.backward()
    assert loss.device == torch.device("cuda", 0)
    for p in model.parameters():
        assert p.grad.shape == p.shape
        assert p.grad.device == p.device


def test_backward_on_a_side_stream():
    model, tokens, labels = setup()
    with torch.cuda.stream(torch.cuda.Stream()):
        model(tokens, labels).backward()
    assert model.head.weight.grad.is_cuda


@pytest.mark.parametrize(
    "options",
    [{}, {"foreach": True}, {"fused": True}, {"foreach": False}, {"capturable": True, "foreach": True}],
    ids=str,
)
def test_adamw(options):
    model, tokens, labels = setup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    for _ in range(2):
        model(tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model.head.weight]
    assert state["exp_avg"].shape == model.head.weight.shape
    assert state["exp_avg"].is_cuda
    assert state["step"].item() == 2


def test_sgd_and_gradient_clipping():
    model, tokens, labels = setup()
    model(tokens, labels).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert norm > 0
    assert norm < float("inf")
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True).step()


def test_small_tensors_are_computed():
    assert torch.tensor([1.0, 2.0], device="cuda").sum().item() == 3.0
    a = torch.arange(12, device="cuda").view(3, 4)
    assert a[1].tolist() == [4, 5, 6, 7]
    assert a[a > 5].tolist() == [6, 7, 8, 9, 10, 11]
    assert a[torch.tensor([0, 2], device="cuda")][:, 1].tolist() == [1, 9]
    assert a.nonzero().shape == (11, 2)
    assert torch.sort(torch.tensor([3, 1, 2], device="cuda")).values.tolist() == [1, 2, 3]
    assert torch.topk(torch.tensor([3.0, 1.0, 2.0], device="cuda"), 2).indices.tolist() == [0, 2]
    assert torch.equal(a, a.clone())
    assert not torch.equal(a, a + 1)
    assert torch.unique(torch.tensor([1, 1, 2], device="cuda")).tolist() == [1, 2]
    assert torch.bincount(torch.tensor([1, 1, 2], device="cuda")).tolist() == [0, 2, 1]
    assert torch.repeat_interleave(torch.tensor([1, 2], device="cuda")).tolist() == [0, 1, 1]
    assert torch.linspace(0, 1, 3, device="cuda").tolist() == [0, 0.5, 1]


def test_indexing_of_large_tensors():
    b = torch.randn(8192, 1024, device="cuda")
    rows = torch.tensor([1, 2], device="cuda")
    assert b[torch.randint(0, 8192, (100,), device="cuda")].shape == (100, 1024)
    assert b.index_select(0, rows).shape == (2, 1024)
    b[3] = 1
    b[rows] = 0
    b[b > 0] = 0.5
    b.index_add_(0, rows, torch.randn(2, 1024, device="cuda"))
    b.index_put_((rows,), torch.randn(2, 1024, device="cuda"), accumulate=True)
    b.scatter_(1, torch.zeros(8192, 1, dtype=torch.long, device="cuda"), 1.0)
    b.masked_fill_(b > 0, 0)
    assert torch.topk(b, 4).values.shape == (8192, 4)
    assert torch.sort(b, dim=1).indices.shape == b.shape
    assert torch.gather(b, 1, torch.zeros(8192, 1, dtype=torch.long, device="cuda")).shape == (8192, 1)
    assert torch.cat([b, b]).shape == (16384, 1024)
    assert torch.where(b > 0, b, 0.0).shape == b.shape
    assert torch.cumsum(b, 0).shape == b.shape
    assert torch.einsum("ij,kj->ik", b[:2048], b[:2048]).shape == (2048, 2048)
    assert torch.linalg.norm(b).item() == 1.0


def test_sizes_that_depend_on_unknown_values_follow_the_policy():
    b = torch.randn(8192, 1024, device="cuda")
    assert b[b > 0].shape == (b.numel() // 2,)
    assert (b > 0).nonzero().shape == (b.numel() // 2, 2)
    assert torch.masked_select(b, b > 0).shape == (b.numel() // 2,)
    assert b[(b > 0).any(dim=1)].shape == (4096, 1024)


def test_reading_unknown_values_gives_finite_ones():
    b = torch.randn(4096, 4096, device="cuda")
    assert b.sum().item() == 1.0
    assert bool(torch.isnan(b).any()) is False
    assert b.argmax().item() == 0
    assert b[0, :3].tolist() == [1.0, 1.0, 1.0]


def test_autocast_and_grad_scaler():
    layer = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(torch.randn(8, 1024, device="cuda"))
    assert y.dtype == torch.bfloat16
    scaler.scale(y.float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0


def grad_name(shape, *, mask=None, dtype=torch.bfloat16, causal=False):
    q = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=causal)
    y.sum().backward()
    assert q.grad.shape == q.shape
    return type(y.grad_fn).__name__


def test_attention_kernels_are_those_of_the_gpu():
    big = (2, 16, 512, 64)
    mask = torch.zeros(512, 512, **HALF)
    assert "CudnnAttention" in grad_name(big, causal=True)
    assert "CudnnAttention" in grad_name(big, mask=mask)
    assert "FlashAttention" in grad_name((2, 16, 512, 256), causal=True)  # wider than cuDNN takes
    assert "EfficientAttention" in grad_name(big, dtype=torch.float32)
    assert "Attention" not in grad_name((2, 16, 512, 63), dtype=torch.float32)  # math
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert "FlashAttention" in grad_name(big, causal=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert "EfficientAttention" in grad_name(big, mask=mask)


def test_dropout_conv_and_recurrence():
    x = torch.ones(4096, 4096, requires_grad=True, **HALF)
    y = F.dropout(x, 0.1)
    assert type(y.grad_fn).__name__ == "NativeDropoutBackward0"
    y.sum().backward()
    z = torch.nn.Conv2d(3, 64, 7, 2, 3).cuda()(torch.randn(2, 3, 224, 224, device="cuda"))
    assert z.shape == (2, 64, 112, 112)
    torch.nn.BatchNorm2d(64).cuda()(z).sum().backward()
    h, _ = torch.nn.LSTM(64, 128).cuda()(torch.randn(10, 4, 64, device="cuda"))
    h.sum().backward()
    assert h.shape == (10, 4, 128)


def test_foreach():
    with torch.no_grad():
        tensors = [torch.randn(n, 1024, device="cuda") for n in (1, 100, 1000)]
        torch._foreach_mul_(tensors, 0.9)
        torch._foreach_copy_(tensors, [t.clone() for t in tensors])
        norms = torch._foreach_norm(tensors)
    assert [n.shape for n in norms] == [()] * 3
    assert norms[0].item() > 0


def test_float8_matmul():
    a = torch.empty(1024, 1024, device="cuda", dtype=torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    y = torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    assert y.shape == (1024, 1024)
    assert y.dtype == torch.bfloat16


def test_out_variants_resize_and_write():
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    big = torch.empty(0, device="cuda")
    torch.mul(torch.randn(1000, 1000, device="cuda"), 2, out=big)
    assert big.shape == (1000, 1000)
    assert torch.arange(5, device="cuda").tolist() == [0, 1, 2, 3, 4]
    assert torch.arange(100_000, device="cuda").shape == (100_000,)


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_storages():
    x = torch.randn(8, 8, device="cuda")
    x.data = torch.zeros(8, 8, device="cuda")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(256)
    assert x.untyped_storage().nbytes() == 256
    y = torch.empty(0, device="cuda").set_(torch.arange(6.0, device="cuda").untyped_storage(), 2, (2, 2))
    assert y.tolist() == [[2, 3], [4, 5]]
    flat = torch.zeros(2**20, device="cuda")
    assert flat[512:].data_ptr() - flat.data_ptr() == 512 * 4
    assert torch.empty(1000, device="cuda").data_ptr() % 16 == 0


def test_save_and_load():
    model, _, _ = setup()
    model.norm.weight.data.fill_(3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    on_host = torch.load(file, map_location="cpu")
    assert on_host["norm.weight"][0].item() == 3
    file.seek(0)
    back = torch.load(file)
    assert back["norm.weight"].is_cuda
    assert back["norm.weight"][0].item() == 3


def test_tensors_on_another_device_of_the_node():
    x = torch.empty(3, device="cuda:1")
    assert x.device == torch.device("cuda", 1)
    assert (x + 1).device == x.device
    with torch.cuda.device(2):
        assert torch.empty(1, device="cuda").device.index == 2
    assert torch.cuda.current_device() == 0


def test_inference_mode_and_views():
    with torch.inference_mode():
        x = torch.randn(512, 512, device="cuda")
        y = x.t()[1:].unsqueeze(0).expand(3, -1, -1)
        assert (y @ x).shape == (3, 511, 512)
    z = torch.view_as_complex(torch.randn(1024, 1024, 2, device="cuda"))
    assert torch.view_as_real(z * z).shape == (1024, 1024, 2)


def test_an_operator_without_shapes_says_so():
    library = torch.library.Library("prism_test", "FRAGMENT")
    library.define("no_meta(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=r"prism_test::no_meta.*Float\[1024, 1024\].*register_fake"):
        torch.ops.prism_test.no_meta(torch.randn(1024, 1024, device="cuda"))


def test_what_is_too_large_to_be_kept_is_computed_only_once():
    """As in the backward of a mean: the gradient is small, expanded, and divided."""
    from prism_plugins.capture.recorder import get_recorder

    small = torch.full((64, 1), 6.0, device="cuda")
    large = small.expand(64, 8192)
    first = large / 3
    before = get_recorder().stats().num_computed
    for _ in range(5):
        again = large / 3
        assert again.shape == first.shape
        assert again.dtype == first.dtype
    assert get_recorder().stats().num_computed == before
    assert (small / 3)[0].item() == 2.0
    assert (large[:, :4] / 3)[63, 3].item() == 2.0
    assert get_recorder().stats().num_computed > before
