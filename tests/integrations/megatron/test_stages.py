"""What stages hold, by Megatron's own functions."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from prism_plugins.errors import PrismError
from prism_plugins.integrations.megatron.facts import layer_functions
from prism_plugins.integrations.megatron.flops import transformer_flops
from prism_plugins.integrations.megatron.stages import check_stage_layers, stage_fingerprints


def make_config(**options) -> TransformerConfig:
    sizes = {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2, "pipeline_model_parallel_size": 4}
    return TransformerConfig(**(sizes | {"pipeline_dtype": torch.float32} | options))


def fingerprints(config: TransformerConfig, *, shared: bool = False) -> tuple[str, ...]:
    return stage_fingerprints(layer_functions(), config, shared_embedding=shared)


def test_middle_stages_of_a_dense_model_hold_the_same():
    assert fingerprints(make_config()) == ("embedding, 2x dense", "2x dense", "2x dense", "2x dense, loss")


def test_uneven_first_and_last_stage():
    config = make_config(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3)
    assert fingerprints(config) == ("embedding, 1x dense", "2x dense", "2x dense", "3x dense, loss")


def test_chunks_of_an_interleaved_pipeline():
    config = make_config(virtual_pipeline_model_parallel_size=2)
    assert fingerprints(config) == (
        "embedding, 1x dense | 1x dense",
        "1x dense | 1x dense",
        "1x dense | 1x dense",
        "1x dense | 1x dense, loss",
    )


def test_embedding_and_loss_that_take_the_place_of_layers():
    config = make_config(
        num_layers=6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
    )
    assert fingerprints(config, shared=True) == (
        "embedding, 1x dense",
        "2x dense",
        "2x dense",
        "1x dense, loss (tied to the embedding)",
    )


def test_expert_layers_make_stages_differ():
    config = make_config(num_moe_experts=2, moe_layer_freq=[0, 0, 0, 1, 1, 0, 1, 1])
    assert fingerprints(config) == (
        "embedding, 2x dense",
        "1x dense, 1x moe",
        "1x moe, 1x dense",
        "2x moe, loss",
    )


def test_a_layout_written_by_the_user():
    config = make_config(pipeline_model_parallel_layout="Et|tt|ttt|ttL")
    assert fingerprints(config) == ("embedding, 1x dense", "2x dense", "3x dense", "2x dense, loss")


def test_a_hybrid_model_is_sliced_stage_by_stage():
    config = make_config(is_hybrid_model=True)
    assert len(set(fingerprints(config))) == 4


def test_layers_that_do_not_divide_over_stages():
    with pytest.raises(
        PrismError, match=r"30 layers do not divide over 4 pipeline stages: .* use 28 or 32 layers"
    ):
        check_stage_layers(layer_functions(), make_config(num_layers=30))


def test_layers_that_do_not_divide_over_chunks():
    with pytest.raises(PrismError, match="20 layers do not divide over 4 pipeline stages of 2 chunks"):
        check_stage_layers(
            layer_functions(), make_config(num_layers=20, virtual_pipeline_model_parallel_size=2)
        )


def test_layers_that_divide_are_fine():
    check_stage_layers(layer_functions(), make_config())
    check_stage_layers(layer_functions(), make_config(pipeline_model_parallel_size=1, num_layers=7))


def test_flops_of_a_layer_by_hand():
    config = make_config(num_layers=4, ffn_hidden_size=64, gated_linear_unit=True)
    hidden, ffn, seq, vocab = 16, 64, 32, 100
    matmuls = 4 * hidden * hidden + 3 * hidden * ffn
    attention = 2 * hidden * seq / 2  # QK and AV over the causal half
    expected = 6 * 5 * seq * (4 * (matmuls + attention) + hidden * vocab)
    assert transformer_flops(config, num_samples=5, seq_length=seq, vocab_size=vocab) == expected
