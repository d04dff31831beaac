"""Ways to train that no integration knows yet: the script learns so in one line when it takes one of them.

Without this a script is run to its end, or to an error deep inside torch, before it is told.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from types import ModuleType
from typing import Any, NamedTuple

from prism_plugins.errors import PrismError
from prism_plugins.integration import SliceContext


class EntryPoint(NamedTuple):
    """What a script calls first when it trains in one of these ways."""

    module: str
    attribute: str
    """Dotted below the module."""
    integration: str
    """The integration that would take it; the entry is not hooked when one of this name is installed."""
    what: str


ENTRY_POINTS = (
    EntryPoint("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", "torch", "torch's DDP"),
    EntryPoint(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel.__init__",
        "torch",
        "torch's FSDP",
    ),
    EntryPoint(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "fully_shard",
        "torch",
        "torch's fully_shard (FSDP2)",
    ),
)


LIBRARIES = {"apex", "transformer_engine"}
"""Integrations of what frameworks call; they take no model."""
_PLAIN = "torch.distributed"
"""Integration of loops without a framework."""


def refuse_unsupported(context: SliceContext, integrations: Collection[str]) -> None:
    """Hook the entry points that none of ``integrations`` (names) takes."""
    known = ", ".join(sorted(set(integrations) - LIBRARIES - {_PLAIN})) or "none is installed"
    if _PLAIN in integrations:
        known += ", or all_reduce calls of your own on its gradients"
    for entry in ENTRY_POINTS:
        if entry.integration not in integrations:
            context.on_import(entry.module, functools.partial(_hook, context, entry, known))


def _hook(context: SliceContext, entry: EntryPoint, known: str, module: ModuleType) -> None:
    *path, name = entry.attribute.split(".")
    target: Any = module
    for part in path:
        target = getattr(target, part)

    @functools.wraps(getattr(target, name))
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PrismError(
            f"this script trains with {entry.what}, which prism does not emulate yet; "
            f"give the model to a framework it knows instead ({known})"
        )

    context.patch(target, name, refuse, why=f"{entry.what} is not supported yet")
