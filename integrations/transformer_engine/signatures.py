"""The interface of ``transformer_engine_torch`` by version: functions with their argument names, enums, classes.

The table is data, written by ``scripts/te_signatures.py`` from the pybind sources of each release. Versions are
``major.minor``; each one after the first lists only what it changed.
"""

from __future__ import annotations

import functools
import importlib.resources
import re

import msgspec


class Interface(msgspec.Struct, kw_only=True):
    """What the compiled module of one version offers."""

    functions: dict[str, tuple[str, ...]] = {}
    """Argument names in positional order, by function."""
    enums: dict[str, tuple[str, ...]] = {}
    """Value names in order, by enum."""
    classes: tuple[str, ...] = ()


class Change(msgspec.Struct, kw_only=True, omit_defaults=True):
    """From one version to the next: entries that are new or differ, and names that are gone."""

    functions: dict[str, tuple[str, ...]] = {}
    enums: dict[str, tuple[str, ...]] = {}
    classes: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Names of functions, enums and classes."""


class Table(msgspec.Struct, kw_only=True):
    """The file."""

    source: str
    versions: dict[str, Change]
    """Ascending; the first one is a change from nothing."""


def apply(interface: Interface, change: Change) -> Interface:
    """The interface after a change."""
    gone = set(change.removed)
    return Interface(
        functions={k: v for k, v in (interface.functions | change.functions).items() if k not in gone},
        enums={k: v for k, v in (interface.enums | change.enums).items() if k not in gone},
        classes=tuple(c for c in dict.fromkeys((*interface.classes, *change.classes)) if c not in gone),
    )


def difference(old: Interface, new: Interface) -> Change:
    """What :func:`apply` needs to make ``new`` of ``old``."""
    names = {*old.functions, *old.enums, *old.classes} - {*new.functions, *new.enums, *new.classes}
    return Change(
        functions={k: v for k, v in new.functions.items() if old.functions.get(k) != v},
        enums={k: v for k, v in new.enums.items() if old.enums.get(k) != v},
        classes=tuple(c for c in new.classes if c not in old.classes),
        removed=tuple(sorted(names)),
    )


@functools.cache
def known_versions() -> tuple[str, ...]:
    """``major.minor`` of the table, ascending."""
    return tuple(_table().versions)


def interface_of(version: str) -> tuple[Interface, str]:
    """The interface of a version (``2.13.0``, ``2.13.0+cu13``), and the version of the table that it was taken from:
    the same minor version, else the newest known one below, else the oldest."""
    wanted = _numbers(version)
    chosen = known_versions()[0]
    interface = Interface()
    for name, change in _table().versions.items():
        if name != chosen and _numbers(name) > wanted:
            break
        interface, chosen = apply(interface, change), name
    return interface, chosen


def minor_version(version: str) -> str:
    """``2.13`` of ``2.13.0+abc``."""
    return ".".join(map(str, _numbers(version)))


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@functools.cache
def _table() -> Table:
    file = importlib.resources.files(__package__) / "signatures.json"
    return msgspec.json.decode(file.read_bytes(), type=Table)
