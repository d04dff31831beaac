"""The parallel layout, from the arguments Megatron itself is given, and what is wrong with it in one line."""

from __future__ import annotations

from typing import Any

import msgspec

from prism_plugins.errors import PrismError
from prism_plugins.world.layout import Layout


class ParallelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes ``parallel_state.initialize_model_parallel`` is called with."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    @classmethod
    def of_call(cls, arguments: dict[str, Any]) -> ParallelSizes:
        """From the bound arguments of ``initialize_model_parallel``."""
        tp = arguments["tensor_model_parallel_size"]
        return cls(
            tp=tp,
            pp=arguments["pipeline_model_parallel_size"],
            vpp=arguments.get("virtual_pipeline_model_parallel_size") or 1,
            cp=arguments.get("context_parallel_size") or 1,
            ep=arguments.get("expert_model_parallel_size") or 1,
            etp=arguments.get("expert_tensor_parallel_size") or tp,
            order=arguments.get("order") or "tp-cp-ep-dp-pp",
        )

    @classmethod
    def of_args(cls, args: Any) -> ParallelSizes:
        """From the parsed arguments of ``megatron.training``, before Megatron validates them."""
        return cls(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size,
            etp=getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size,
        )


def check_world_size(world_size: int, sizes: ParallelSizes) -> None:
    """Raise :class:`PrismError` when the world size is not a multiple of what the layout needs."""
    dense = {"tp": sizes.tp, "pp": sizes.pp, "cp": sizes.cp}
    experts = {"etp": sizes.etp, "ep": sizes.ep, "pp": sizes.pp}
    for what, parts in (("", dense), ("expert ", experts)):
        needed = 1
        for size in parts.values():
            needed *= size
        if world_size % needed:
            product = " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
            raise PrismError(
                f"world size {world_size} is not divisible by {product} = {needed} of the {what}layout; "
                f"use {_nearest_multiples(world_size, needed)}"
            )


def check_layers(num_layers: int, layers_of_chunk: list[list[int]], *, pp: int) -> None:
    """Raise :class:`PrismError` unless the stages hold exactly ``num_layers`` layers.

    ``layers_of_chunk[stage][chunk]`` is what Megatron would build there.
    """
    built = sum(sum(chunks) for chunks in layers_of_chunk)
    if built != num_layers:
        raise uneven_layers(num_layers, pp, f"Megatron would build {built} of them")


def uneven_layers(
    num_layers: int, pp: int, consequence: str, *, chunks: int = 1, counted: int = 0
) -> PrismError:
    """The error for layers that do not divide over the stages; embedding and loss may be ``counted`` as layers."""
    over = f"{pp} pipeline stages" if chunks == 1 else f"{pp} pipeline stages of {chunks} chunks"
    extra = f" and {counted} counted for embedding or loss" if counted else ""
    return PrismError(
        f"{num_layers} layers{extra} do not divide over {over}: {consequence}; use "
        f"{_nearest_multiples(num_layers + counted, pp * chunks, less=counted)} layers, another pipeline size, or say how many layers "
        "the first and last stages hold (--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers)"
    )


def make_layout(world_size: int, sizes: ParallelSizes, *, num_microbatches: int) -> Layout:
    """The layout of the target world."""
    check_world_size(world_size, sizes)
    return Layout(
        world_size=world_size,
        tp=sizes.tp,
        cp=sizes.cp,
        pp=sizes.pp,
        dp=world_size // (sizes.tp * sizes.cp * sizes.pp),
        ep=sizes.ep,
        etp=sizes.etp,
        vpp=sizes.vpp,
        order=sizes.order,
        num_microbatches=num_microbatches,
    )


def _nearest_multiples(value: int, of: int, *, less: int = 0) -> str:
    """The multiples around ``value``, each reduced by ``less``."""
    below = value // of * of
    if below > less:
        return f"{below - less} or {below + of - less}"
    return f"{of - less}" if less else f"a multiple of {of}"
