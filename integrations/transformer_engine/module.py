"""The virtual ``transformer_engine_torch``: every name that the version at hand has.

Functions without an implementation raise an error that names them when they are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integrations.transformer_engine import userbuffers
from prism_plugins.integrations.transformer_engine.calls import IMPLEMENTATIONS, bound
from prism_plugins.integrations.transformer_engine.enums import make_enums
from prism_plugins.integrations.transformer_engine.signatures import interface_of

_PARTS = ("activations", "attention", "gemm", "misc", "multi_tensor", "norms", "quantize", "rope", "router")


def fill_module(module: ModuleType, version: str) -> str:
    """Put the interface of a version of Transformer Engine into a module; returns the version of the table used."""
    for part in _PARTS:
        importlib.import_module(f"prism_plugins.integrations.transformer_engine.{part}")
    interface, known = interface_of(version)
    for name, value in make_enums(interface.enums).items():
        setattr(module, name, value)
    for name, parameters in interface.functions.items():
        implementation = IMPLEMENTATIONS.get(name)
        function = _missing(name) if implementation is None else bound(name, parameters, implementation)
        setattr(module, name, function)
    for name in interface.classes:
        setattr(module, name, userbuffers.CLASSES.get(name) or type(name, (), {}))
    if "bulk_overlap_ag_with_external_gemm" in interface.functions:
        module.bulk_overlap_ag_with_external_gemm = userbuffers.bulk_overlap_with_external_gemm
    return known


def _missing(name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> None:
        raise PrismError(
            f"Transformer Engine calls {name}, which prism does not emulate yet: switch the feature off that needs it"
        )

    function.__name__ = function.__qualname__ = name
    return function
