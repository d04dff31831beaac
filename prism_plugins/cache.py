"""Slices of earlier runs, found by content.

A slice's key covers what can be known before it runs: the command and the files it names, the environment, the
installed versions, prism's own sources, the virtual GPU (or this machine's, where slices run on one), and the journals it reads. What it turned out to depend on
(the user's modules it imported) is recorded in its manifest and verified when the slice is reused. Costs and the
cluster's network are no part of it: changing them only simulates again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from prism_plugins.arming import slice_interpreter_flags
from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.gpu.sensors import gpu_identity, hindered
from prism_plugins.program.measured import Measured
from prism_plugins.program.model import SCHEMA
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.rundir import SliceDir, read_json, write_json
from prism_plugins.slice_env import slice_environment
from prism_plugins.user_cache import cache_folders

DEFAULT_CAP_BYTES = 4 * 2**30
_ABANDONED_S = 3600.0
"""A copy into the cache takes seconds; what is older was left by a process that was killed."""
_HASHED_WHOLE_BYTES = 64 * 2**20
"""Larger files (data sets) are compared by size and time."""

_VOLATILE = frozenset(
    [
        "_",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "TERM",
        "COLUMNS",
        "LINES",
        "PS1",
        "PS2",
        "LS_COLORS",
        "HISTFILE",
        "DISPLAY",
        "TMUX",
        "TMUX_PANE",
        "STY",
        "WINDOWID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "COLORTERM",
        "TERM_PROGRAM",
        "TERM_PROGRAM_VERSION",
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "XDG_SESSION_ID",
        "XDG_RUNTIME_DIR",
        "XDG_CACHE_HOME",
        "NO_COLOR",
        "FORCE_COLOR",
        "MAIL",
        "TMPDIR",
        "LOGNAME",
        "EDITOR",
        "PAGER",
        "LESS",
        "DEBIAN_FRONTEND",
        "GPG_TTY",
    ]
)
_CHOICES = frozenset(["PRISM_TE"])
"""Of prism's own variables, those that change what a slice runs and are in no spec."""
_VOLATILE_PREFIXES = ("SSH_", "DBUS_", "VSCODE_", "LC_", "XDG_", "GIT_", "PYTEST_", "PRISM_")


MEASURED_BEFORE = (
    "slices were measured on this GPU by an earlier launch (--prism-no-cache measures them again)"
)


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was."""

    path: str
    size: int
    mtime_ns: int
    digest: str
    """BLAKE2b of the content; empty for files too large to read each time."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json: what a finished slice depended on."""

    schema: int = SCHEMA
    files: tuple[FileStamp, ...] = ()


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """entry.json: digests of the kept files, against a damaged cache."""

    schema: int = SCHEMA
    digests: dict[str, str]


