"""Calls of the compiled module: implementations by name, arguments by name, ops recorded with their geometry.

An implementation takes one :class:`Call` and allocates on the virtual device what the C++ of the same name allocates,
in the same order: outputs, tensors saved for backward, workspaces that live while it runs. It records one op for each
kernel that runs, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Implementation = Callable[["Call"], Any]

IMPLEMENTATIONS: dict[str, Implementation] = {}
_told: list[Callable[[str], None]] = []


def tell_assumptions_to(sink: Callable[[str], None]) -> None:
    """Where :func:`assume` lines go; the slice's own list."""
    _told[:] = [sink]


def assume(text: str) -> None:
    """Say what was assumed; lines that were said before may come again."""
    for sink in _told:
        sink(text)


def implements(*names: str) -> Callable[[Implementation], Implementation]:
    """Register the implementation of functions of the compiled module."""

    def register(function: Implementation) -> Implementation:
        for name in names:
            IMPLEMENTATIONS[name] = function
        return function

    return register


class Call:
    """One call: ``call.name`` is the function, every other attribute an argument, in the order of the signature; None
    where none was given."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.__dict__ = {"name": name, **arguments}

    def __getattr__(self, name: str) -> Any:
        return None

    def first(self) -> Any:
        """The first argument, whatever the version calls it."""
        return next(value for key, value in self.__dict__.items() if key != "name")


def bound(name: str, parameters: Sequence[str], implementation: Implementation) -> Callable[..., Any]:
    """The function of the module: binds arguments by the names that this version gives them.

    Raises TypeError for arguments that the signature does not have, as pybind does.
    """
    allowed = set(parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(parameters) or not allowed.issuperset(kwargs):
            surplus = sorted(set(kwargs) - allowed) or f"{len(args)} positional ones"
            raise TypeError(f"{name}() does not take {surplus}; it takes {', '.join(parameters)}")
        given = dict(zip(parameters, args, strict=False)) | kwargs
        return implementation(Call(name, {p: given[p] for p in parameters if p in given}))

    function.__name__ = function.__qualname__ = name
    return function
