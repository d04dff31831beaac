"""How much of a data sheet's peak real kernels reach: every fitted constant of the compute model, in one place.

Fitted for compute capability 9.0 on the kernel times of one training iteration of an 8-layer, h 4096 Megatron GPT on
an H200 under torch.profiler (`tests/costs/data/h200_insitu_ops_one4.json`), i.e. in the power state of a job: a
GEMM there runs at about 1600 of 1980 MHz. Other architectures take published figures where there are some and
Hopper's fractions where there are none.
"""

from __future__ import annotations

import msgspec


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions of peak, and rates per SM."""

    gemm: float
    """Large GEMM, sustained, of dense peak FLOP/s. The H200 iteration: 726-798 of 989 TFLOP/s, mean 0.773."""
    gemm_burst: float
    """Upper bound of a GEMM that is too short or too ragged to be power-limited, before wave quantisation."""
    attention_forward: float
    """Flash attention, of dense peak. FlashAttention-2 paper (A100: 0.6-0.7); FlashAttention-3 paper, figure 5 (H100:
    FA2 about 0.37, cuDNN 0.55-0.6)."""
    attention_backward: float
    cudnn_attention_forward: float
    cudnn_attention_backward: float
    elementwise: float = 0.90
    """Contiguous operands of one dtype, of HBM bandwidth: mul 0.91, exp 0.89, add 0.89, copy_ 0.88."""
    cast: float = 0.62
    """Contiguous copy between dtypes: 0.57-0.76."""
    batched_gemm: float = 0.80
    """bmm of attention scores, bound by HBM: 0.75-0.83."""
    softmax: float = 0.85
    """One-pass (row of at most 1024) softmax and every softmax backward (0.91)."""
    softmax_long: float = 0.30
    """Forward of a row longer than 1024 reads its input three times: 0.28."""
    norm: float = 0.64
    """Fused RMS/layer norm forward: 0.64."""
    norm_backward: float = 0.35
    """Fused norm backward including the weight gradient: 0.35."""
    reduction: float = 0.82
    """sum 0.89, max 0.73, vector norm 0.75-0.87."""
    foreach: float = 0.78
    """Multi-tensor ops of the optimizer: 0.73-0.82."""
    fused: float = 0.85
    """Inductor's fused pointwise kernels: 0.92-0.94."""
    fused_strided: float = 0.50
    """The same with a concatenation or split inside that breaks vector loads: 0.49."""
    fill: float = 0.75
    """fill_ and zero_: 0.70 (bf16) to 0.98 (fp32)."""
    gather: float = 0.75
    """Row gathers and scatters (embedding, index_select): 0.9; with atomics or sorts see the rules."""
    memcpy: float = 0.80
    generic_elements_per_s_per_sm: float = 2.2e9
    """Elementwise kernels off the vectorised path (broadcast, mixed dtype, strided) are bound by index arithmetic,
    not bytes: 255-330e9 elements/s on 132 SMs for fp32 and bf16 alike."""
    mixed_elements_per_s_per_sm: float = 1.95e9
    """The same with inputs of several dtypes (fp32 main_grad += bf16 grad): 252-261e9 elements/s on 132 SMs."""
    generic_copy_elements_per_s_per_sm: float = 2.8e9
    """The same with one input (transpose copy, strided neg): 370-380e9 elements/s on 132 SMs."""
    cat_elements_per_s_per_sm: float = 1.5e9
    """Concatenation along an inner dimension: about 195e9 elements/s on 132 SMs."""
    kernel_latency_us: float = 1.5
    """Fixed time of a kernel; also the floor (elementwise kernels on 8192 elements: 1.0-1.7 us)."""


HOPPER = Efficiency(
    gemm=0.775,
    gemm_burst=0.85,
    attention_forward=0.37,
    attention_backward=0.33,
    cudnn_attention_forward=0.58,
    cudnn_attention_backward=0.47,
)

AMPERE = Efficiency(
    # A100 GEMMs are barely power-limited: 260-275 of 312 TFLOP/s (Megatron-LM SC21 reports 163 for whole iterations).
    gemm=0.85,
    gemm_burst=0.90,
    attention_forward=0.62,
    attention_backward=0.55,
    cudnn_attention_forward=0.62,
    cudnn_attention_backward=0.55,
    generic_elements_per_s_per_sm=1.9e9,
    mixed_elements_per_s_per_sm=1.7e9,
    generic_copy_elements_per_s_per_sm=2.4e9,
    cat_elements_per_s_per_sm=1.3e9,
)


def efficiency_of(capability: tuple[int, int]) -> Efficiency:
    """The constants for a compute capability; unknown architectures take the nearest known one."""
    return AMPERE if capability[0] < 9 else HOPPER
