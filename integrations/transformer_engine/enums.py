"""Enums of the compiled module, made from the interface of the version at hand."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from prism_plugins.integrations.transformer_engine.dtypes import DType

_ENUMS: dict[str, Any] = {}


def make_enums(interface: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The enum classes by name; the last ones made are those that :func:`enum_value` knows."""
    _ENUMS.clear()
    for name, values in interface.items():
        # DType leaves numbers out; others count from zero.
        numbered = [(v, int(DType[v]) if name == "DType" else i) for i, v in enumerate(values)]
        _ENUMS[name] = enum.IntEnum(name, numbered)
    return dict(_ENUMS)


def enum_value(name: str, value: str) -> Any:
    """A value of an enum of this version."""
    return getattr(_ENUMS[name], value)
