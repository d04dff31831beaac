"""A general grid of op signatures: what transformers are made of, over the sizes that jobs have.

Sizes are drawn with a fixed seed from products of token counts, hidden sizes and tensor-parallel degrees, so that
every run of this version measures the same grid. One mix goes with it: a transformer layer forward and backward,
which keeps the GPU in the power state of a job while the rest is measured.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from prism_plugins.calibration.rebuild import CannotRebuild, rebuild
from prism_plugins.calibration.signatures import Mix, SignatureList
from prism_plugins.calibration.values import Operands, dtype_of
from prism_plugins.costs.calibration import signature_key
from prism_plugins.program.model import OpSignature, TensorSpec

BF16, FP16, FP32, FP8, I64 = "bfloat16", "float16", "float32", "float8_e4m3fn", "int64"
_MAX_GEMM_FLOPS = 2.5e12
_BF16_CODE = 15
"""torch.bfloat16 as a schema's ScalarType argument."""


def make_grid(*, small: bool = False) -> SignatureList:
    """The grid; ``small`` gives a few tiny ops of each kind, for a machine without a GPU."""
    if small:
        ops = list(itertools.chain(*(make(tiny=True) for make in _MAKERS)))
        return _list_of(ops, [])
    ops = list(itertools.chain(*(make(tiny=False) for make in _MAKERS)))
    return _list_of(ops, _layer())


def _list_of(ops: list[OpSignature], layer: list[tuple[OpSignature, int]]) -> SignatureList:
    signatures: dict[tuple, OpSignature] = {}
    for s in (*(s for s, _ in layer), *ops):
        done = with_outputs(s)
        signatures.setdefault(signature_key(done), done)
    order = {key: i for i, key in enumerate(signatures)}
    counts: dict[int, int] = {}
    for s, n in layer:
        index = order[signature_key(with_outputs(s))]
        counts[index] = counts.get(index, 0) + n
    mix = Mix(name="transformer layer", ops=tuple(counts), counts=tuple(counts.values()))
    return SignatureList(signatures=tuple(signatures.values()), mixes=(mix,) if counts else ())


class _Shapes(Operands):
    """Operands without memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), pool_bytes=1)

    def take(self, spec: TensorSpec, *, written: bool = False, below: int = 2) -> torch.Tensor:
        """A meta tensor."""
        empty = torch.empty(spec.shape, dtype=dtype_of(spec), device="meta")
        return empty.as_strided(spec.shape, spec.strides) if spec.strides else empty


def with_outputs(signature: OpSignature) -> OpSignature:
    """The signature with the outputs that torch's shape inference gives; unchanged where it gives none."""
    try:
        with torch.no_grad():
            result: Any = rebuild(signature, _Shapes())()
    except (CannotRebuild, RuntimeError, NotImplementedError, TypeError, ValueError):
        return signature
    results = result if isinstance(result, (tuple, list)) else [result]
    outputs = tuple(_spec_of(t) for t in results if isinstance(t, torch.Tensor))
    return OpSignature(
        op=signature.op,
        inputs=signature.inputs,
        outputs=outputs,
        scalars=signature.scalars,
        attrs=signature.attrs,
    )


def _spec_of(t: torch.Tensor) -> TensorSpec:
    strides = () if t.is_contiguous() else tuple(t.stride())
    return TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), strides)


def op(name: str, *inputs: TensorSpec, **scalars: Any) -> OpSignature:
    """A signature without outputs."""
    return OpSignature(op=f"aten::{name}", inputs=inputs, scalars=tuple(scalars.items()))


def t(dtype: str, *shape: int, strides: tuple[int, ...] = ()) -> TensorSpec:
    """A tensor."""
    return TensorSpec(dtype, tuple(shape), strides)


def mm(m: int, n: int, k: int, layout: str = "nt", dtype: str = BF16) -> OpSignature:
    """``nt``: activations times a transposed weight; ``nn``: data gradient; ``tn``: weight gradient."""
    a = t(dtype, m, k, strides=(1, m)) if layout == "tn" else t(dtype, m, k)
    b = t(dtype, k, n, strides=(1, k)) if layout == "nt" else t(dtype, k, n)
    return op("mm", a, b)


