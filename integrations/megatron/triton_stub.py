"""A stand-in for Triton while Megatron defines kernels that training does not launch.

``batch_invariant_kernels`` and ``tensor_ops`` import Triton without asking whether it is there; every training
script imports the first, every script with Mamba layers the second. The stand-in is found during that import only: torch and the rest of Megatron keep seeing that there is no
Triton, and act accordingly. A kernel of it that is launched after all is an error that says so.

Kernels that training does launch (rotary embeddings of latent attention) are recorded instead (:mod:`prism_plugins.integration.triton_kernels`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration import SliceContext

USERS = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
)
"""Modules that import Triton unconditionally and define kernels with it."""

LAUNCHED = ("megatron.core.fusions.fused_mla_yarn_rope_apply",)
"""Modules whose kernels training launches."""

_NAMES = ("triton", "triton.language")


def provide_triton(context: SliceContext) -> None:
    """Let :data:`USERS` be imported where Triton is not installed, and record what :data:`LAUNCHED` launches."""
    if context.spec.device == "virtual":
        for name in LAUNCHED:
            context.on_import(name, _record_launches)
    if importlib.util.find_spec("triton") is not None:
        return
    sys.meta_path.insert(0, _Finder())
    for user in USERS:
        context.on_import(user, lambda module: [sys.modules.pop(name, None) for name in _NAMES])


def _record_launches(module: ModuleType) -> None:
    from prism_plugins.integration.triton_kernels import execute_again

    execute_again(module)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _NAMES and any(_is_being_imported(user) for user in USERS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "triton")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Standin(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class _Standin(ModuleType):
    """A module whose every attribute is usable as a decorator, a type annotation or a constant."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")


class _Anything:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return _Kernel(getattr(args[0], "__name__", "a kernel"))
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: Any) -> Any:
        raise PrismError(
            f"the script launches the Triton kernel {self._name}, and Triton is not installed: install it as on "
            "the cluster, or switch the option off that needs it"
        )
