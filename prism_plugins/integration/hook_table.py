"""Hooks of a framework as data: each wraps or replaces one attribute of one module right after its import.

A hook is applied before anyone can import the attribute by name. A required attribute that is missing is an error
that names it: a newer framework renamed it, and guessing would give wrong predictions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import msgspec

from prism_plugins.errors import PrismError
from prism_plugins.integration import SliceContext


class Hook(msgspec.Struct, frozen=True):
    """One hooked attribute."""

    module: str
    attribute: str
    """Dotted below the module: ``train_step``, ``P2PCommunicator.recv_forward``."""
    wrap: Callable[[Any, Any, ModuleType], Any]
    """(the integration's session, original, module) → replacement."""
    why: str
    required: bool = True
    formerly: str = ""
    """The attribute's name in older releases, hooked where there is no ``attribute``."""


def install_hooks(
    context: SliceContext, session: Any, table: Iterable[Hook], *, framework: str, supported: str
) -> None:
    """Register a table with the slice; nothing of the framework is imported.

    Where two hooks name the same attribute, the later one wraps the earlier. ``framework`` ("Megatron") and
    ``supported`` ("megatron-core 0.16") are for the message about a missing attribute, a :class:`PrismError`.
    """
    by_module: dict[str, list[Hook]] = {}
    for hook in table:
        by_module.setdefault(hook.module, []).append(hook)
    for module, hooks in by_module.items():
        apply = functools.partial(
            apply_hooks, context, session, hooks, framework=framework, supported=supported
        )
        context.on_import(module, apply)


def apply_hooks(
    context: SliceContext,
    session: Any,
    hooks: Iterable[Hook],
    module: ModuleType,
    *,
    framework: str,
    supported: str,
) -> None:
    """Hook a module that was just imported. Raises :class:`PrismError` for a required attribute it lacks."""
    for hook in hooks:
        found = _find(module, hook.attribute) or (_find(module, hook.formerly) if hook.formerly else None)
        if found is None:
            if not hook.required:
                continue
            raise PrismError(
                f"this {framework} has no {hook.module}.{hook.attribute}, which prism needs for {hook.why}; "
                f"{supported} is supported"
            )
        target, name, original = found
        context.patch(target, name, hook.wrap(session, original, module), why=hook.why)


def _find(module: ModuleType, attribute: str) -> tuple[Any, str, Any] | None:
    """What holds an attribute, the attribute's own name and its value; None where there is none."""
    *path, name = attribute.split(".")
    target: Any = module
    try:
        for part in path:
            target = getattr(target, part)
        return target, name, getattr(target, name)
    except AttributeError:
        return None