class SliceCache:
    """The cache directory. Any number of runs may use it at the same time."""

    def __init__(self, root: Path | None = None, *, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        self.root = root or default_root()
        self.cap_bytes = cap_bytes

    def fetch(self, spec: SliceSpec) -> SliceReport | None:
        """Copy a kept slice into ``spec.slice_dir`` and return its report; None when there is none that holds."""
        entry = self.root / slice_key(spec)
        kept = SliceDir(entry)
        target = SliceDir(Path(spec.slice_dir))
        try:
            digests = read_json(entry / "entry.json", _Entry).digests
            if not all(_digest(entry / name) == digest for name, digest in digests.items()):
                return None
            manifest = read_json(kept.manifest, Manifest)
            if not all(_unchanged(stamp) for stamp in manifest.files):
                return None
            target.path.mkdir(parents=True, exist_ok=True)
            for name in digests:
                shutil.copyfile(entry / name, target.path / name)
            report = read_json(target.report, SliceReport)
        except (OSError, FileFormatError):
            return None
        report.cached = True
        if spec.device == "cuda":
            report.assumptions = (*report.assumptions, MEASURED_BEFORE)
        write_json(target.report, report)
        write_json(target.spec, spec)
        with contextlib.suppress(OSError):
            os.utime(entry)
        return report

    def keep(self, spec: SliceSpec) -> None:
        """Keep a slice that ended well; what was measured beside other processes or on a hot GPU is measured again. A cache that
        cannot be written is no error of the run."""
        source = SliceDir(Path(spec.slice_dir))
        try:
            if spec.device == "cuda" and not _undisturbed(source):
                return
            self.root.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
            try:
                digests = {}
                for file in (
                    source.report,
                    source.facts,
                    source.program,
                    source.journal,
                    source.log,
                    source.manifest,
                    source.measured,
                ):
                    if file.exists():
                        shutil.copyfile(file, staging / file.name)
                        digests[file.name] = _digest(staging / file.name)
                write_json(staging / "entry.json", _Entry(digests=digests))
                entry = self.root / slice_key(spec)
                shutil.rmtree(entry, ignore_errors=True)
                staging.rename(entry)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            self._prune()
        except (OSError, PrismError):
            return

    def _prune(self) -> None:
        """Remove the least recently used entries beyond the cap."""
        entries = []
        for entry in self.root.iterdir():
            with contextlib.suppress(OSError):
                if entry.name.startswith(".new-"):
                    if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                        shutil.rmtree(entry)
                else:
                    size = sum(file.stat().st_size for file in entry.iterdir())
                    entries.append((entry.stat().st_mtime, size, entry))
        total = sum(size for _, size, _ in entries)
        for _, size, entry in sorted(entries):
            if total <= self.cap_bytes:
                break
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


def default_root() -> Path:
    """PRISM_SLICE_CACHE, or XDG_CACHE_HOME/prism_plugins/slices."""
    if own := os.environ.get("PRISM_SLICE_CACHE"):
        return Path(own)
    folders = cache_folders()
    if not folders:
        raise PrismError(
            "no place to keep slices for later runs: set XDG_CACHE_HOME, or use --prism-no-cache"
        )
    return folders[0] / "slices"


def slice_key(spec: SliceSpec) -> str:
    """Name of a slice by everything that is known before it runs."""
    identity = msgspec.to_builtins(msgspec.structs.replace(spec, slice_dir="", journals=()))
    parts = (
        SCHEMA,
        identity,
        [_digest(Path(journal)) for journal in spec.journals],
        os.getcwd(),
        sorted(relevant_environment(slice_environment(spec)).items()),
        sys.version,
        slice_interpreter_flags(),
        _installed(),
        _own_sources(),
        [msgspec.to_builtins(_stamp(path, with_mtime=False)) for path in _files_named(spec.argv)],
        gpu_identity() if spec.device == "cuda" else "",
    )
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=20).hexdigest()


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what changes from shell to shell and cannot matter to a training script."""
    return {
        k: v
        for k, v in environ.items()
        if k in _CHOICES or (k not in _VOLATILE and not k.startswith(_VOLATILE_PREFIXES))
    }


def make_manifest(read: Iterable[Path] = ()) -> Manifest:
    """The files behind the modules of this process that are neither installed nor prism's, and those that the script
    is known to have ``read``. Called in the slice."""
    paths = sysconfig.get_paths()
    skip = tuple(
        {os.path.realpath(paths[k]) + os.sep for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    )
    own = str(Path(__file__).resolve().parent) + os.sep
    files = {os.path.realpath(path) for path in read if path.is_file()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isfile(file):
            real = os.path.realpath(file)
            if not real.startswith((*skip, own)) and f"{os.sep}site-packages{os.sep}" not in real:
                files.add(real)
    return Manifest(files=tuple(_stamp(Path(file)) for file in sorted(files)))


def _undisturbed(source: SliceDir) -> bool:
    """Whether nothing was seen that made the GPU of a slice slower than it is."""
    findings = read_json(source.report, SliceReport).findings
    return not any(finding.kind == "shared_gpu" for finding in findings) and not hindered(
        read_json(source.measured, Measured).gpu
    )


def _installed() -> list[str]:
    """Distributions on the path with their versions, from the names of their metadata folders."""
    names = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names += [
                n
                for n in os.listdir(folder or ".")
                if n.endswith((".dist-info", ".egg-info")) and not n.startswith("prism_plugins")
            ]
    return sorted(set(names))


def _own_sources() -> str:
    """Hash of prism's own sources that run in a slice."""
    package = Path(__file__).resolve().parent
    integrations = [Path(p) for p in __import__("prism_plugins.integrations").integrations.__path__]
    digest = hashlib.blake2b(digest_size=20)
    for folder in (package, *integrations):
        for file in sorted(folder.rglob("*")):
            part = file.relative_to(folder).parts[0]
            if file.suffix in (".py", ".cpp", ".h") and part not in (
                "costs",
                "simulate",
                "emit",
                "world",
                "tune",
            ):
                digest.update(f"{file.relative_to(folder)}:".encode() + file.read_bytes())
    return digest.hexdigest()


def _files_named(argv: Iterable[str]) -> list[Path]:
    """Files that the command names: the script, configuration, tokenizer files, …"""
    found = []
    for word in argv:
        value = word.partition("=")[2] if word.startswith("-") and "=" in word else word
        with contextlib.suppress(OSError, ValueError):
            if value and os.path.isfile(value):
                found.append(Path(value))
    return found


def _stamp(path: Path, *, with_mtime: bool = True) -> FileStamp:
    status = path.stat()
    small = status.st_size <= _HASHED_WHOLE_BYTES
    return FileStamp(
        path=str(path),
        size=status.st_size,
        mtime_ns=status.st_mtime_ns if with_mtime or not small else 0,
        digest=_digest(path) if small and os.access(path, os.R_OK) else "",
    )


def _unchanged(stamp: FileStamp) -> bool:
    try:
        status = os.stat(stamp.path)
    except OSError:
        return False
    if status.st_size != stamp.size:
        return False
    if status.st_mtime_ns == stamp.mtime_ns:
        return True
    return bool(stamp.digest) and _digest(Path(stamp.path)) == stamp.digest


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
