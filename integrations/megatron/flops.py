"""Model FLOPs of an iteration, for scripts that do not bring ``megatron.training``.

The formula is that of ``megatron.training.training.num_floating_point_operations`` (transformer branch, core_r0.16.0):
forward plus twice that for backward, multiply-add counted as two, causal attention counted at half its square,
recomputation not counted.
"""

from __future__ import annotations

from typing import Any


def transformer_flops(config: Any, *, num_samples: int, seq_length: int, vocab_size: int) -> float:
    """FLOPs of one iteration of the whole job.

    ``config`` is a ``TransformerConfig``; ``vocab_size`` the padded vocabulary (0: no output layer counted).
    Multi-latent and linear attention are counted as plain attention with the same heads.
    """
    hidden = config.hidden_size
    moe_layers, dense_layers = _layer_counts(config)
    ffn_factor = 3 if config.gated_linear_unit else 2
    moe_ffn = getattr(config, "moe_ffn_hidden_size", None) or config.ffn_hidden_size
    shared_ffn = getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    query = config.kv_channels * config.num_attention_heads
    key_value = config.kv_channels * (config.num_query_groups or config.num_attention_heads)
    attention = hidden * (query + 2 * key_value) + query * seq_length + query * hidden
    mlp = hidden * ffn_factor * config.ffn_hidden_size
    moe = hidden * ffn_factor * (moe_ffn * config.moe_router_topk + shared_ffn) if moe_layers else 0
    per_token = (
        attention * (moe_layers + dense_layers) + mlp * dense_layers + moe * moe_layers + hidden * vocab_size
    )
    return 3.0 * 2.0 * num_samples * seq_length * per_token


def _layer_counts(config: Any) -> tuple[int, int]:
    if getattr(config, "num_moe_experts", None) is None:
        return 0, config.num_layers
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(config.num_layers)]
    return sum(pattern), config.num_layers - sum(pattern)
