"""Triton kernels of a framework (permutation of tokens, rotary embeddings, cross entropy): launches are recorded.

Modules that define them are executed with a stand-in for Triton, whether Triton is installed or not: a kernel that is launched
records its tensors, and its outputs count as synthesized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from prism_plugins.integration.kernels import record, synthesized
from prism_plugins.integration.stand_ins import StandIn, stand_in

_NAMES = ("triton", "triton.language", "triton.language.core", "triton.language.standard")
VERSION = "3.5.0"


def triton_stand_in() -> contextlib.AbstractContextManager[None]:
    """``import triton`` gives the stand-in inside."""
    return stand_in(_modules())


def execute_again(module: ModuleType) -> None:
    """Execute a module that was just imported once more, with the stand-in."""
    code = module.__spec__.loader.get_code(module.__name__)
    with triton_stand_in():
        exec(code, module.__dict__)


class Kernel:
    """A ``@triton.jit`` function: ``kernel[grid](…)`` records one op."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.name = getattr(function, "__name__", "kernel").strip("_")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        tensors = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
        record(f"triton::{self.name}", tensors)
        for tensor in tensors:
            if tensor.dtype.is_floating_point:
                synthesized(tensor)


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _autotune(*args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def _modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {name: StandIn(name) for name in _NAMES}
    triton, language = modules["triton"], modules["triton.language"]
    triton.__version__ = VERSION
    triton.jit, triton.autotune, triton.heuristics = _jit, _autotune, _autotune
    triton.constexpr_function = lambda function: function
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()
    triton.language = language
    language.constexpr = int
    language.core, language.standard = modules["triton.language.core"], modules["triton.language.standard"]
    return modules
