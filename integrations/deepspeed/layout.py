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
    with one by the topology of the ``PipelineModule``, whose last axis varies fastest. Sequence parallelism is the
    layout's ``cp``. With experts in groups of several sizes ``ep`` is the largest; smaller groups are parts of it.
    """
    groups = sys.modules["deepspeed.utils.groups"]
    topology = getattr(getattr(engine, "grid", None), "_topo", None)
    if topology is not None:
        size = {_AXES[axis]: topology.get_dim(axis) for axis in topology.get_axis_names()}
        order = [_AXES[axis] for axis in reversed(topology.get_axis_names())]
        order = [*(() if "tp" in size else ("tp",)), *order]
    else:
        tp = int(engine.autotp_size() or 1)
        size = {
            "tp": tp if tp > 1 else int(groups._get_model_parallel_world_size()),
            "cp": int(groups._get_sequence_parallel_world_size()),
        }
        order = ["tp", "cp", "dp", "pp"]
    size = {"tp": 1, "cp": 1, "pp": 1} | size
    size["dp"] = world_size // (size["tp"] * size["cp"] * size["pp"])
    if "cp" not in order:
        order.insert(1, "cp")
    size["ep"], expert_stride = _expert_groups(groups)
    size["etp"] = size["tp"] if size["tp"] > 1 and expert_stride == size["tp"] else 1
    inner = size["etp"] == 1 and expert_stride > 1  # use_data_before_expert_parallel
    order.insert(order.index("dp") + (1 if inner else 0), "ep")
    return Layout(
        world_size=world_size,
        order="-".join(order),
        num_microbatches=engine.gradient_accumulation_steps(),
        **size,
    )


def _expert_groups(groups: Any) -> tuple[int, int]:
    """Size of the largest expert-parallel group, and the distance between its neighbours; (1, 1) without experts."""
    largest = max(groups._EXPERT_PARALLEL_GROUP_RANKS.values(), key=len, default=(0,))
    return len(largest), largest[1] - largest[0] if len(largest) > 1 else 1
