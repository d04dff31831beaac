"""Layouts that do not fit, in one line; sizes from Megatron's own arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integrations.megatron.arguments import check_args
from prism_plugins.integrations.megatron.layout import (
    ParallelSizes,
    check_layers,
    check_world_size,
    make_layout,
)


def arguments(**given) -> SimpleNamespace:
    values = {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 4,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "num_layers": 32,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "global_batch_size": 16,
        "micro_batch_size": 1,
        "rampup_batch_size": None,
    }
    return SimpleNamespace(**(values | given))


def test_sizes_of_a_call_follow_megatrons_defaults():
    sizes = ParallelSizes.of_call(
        {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": None,
            "order": "tp-cp-ep-dp-pp",
        }
    )
    assert sizes == ParallelSizes(tp=4, pp=2, ep=2, etp=4)


def test_layout_counts_the_data_parallel_ranks():
    layout = make_layout(64, ParallelSizes(tp=8, pp=4, etp=8), num_microbatches=8)
    assert (layout.dp, layout.edp, layout.num_microbatches) == (2, 2, 8)


def test_world_size_that_does_not_divide_names_the_sizes_and_the_nearest():
    with pytest.raises(PrismError) as caught:
        check_world_size(60, ParallelSizes(tp=8, pp=4))
    assert str(caught.value) == (
        "world size 60 is not divisible by tp 8 x pp 4 = 32 of the layout; use 32 or 64"
    )


def test_world_size_below_the_layout_asks_for_a_multiple():
    with pytest.raises(PrismError, match="use a multiple of 32"):
        check_world_size(16, ParallelSizes(tp=8, pp=4))


def test_world_size_that_does_not_divide_over_the_experts():
    with pytest.raises(PrismError, match=r"etp 2 x ep 8 x pp 2 = 32 of the expert layout; use 32 or 64"):
        check_world_size(48, ParallelSizes(tp=2, pp=2, etp=2, ep=8))


def test_thirty_layers_on_four_stages():
    with pytest.raises(PrismError) as caught:
        check_args(64, arguments(num_layers=30))
    assert str(caught.value).startswith(
        "30 layers do not divide over 4 pipeline stages: 2 would be left over; use 28 or 32 layers"
    )


def test_uneven_stages_said_by_the_user_are_left_to_megatron():
    check_args(64, arguments(num_layers=30, decoder_first_pipeline_num_layers=6))


def test_embedding_and_loss_counted_as_layers():
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    check_args(64, arguments(num_layers=30, **counted))
    said = (
        "32 layers and 2 counted for embedding or loss do not divide .* 2 would be left over; use 30 or 34 "
    )
    with pytest.raises(PrismError, match=said):
        check_args(64, arguments(num_layers=32, **counted))


def test_layers_lost_between_the_stages():
    check_layers(32, [[4, 4]] * 4, pp=4)
    with pytest.raises(
        PrismError, match="30 layers do not divide over 4 pipeline stages: Megatron would build 28"
    ):
        check_layers(30, [[7]] * 4, pp=4)


def test_global_batch_that_the_data_parallel_ranks_do_not_divide():
    with pytest.raises(PrismError, match=r"global batch size 15 .* 1 x data-parallel size 2 = 2"):
        check_args(64, arguments(global_batch_size=15))
