"""Modules that frameworks import and that do nothing in a slice."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


class Unused:
    """A name of code that never runs here: can be called, decorate, and be looked into."""

    def __call__(self, *args: Any, **options: Any) -> Unused:
        """Whatever it is."""
        return self

    def __getattr__(self, name: str) -> Unused:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class StandIn(ModuleType):
    """A module (and package) of :class:`Unused` names, apart from those that are set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Unused:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused()


@contextlib.contextmanager
def stand_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Importing one of these names gives the module inside."""
    previous = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in previous.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def onnx_stand_in() -> contextlib.AbstractContextManager[None]:
    """``onnxscript`` and ``onnx``, with which Transformer Engine defines what only an ONNX export uses; themselves where installed."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    return stand_in({name: StandIn(name) for name in missing})