# ── families ─────────────────────────────────────────────────────────────────────────────────────────────────


def _gemms(*, tiny: bool) -> list[OpSignature]:
    if tiny:
        return [mm(32, 48, 16, layout, FP32) for layout in ("nt", "nn", "tn")]
    rng = random.Random(0)
    tokens = (256, 512, 1024, 2048, 4096, 8192, 16384)
    sizes = []
    for hidden, tp in itertools.product((1024, 2048, 4096, 5120, 8192, 12288), (1, 2, 4, 8)):
        ffn = {1024: 4096, 2048: 5504, 4096: 11008, 5120: 13824, 8192: 28672, 12288: 49152}[hidden]
        for m in tokens:
            sizes += [
                (m, 3 * hidden // tp, hidden), (m, hidden, hidden // tp),
                (m, 2 * ffn // tp, hidden), (m, hidden, ffn // tp),
            ]  # fmt: skip
    sizes += [
        (m, n, h)
        for m in (2048, 8192)
        for n, h in ((50304, 2048), (50304, 4096), (32000, 4096), (128256, 4096))
    ]
    sizes = [s for s in sizes if 2e8 < 2 * s[0] * s[1] * s[2] < _MAX_GEMM_FLOPS]
    ops = []
    for i, (m, n, k) in enumerate(rng.sample(sizes, 120)):
        layout = ("nt", "nn", "tn")[i % 3]
        # dgrad exchanges n and k, wgrad puts the tokens in the inner dimension.
        ops.append(mm(*{"nt": (m, n, k), "nn": (m, k, n), "tn": (n, k, m)}[layout], layout))
    ops += [mm(*rng.choice(sizes), "nt", FP16) for _ in range(10)]
    ops += [
        mm(*rng.choice([s for s in sizes if 2 * s[0] * s[1] * s[2] < 1.5e11]), "nt", FP32) for _ in range(10)
    ]
    ops += [mm(8192, n, 4096, "nt", FP32) for n in (8, 64)] + [mm(n, 4096, 8192, "tn", FP32) for n in (8, 64)]
    for m, n, k in (
        (1000, 3000, 4096),
        (777, 4096, 4096),
        (4096, 2752, 2048),
        (8192, 50257, 1024),
        (3072, 100, 768),
    ):
        ops += [mm(m, n, k, "nt"), mm(m, k, n, "nn")]
    for m, n, k in rng.sample([s for s in sizes if s[1] % 16 == 0 and s[2] % 16 == 0], 14):
        scale = t(FP32)
        ops.append(
            op("_scaled_mm", t(FP8, m, k), t(FP8, k, n, strides=(1, k)), scale, scale,
               out_dtype=_BF16_CODE, use_fast_accum=True)
        )  # fmt: skip
    for m, n, k in rng.sample(sizes, 8):
        ops.append(op("addmm", t(BF16, n), t(BF16, m, k), t(BF16, k, n, strides=(1, k))))
    return ops + _more_gemms(sizes)


def _more_gemms(sizes: list[tuple[int, int, int]]) -> list[OpSignature]:
    """Where the kernels that are chosen vary most: short products, fp32, routers of experts, rows that are not aligned."""
    rng = random.Random(1)
    short = [s for s in sizes if 2 * s[0] * s[1] * s[2] < 1.5e11]
    picked = [(BF16, s) for s in rng.sample(short, 72)] + [(FP32, s) for s in rng.sample(short, 24)]
    picked += [
        (FP32, s)
        for s in (
            (8192, 8, 4096), (8192, 64, 4096), (4096, 8, 4096), (8192, 16, 2048),
            (4096, 64, 2048), (2048, 64, 4096), (4096, 128, 2048), (8192, 128, 4096),
        )
        for _ in range(3)
    ]  # fmt: skip
    picked += [
        (BF16, s)
        for s in (
            (4096, 50257, 2048), (2048, 50257, 1024), (2048, 100, 768), (4096, 100, 1024), (8192, 1001, 1024), (4096, 3001, 2048)
        )
        for _ in range(3)
    ]  # fmt: skip
    ops = []
    for i, (dtype, (m, n, k)) in enumerate(picked):
        layout = ("nt", "nn", "tn")[i % 3]
        ops.append(mm(*{"nt": (m, n, k), "nn": (m, k, n), "tn": (n, k, m)}[layout], layout, dtype))
    return ops


def _batched(*, tiny: bool) -> list[OpSignature]:
    ops = []
    cases = ((2, 16, 8),) if tiny else (
        (32, 512, 64), (64, 1024, 64), (32, 1024, 128), (64, 1024, 128), (128, 1024, 64), (16, 2048, 128),
        (32, 2048, 128), (64, 2048, 128), (128, 2048, 128), (96, 2048, 64), (8, 4096, 128), (32, 4096, 128),
    )  # fmt: skip
    for b, s, d in cases:
        scores, values = t(BF16, b, s, s), t(BF16, b, s, d, strides=(d, b * d, 1))
        transposed = t(BF16, b, d, s, strides=(d, 1, b * d))
        ops += [
            op("bmm", values, transposed),
            op("bmm", scores, values),
            op("bmm", t(BF16, b, s, s, strides=(s * s, 1, s)), values),
            op("baddbmm", scores, values, transposed),
        ]
    for e, rows, h, f in (
        ((2, 8, 16, 8),)
        if tiny
        else ((8, 512, 4096, 14336), (8, 1024, 2048, 5504), (16, 256, 2048, 1408), (4, 2048, 4096, 14336))
    ):
        ops += [
            op("bmm", t(BF16, e, rows, h), t(BF16, e, h, f)),
            op("bmm", t(BF16, e, rows, f), t(BF16, e, f, h)),
        ]
    return ops


def _attention(*, tiny: bool) -> list[OpSignature]:
    if tiny:
        return []
    ops = []
    cases = (
        (1, 32, 2048, 128), (1, 32, 4096, 128), (2, 16, 2048, 64), (4, 32, 2048, 128), (1, 8, 8192, 128),
        (1, 64, 4096, 128), (8, 12, 1024, 64), (1, 32, 1024, 128), (1, 16, 8192, 64), (2, 8, 4096, 128),
        (16, 16, 512, 64),
    )  # fmt: skip
    for (i, (b, h, s, d)), kind in itertools.product(enumerate(cases), ("flash", "cudnn", "efficient")):
        if kind == "efficient" and i % 3:
            continue
        x = t(BF16, b, h, s, d, strides=(s * h * d, d, h * d, 1))
        name = f"_scaled_dot_product_{kind}_attention"
        for causal in (True, False) if i % 2 == 0 else (True,):
            more = {} if kind == "flash" else {"compute_log_sumexp": True}
            ops += [
                op(name, x, x, x, **more, is_causal=causal),
                op(f"{name}_backward", x, x, x, x, is_causal=causal),
            ]
    return ops


def _norms(*, tiny: bool) -> list[OpSignature]:
    ops = []
    cases = ((16, 32),) if tiny else (
        (2048, 1024), (4096, 2048), (2048, 4096), (8192, 4096), (4096, 8192), (16384, 5120), (4096, 12288)
    )  # fmt: skip
    for (rows, h), dtype in itertools.product(cases, (BF16, FP32)):
        if dtype == FP32 and h > 4096:
            continue
        x, w, stat = t(dtype, rows, h), t(dtype, h), t(FP32, rows, 1)
        shape = {"normalized_shape": (h,)}
        ops += [
            op("native_layer_norm", x, w, w, **shape),
            op("native_layer_norm_backward", x, x, stat, stat, w, w, **shape, output_mask=(1, 1, 1)),
            op("_fused_rms_norm", x, w, **shape),
            op("_fused_rms_norm_backward", x, x, stat, w, **shape, output_mask=(1, 1)),
        ]
    return ops


def _softmaxes(*, tiny: bool) -> list[OpSignature]:
    ops = []
    cases = ((2, 2, 16),) if tiny else (
        (8, 16, 512), (2, 16, 1024), (4, 32, 1024), (1, 16, 2048), (4, 32, 2048), (1, 32, 4096), (2, 8, 4096)
    )  # fmt: skip
    for b, h, s in cases:
        x = t(BF16, b, h, s, s)
        ops += [
            op("_softmax", x, dim=-1, half_to_float=False),
            op("_softmax_backward_data", x, x, dim=-1, input_dtype=_BF16_CODE),
        ]
    for rows, vocab in ((8, 32),) if tiny else ((8192, 50304), (4096, 32000), (2048, 128256), (1024, 50304)):
        x, target = t(FP32, rows, vocab), t(I64, rows)
        ops += [
            op("_log_softmax", x, dim=1, half_to_float=False),
            op("_log_softmax_backward_data", x, x, dim=1, input_dtype=6),
            op("nll_loss_forward", x, target, reduction=1, ignore_index=-100),
            op("nll_loss_backward", t(FP32), x, target, t(FP32), reduction=1, ignore_index=-100),
        ]
    return ops


def _elementwise(*, tiny: bool) -> list[OpSignature]:
    ops = []
    for n in (1 << 10,) if tiny else (1 << 13, 1 << 18, 1 << 21, 1 << 23, 1 << 25, 1 << 27, 1 << 28):
        x, y = t(BF16, n), t(FP32, n)
        ops += [
            op("mul.Tensor", x, x), op("add.Tensor", y, y), op("gelu", x, approximate="none"),
            op("silu_backward", x, x), op("add_.Tensor", y, x), op("mul.Tensor", y), op("neg", x),
            op("copy_", x, x, non_blocking=False), op("copy_", y, x, non_blocking=False),
            op("copy_", x, y, non_blocking=False), op("add.Tensor", x, x), op("zero_", x), op("zero_", y),
            op("exp", y), op("mul_.Tensor", y),
        ]  # fmt: skip
    for rows, h in (
        ((8, 16),) if tiny else ((2048, 1024), (2048, 4096), (8192, 4096), (16384, 8192), (32768, 8192))
    ):
        x, turned = t(BF16, rows, h), t(BF16, rows, h, strides=(1, rows))
        narrow = t(BF16, rows, h // 2, strides=(h, 1))
        ops += [
            op("mul.Tensor", x, t(BF16, h)), op("add.Tensor", x, t(BF16, h)), op("copy_", x, turned, non_blocking=False),
            op("add.Tensor", x, turned), op("mul.Tensor", narrow, narrow), op("copy_", t(BF16, rows, h // 2), narrow, non_blocking=False),
            op("mul.Tensor", t(FP32, rows, h), t(FP32, rows, 1)), op("native_dropout", x, train=True),
        ]  # fmt: skip
    for b, h, s in ((1, 2, 8),) if tiny else ((1, 16, 1024), (2, 16, 1024), (1, 16, 2048), (4, 32, 2048)):
        x = t(BF16, b, h, s, s)
        ops += [
            op("masked_fill_.Scalar", x, t("bool", b, 1, s, s)),
            op("masked_fill.Scalar", x, t("bool", 1, 1, s, s)),
            op("where.self", t("bool", b, 1, s, s), x, x),
        ]
    return ops


def _reductions(*, tiny: bool) -> list[OpSignature]:
    ops = []
    for rows, h in ((8, 16),) if tiny else ((512, 1024), (2048, 4096), (8192, 4096), (8192, 50304)):
        for dtype in (FP32, BF16):
            x = t(dtype, rows, h)
            ops += [
                op("sum.dim_IntList", x, dim=(-1,), keepdim=False), op("sum.dim_IntList", x, dim=(0,), keepdim=False),
                op("sum", x), op("mean.dim", x, dim=(-1,), keepdim=True), op("max.dim", x, dim=-1, keepdim=False),
                op("linalg_vector_norm", x, keepdim=False),
            ]  # fmt: skip
    for rows, n in ((8, 8),) if tiny else ((2048, 8), (8192, 64), (16384, 128)):
        ops += [
            op("topk", t(FP32, rows, n), k=2, dim=1, largest=True, sorted=True),
            op("cumsum", t(I64, rows, n), dim=0), op("sort", t(FP32, rows, n), dim=-1, descending=False),
        ]  # fmt: skip
    return ops


def _rows(*, tiny: bool) -> list[OpSignature]:
    """Embeddings, gathers, concatenations."""
    ops = []
    for rows, h, vocab in (
        ((8, 16, 32),)
        if tiny
        else ((2048, 1024, 50304), (8192, 2048, 50304), (8192, 4096, 50304), (4096, 8192, 128256))
    ):
        x, index = t(BF16, rows, h), t(I64, rows)
        ops += [
            op("embedding", t(BF16, vocab, h), index),
            op("embedding_dense_backward", x, index, num_weights=vocab, padding_idx=-1, scale_grad_by_freq=False),
            op("index_select", x, index, dim=0), op("index.Tensor", x, index),
            op("scatter_add", x, t(I64, rows, h), x, dim=0), op("gather", x, t(I64, rows, h), dim=0),
            op("cat", x, x, dim=0), op("cat", x, x, dim=1), op("cat", x, x, x, dim=-1),
            op("index_add", x, index, x, dim=0),
        ]  # fmt: skip
    return ops


def _optimizers(*, tiny: bool) -> list[OpSignature]:
    ops = []
    cases = (
        ((3, (8, 8)),) if tiny else ((100, (64,)), (16, (1024, 1024)), (8, (4096, 4096)), (12, (2048, 5504)))
    )
    for n, shape in cases:
        xs = [t(FP32, *shape)] * n
        ops += [
            op("_foreach_mul_.Scalar", *xs), op("_foreach_add_.List", *xs, *xs), op("_foreach_lerp_.Scalar", *xs, *xs),
            op("_foreach_addcmul_.Scalar", *xs, *xs, *xs), op("_foreach_addcdiv_.ScalarList", *xs, *xs, *xs),
            op("_foreach_sqrt", *xs), op("_foreach_div_.ScalarList", *xs), op("_foreach_add_.Scalar", *xs),
            op("_foreach_norm.Scalar", *xs), op("_foreach_copy_", *[t(BF16, *shape)] * n, *xs, non_blocking=False),
            op("_fused_adamw_", *xs, *xs, *xs, *xs, *[t(FP32)] * n, amsgrad=False, maximize=False),
        ]  # fmt: skip
    return ops


_MAKERS = (_gemms, _batched, _attention, _norms, _softmaxes, _elementwise, _reductions, _rows, _optimizers)


def _layer() -> list[tuple[OpSignature, int]]:
    """One layer of a GPT (h 4096, 8192 tokens of sequence 2048, unfused attention), forward and backward."""
    tokens, h, ffn, heads, s, d = 8192, 4096, 11008, 128, 2048, 128
    layer = []
    for n, k in ((3 * h, h), (h, h), (2 * ffn, h), (h, ffn)):
        layer += [(mm(tokens, n, k, "nt"), 1), (mm(tokens, k, n, "nn"), 1), (mm(n, k, tokens, "tn"), 1)]
    scores = t(BF16, heads, s, s)
    wide = t(BF16, 4, heads // 4, s, s)
    x, hidden = t(BF16, tokens, ffn), t(BF16, tokens, h)
    values = t(BF16, heads, s, d, strides=(d, heads * d, 1))
    return [
        *layer,
        (op("bmm", values, t(BF16, heads, d, s, strides=(d, 1, heads * d))), 2),
        (op("bmm", scores, values), 3),
        (op("_softmax", wide, dim=-1, half_to_float=False), 1),
        (op("_softmax_backward_data", wide, wide, dim=-1, input_dtype=_BF16_CODE), 1),
        (op("masked_fill_.Scalar", wide, t("bool", 4, 1, s, s)), 2),
        (op("copy_", wide, wide, non_blocking=False), 4),
        (op("mul.Tensor", x, x), 3),
        (op("add.Tensor", hidden, hidden), 6),
        (op("mul.Tensor", t(BF16, s, 4, 32, d), t(BF16, s, 1, 1, d)), 8),
        (op("cat", t(BF16, s, 4, 32, d), t(BF16, s, 4, 32, d), t(BF16, s, 4, 32, d), dim=3), 1),
        (op("_fused_rms_norm", hidden, t(BF16, h), normalized_shape=(h,)), 2),
    ]
