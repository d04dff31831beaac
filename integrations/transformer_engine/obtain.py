"""Transformer Engine's Python layer without building it: the pure wheel of PyPI, unpacked into the user's cache.

The ``transformer_engine`` distribution on PyPI is Python only (the libraries are in other distributions), with the metadata
that TE asks for. Nothing of it is changed, and nothing is put into the environment.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from prism_plugins.errors import PrismError
from prism_plugins.user_cache import cache_folders

DEFAULT_VERSION = "2.13.0"
"""The newest version whose features were all tried."""
_SUBFOLDER = "transformer_engine"
_POINTER = "selected"
_VERSION = re.compile(r"\d+(\.\d+){1,2}([.+-]?\w+)*")


def set_up_versions() -> dict[str, Path]:
    """Folders to put on the import path, by version, newest last; complete ones only."""
    found: dict[str, Path] = {}
    for base in reversed(cache_folders()):
        for folder in sorted((base / _SUBFOLDER).glob("*")):
            if (folder / "transformer_engine" / "__init__.py").is_file() and _VERSION.fullmatch(folder.name):
                found[folder.name] = folder
    return dict(sorted(found.items(), key=lambda item: _sortable(item[0])))


def selected() -> tuple[Path, Path] | None:
    """The folder of the version that was set up last, and the file that says so; None when there is none."""
    for base in cache_folders():
        pointer = base / _SUBFOLDER / _POINTER
        try:
            version = pointer.read_text().strip()
        except OSError:
            continue
        folder = set_up_versions().get(version)
        if folder is not None:
            return folder, pointer
    return None


def set_up_folder(version: str) -> Path:
    """The folder of one version (``2.13`` stands for the newest 2.13). Raises PrismError when it was not set up."""
    versions = set_up_versions()
    matching = [v for v in versions if v == version or v.startswith(f"{version}.")]
    if not matching:
        raise PrismError(f"Transformer Engine {version} was not set up: prism setup-te {version}")
    return versions[matching[-1]]


def set_up(version: str | None, *, select: bool = True) -> tuple[str, Path, bool]:
    """Obtain a version with pip (None: the default one). Returns version, folder and whether it was there before.
    ``select``: slices use it from now on.

    Raises PrismError when pip fails (it says why) or the cache cannot be written.
    """
    version = version or DEFAULT_VERSION
    if not _VERSION.fullmatch(version):
        raise PrismError(f"{version!r} is no version of Transformer Engine (try {DEFAULT_VERSION})")
    base = _writable_base()
    known = set_up_versions().get(version)
    if known is not None:
        if select:
            _select(base, version)
        return version, known, True
    with tempfile.TemporaryDirectory(dir=base, prefix=".new-") as scratch:
        target = Path(scratch) / "te"
        _pip(f"transformer_engine=={version}", target)
        found = sorted(target.glob("transformer_engine-*.dist-info"))
        if not (target / "transformer_engine" / "pytorch").is_dir() or not found:
            raise PrismError(
                f"the transformer_engine {version} that pip found has no Python layer for PyTorch"
            )
        real = found[0].name.removeprefix("transformer_engine-").removesuffix(".dist-info")
        folder = base / real
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)
    if select:
        _select(base, real)
    return real, folder, False


def _select(base: Path, version: str) -> None:
    temporary = base / f".{_POINTER}.{os.getpid()}"
    temporary.write_text(version + "\n")
    os.replace(temporary, base / _POINTER)


def _pip(requirement: str, target: Path) -> None:
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif (found := shutil.which("pip") or shutil.which("pip3")) is not None:
        pip = [found]
    else:
        raise PrismError(
            "prism setup-te needs pip, which this environment does not have: python -m ensurepip"
        )
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--no-compile"]
    done = subprocess.run(
        [*pip, "install", *options, "--target", str(target), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "ERROR: no message"
        ]
        raise PrismError(f"pip cannot obtain {requirement}: {lines[-1].removeprefix('ERROR: ')}")


def _writable_base() -> Path:
    for base in cache_folders():
        folder = base / _SUBFOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        except OSError:
            continue
    raise PrismError("there is no cache directory to write to: set XDG_CACHE_HOME")


def _sortable(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
