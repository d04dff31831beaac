"""ds_config files as the layout search edits them: found on a command line, read, changed, written under a name of their own."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.rundir import write_bytes

_MARKS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""A JSON object with one of these is a DeepSpeed configuration."""
AUTO = "auto"
"""Hugging Face fills such a value in from the arguments of its Trainer."""
Config = dict[str, Any]


def find_config(argv: Sequence[str]) -> tuple[int, Path]:
    """Where a command line names its DeepSpeed configuration: index of the word, path.

    Raises :class:`PrismError` where it names none, or several.
    """
    found = []
    for i, word in enumerate(argv[1:], start=1):
        path = Path(word.partition("=")[2] or word) if word.startswith("-") else Path(word)
        if path.suffix in (".json", ".hjson") and path.is_file() and _is_config(path):
            found.append((i, path))
    if len(found) != 1:
        names = ", ".join(str(path) for _, path in found) or "none"
        raise PrismError(
            f"prism tune changes the DeepSpeed configuration file that the launch names on its command line; found {names}"
        )
    return found[0]


def _is_config(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        return any(mark in text for mark in _MARKS)
    except (OSError, UnicodeDecodeError):
        return False


def read_config(path: Path) -> Config:
    """The file's object. Raises :class:`PrismError` where it is no JSON object (comments are not read)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrismError(f"prism tune needs {path} as plain JSON: {error}") from None
    if not isinstance(content, dict):
        raise PrismError(f"{path} holds a {type(content).__name__} instead of a JSON object")
    return content


def write_config(directory: Path, config: Config) -> Path:
    """Write a copy named by its content; the same content always has the same path."""
    data = (json.dumps(config, indent=2) + "\n").encode()
    path = directory / "configs" / f"{hashlib.blake2b(data, digest_size=6).hexdigest()}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
    return path


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with other values by dotted key (``zero_optimization.stage``); None takes the key out."""
    new = copy.deepcopy(config)
    for key, value in values.items():
        *sections, last = key.split(".")
        section = new
        for name in sections:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return new


def differences(old: Config, new: Config, prefix: str = "") -> list[str]:
    """What is not the same, by dotted key: ``zero_optimization.stage = 2``, ``(drop gradient_clipping)``."""
    lines = []
    for key in sorted({*old, *new}):
        name, a, b = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{name}.")
        elif key not in new:
            lines.append(f"(drop {name})")
        elif a != b:
            lines.append(f"{name} = {json.dumps(b)}")
    return lines


def value_of(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key; ``default`` where there is none."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value
