"""Which line of the script, or of its framework, makes a call: the innermost frame that is neither torch's nor prism's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_SKIPPED = ["torch", "prism_plugins", "contextlib", "functools", "threading", "typing_extensions", "warnings"]
"""Modules (with all below them) that only pass calls on."""
_LIMIT = 60
_known: dict[tuple[object, int], str | None] = {}


def skip_frames_of(*modules: str) -> None:
    """Name further modules that only pass calls on, as a framework's wrappers of ``torch.distributed`` do."""
    _SKIPPED.extend(module for module in modules if module not in _SKIPPED)
    _known.clear()


def call_site() -> str:
    """``path:line`` of the innermost frame that counts; empty where there is none (a call made by autograd's threads
    out of torch's own code). Paths of packages begin with the package, others are relative to the working directory
    where they can be."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LIMIT):
        if frame is None:
            break
        key = (frame.f_code, frame.f_lineno)
        try:
            site = _known[key]
        except KeyError:
            site = _known[key] = _site(frame)
        if site is not None:
            return site
        frame = frame.f_back
    return ""


def _site(frame: FrameType) -> str | None:
    module = frame.f_globals.get("__name__", "")
    if any(module == skipped or module.startswith(skipped + ".") for skipped in _SKIPPED):
        return None
    return f"{_short(frame.f_code.co_filename, module)}:{frame.f_lineno}"


def _short(filename: str, module: str) -> str:
    parts = Path(filename).parts
    depth = module.count(".") + 1 + (parts[-1:] == ("__init__.py",))
    if module.count(".") and len(parts) >= depth:
        return "/".join(parts[-depth:])
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return filename
