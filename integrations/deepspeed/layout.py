"""The parallel layout of a DeepSpeed job, from the engine and DeepSpeed's own process groups."""

from __future__ import annotations

import sys
from typing import Any

from prism_plugins.world.layout import Layout

_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}
"""Axes of DeepSpeed's process topologies."""


def make_layout(world_size: int, engine: Any) -> Layout:
    """The layout of the target world.

    Without a pipeline ranks are ordered tensor-, then sequence-, then data-parallel (``deepspeed.utils.groups``);
    with one by the topology of the ``PipelineModule``, whose last axis varies fastest.
    """
    topology = getattr(getattr(engine, "grid", None), "_topo", None)
    microbatches = engine.gradient_accumulation_steps()
    if topology is not None:
        size = {_AXES[axis]: topology.get_dim(axis) for axis in topology.get_axis_names()}
        order = "-".join(_AXES[axis] for axis in reversed(topology.get_axis_names()))
        if "tp" not in size:
            order = f"tp-{order}"
    else:
        groups = sys.modules["deepspeed.utils.groups"]
        size = {"tp": int(engine.autotp_size() or 1), "cp": int(groups._get_sequence_parallel_world_size())}
        order = "tp-cp-dp-pp"
    size = {"tp": 1, "cp": 1, "pp": 1, "ep": _expert_parallel_size()} | size
    size["dp"] = world_size // (size["tp"] * size["cp"] * size["pp"])
    axes = order.split("-")
    axes[1:1] = [axis for axis in ("cp", "ep") if axis not in axes]
    return Layout(world_size=world_size, order="-".join(axes), num_microbatches=microbatches, **size)


def _expert_parallel_size() -> int:
    """The largest expert-parallel group; 1 without experts."""
    groups = sys.modules["deepspeed.utils.groups"]
    return max(
        (int(name.removeprefix("ep_size_")) for name in groups._get_expert_parallel_group_dict()), default=1
    )
