"""Layout mistakes in the arguments of ``megatron.training``, found before Megatron's own assertions."""

from __future__ import annotations

from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integrations.megatron.layout import ParallelSizes, check_world_size, uneven_layers


def check_args(world_size: int, args: Any) -> None:
    """Raise :class:`PrismError` in one line for a world size, layer count or batch size that does not fit."""
    sizes = ParallelSizes.of_args(args)
    check_world_size(world_size, sizes)
    _check_layers(args, sizes)
    _check_batch(args, world_size // (sizes.tp * sizes.pp * sizes.cp))


def _check_layers(args: Any, sizes: ParallelSizes) -> None:
    uneven = (
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        getattr(args, "pipeline_model_parallel_layout", None),
    )
    if args.num_layers is None or any(value is not None for value in uneven):
        return
    if getattr(args, "hybrid_override_pattern", None):
        return
    counted = bool(getattr(args, "account_for_embedding_in_pipeline_split", False))
    counted += bool(getattr(args, "account_for_loss_in_pipeline_split", False))
    left_over = (args.num_layers + counted) % sizes.pp
    if left_over:
        raise uneven_layers(args.num_layers, sizes.pp, f"{left_over} would be left over", counted=counted)


def _check_batch(args: Any, dp: int) -> None:
    if args.global_batch_size is None or args.micro_batch_size is None or args.rampup_batch_size is not None:
        return
    needed = args.micro_batch_size * dp
    if args.global_batch_size % needed and not getattr(args, "decrease_batch_size_if_needed", False):
        raise PrismError(
            f"global batch size {args.global_batch_size} is not divisible by micro-batch size "
            f"{args.micro_batch_size} x data-parallel size {dp} = {needed}; use a multiple of {needed}"
        )
