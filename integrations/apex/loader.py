"""Imports of Apex inside a slice: compiled modules are virtual, and so is the Python around them where it is not installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from prism_plugins.integration import SliceContext
from prism_plugins.integrations.apex import kernels, layers, optimizers
from prism_plugins.integrations.apex.weight_gradient import fill_weight_gradient

COMPILED: dict[str, Callable[[ModuleType], None]] = {
    "amp_C": kernels.fill_multi_tensor,
    "scaled_upper_triang_masked_softmax_cuda": kernels.fill_causal_softmax,
    "scaled_masked_softmax_cuda": kernels.fill_masked_softmax,
    "scaled_softmax_cuda": kernels.fill_softmax,
    "fast_layer_norm": kernels.fill_fast_layer_norm,
    "fused_layer_norm_cuda": kernels.fill_layer_norm,
    "fused_weight_gradient_mlp_cuda": fill_weight_gradient,
}
"""Apex's compiled modules."""

PYTHON: dict[str, Callable[[ModuleType], None]] = {
    "apex": lambda module: None,
    "apex.multi_tensor_apply": optimizers.fill_applier,
    "apex.optimizers": optimizers.fill_optimizers,
    "apex.normalization": lambda module: None,
    "apex.normalization.fused_layer_norm": layers.fill_fused,
    "apex.contrib": lambda module: None,
    "apex.contrib.layer_norm": lambda module: None,
    "apex.contrib.layer_norm.layer_norm": layers.fill_fast,
}
"""Modules of Apex's Python that training scripts import from; every one is a package here."""


def install(context: SliceContext) -> None:
    """Make the modules importable in this process."""
    installed = importlib.util.find_spec("apex") is not None
    sys.meta_path.insert(0, _Finder(context, COMPILED if installed else COMPILED | PYTHON, installed))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(
        self, context: SliceContext, modules: dict[str, Callable[[ModuleType], None]], installed: bool
    ) -> None:
        self._context = context
        self._modules = modules
        self._python = "its installed Python" if installed else "the parts of its Python that prism knows"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As documented for finders."""
        if fullname not in self._modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="prism", is_package=fullname in PYTHON)

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        module.__file__ = "<prism>"
        self._context.assume(
            f"Apex is taken as installed on the cluster (--prism-apex): its kernels are virtual, with {self._python}"
        )
        self._modules[module.__name__](module)
