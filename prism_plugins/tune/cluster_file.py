"""A cluster description as a file, for runs that must be priced on exactly it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.costs.cluster import Cluster
from prism_plugins.rundir import write_bytes


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Write TOML that :func:`prism_plugins.costs.cluster.load_cluster` reads back as an equal cluster."""
    lines: list[str] = []
    _table(lines, "", msgspec.to_builtins(cluster))
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def _table(lines: list[str], name: str, values: dict[str, Any]) -> None:
    if name:
        lines.append(f"\n[{name}]")
    for key, value in values.items():
        if not isinstance(value, dict) and value is not None:
            lines.append(f"{key} = {_value(value)}")
    for key, value in values.items():
        if isinstance(value, dict):
            _table(lines, f"{name}.{key}" if name else key, value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return repr(value)
