"""``prism doctor``: whether this machine is ready to emulate, without importing torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from prism_plugins import __version__
from prism_plugins.emit.console import gib, make_console, show

_MARKS = {"ok": ("ok", "green"), "note": ("note", "cyan"), "problem": ("PROBLEM", "bold red")}
_MIN_TORCH = (2, 11)
_MIN_PYTHON = (3, 11)

_EPILOG = """\
Exit status: 0 when an emulation can run here, 1 when something must be mended first."""


class Check(msgspec.Struct, frozen=True):
    """One line of the report."""

    what: str
    state: str
    """``ok``, ``note`` or ``problem``."""
    finding: str


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "doctor", help="is this machine ready to emulate?",
        description="Check what an emulation needs on this machine, and say what to do about what is missing.",
        epilog=_EPILOG,
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    checks = examine()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.state]
        table.add_row(Text(mark, style=style), check.what, check.finding)
    show(table, make_console(sys.stdout))
    return 1 if any(check.state == "problem" for check in checks) else 0


def examine() -> list[Check]:
    """All checks. One that fails itself is a problem, not a traceback."""
    checks: list[Check] = []
    for examiner in _EXAMINERS:
        try:
            checks += examiner()
        except Exception as error:
            name = examiner.__name__.strip("_").replace("_", " ")
            checks.append(Check(name, "problem", f"the check itself failed: {type(error).__name__}: {error}"))
    return checks


def _python() -> Iterator[Check]:
    version = platform.python_version()
    if sys.version_info < _MIN_PYTHON:
        yield Check("python", "problem", f"{version}; prism needs {'.'.join(map(str, _MIN_PYTHON))} or later")
    else:
        yield Check("python", "ok", f"{version} ({sys.executable})")
    yield Check("prism", "ok", f"{__version__} ({Path(__file__).parent})")


def _torch() -> Iterator[Check]:
    facts = torch_facts()
    if facts is None:
        yield Check("torch", "problem", "not installed; pip install torch (a CPU build is enough)")
        return
    version, cuda = facts
    build = f"built for CUDA {cuda}" if cuda else "CPU build"
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if release < _MIN_TORCH:
        least = ".".join(map(str, _MIN_TORCH))
        yield Check("torch", "problem", f"{version}, {build}; prism needs {least} or later")
    elif cuda:
        yield Check(
            "torch", "problem",
            f"{version}, {build}; the virtual GPU runs on CPU builds so far: "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu",
        )  # fmt: skip
    else:
        yield Check("torch", "ok", f"{version}, {build}")


def _autoload() -> Iterator[Check]:
    names = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    if "prism_plugins" not in names:
        yield Check(
            "autoload", "problem", "the entry point is not registered; pip install prism-plugins again"
        )
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Check(
            "autoload", "note",
            "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0; start scripts with python -m prism_plugins.run SCRIPT",
        )  # fmt: skip
    else:
        yield Check("autoload", "ok", "torch loads prism when --prism-emulate is on the command line")
    if os.environ.get("PRISM_EMULATE"):
        yield Check(
            "autoload", "note", f"PRISM_EMULATE={os.environ['PRISM_EMULATE']} arms every script of this shell"
        )


def _compiler() -> Iterator[Check]:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        yield Check(
            "compiler", "problem",
            f"{name} not found; install it (Debian, Ubuntu: apt install g++; RHEL: dnf install gcc-c++; "
            "conda: conda install gxx)",
        )  # fmt: skip
        return
    output = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    yield Check("compiler", "ok", f"{(output.splitlines() or [path])[0]}")


def _virtual_gpu() -> Iterator[Check]:
    folder = cache_root()
    built = sorted(folder.glob("**/*.so")) if folder.is_dir() else []
    if built:
        names = ", ".join(str(path.parent.relative_to(folder)) for path in built[-3:])
        yield Check("virtual GPU", "ok", f"compiled for {len(built)} torch build(s) in {folder}: {names}")
    else:
        yield Check(
            "virtual GPU", "note", f"not compiled yet; the first emulation does it, once, into {folder}"
        )
    probe = folder
    while not probe.exists():
        probe = probe.parent
    if not os.access(probe, os.W_OK):
        yield Check(
            "cache", "problem", f"{folder} cannot be written; set XDG_CACHE_HOME to a directory that can"
        )


def _slice_cache() -> Iterator[Check]:
    from prism_plugins.cache import default_root

    root = default_root()
    sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
    count = len(list(root.iterdir())) if root.is_dir() else 0
    yield Check("slice cache", "ok", f"{count} slices, {gib(sum(sizes))} in {root}")


def _frameworks() -> Iterator[Check]:
    found = {name: _version(name) for name in ("megatron-core", "deepspeed", "transformer-engine", "apex")}
    for name in ("megatron-core", "deepspeed"):
        yield Check(name, "ok" if found[name] else "note", found[name] or "not installed")
    if not found["megatron-core"] and _findable("megatron.core"):
        yield Check("megatron-core", "ok", "importable from the source tree")
    if not found["megatron-core"] and not found["deepspeed"]:
        yield Check(
            "frameworks", "note", "prism predicts Megatron-core jobs; install what your script imports"
        )
    for name in ("transformer-engine", "apex"):
        yield Check(name, "note", found[name] or "not installed (the job runs as it would without it)")
    names = sorted(
        entry.name for entry in importlib.metadata.entry_points(group="prism_plugins.integrations")
    )
    state = "ok" if names else "problem"
    yield Check("integrations", state, ", ".join(names) or "none registered; pip install prism-plugins again")


def _machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check(
        "machine", "ok", f"{cores} cores, {gib(memory)} memory; slices at a time: {cores} (--prism-jobs)"
    )


def _gpu() -> Iterator[Check]:
    try:
        import pynvml
    except ImportError:
        yield Check("GPU", "note", "not looked for: nvidia-ml-py is not installed (no GPU is needed)")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Check("GPU", "note", f"none ({error}); none is needed")
        return
    try:
        names = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            names.append(f"{name}, {gib(pynvml.nvmlDeviceGetMemoryInfo(handle).total)}")
        driver = pynvml.nvmlSystemGetDriverVersion()
        yield Check("GPU", "ok", f"{'; '.join(names) or 'none'} (driver {driver}); not needed")
    finally:
        pynvml.nvmlShutdown()


_EXAMINERS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python, _torch, _autoload, _compiler, _virtual_gpu, _slice_cache, _frameworks, _machine, _gpu,
)  # fmt: skip


def torch_facts() -> tuple[str, str | None] | None:
    """(version, CUDA version of the build or None) without importing torch; None when it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    values: dict = {}
    source = (Path(spec.origin).parent / "version.py").read_text()
    exec(compile(source, "torch/version.py", "exec"), values)
    return str(values["__version__"]), values.get("cuda")


def cache_root() -> Path:
    """Where the compiled virtual GPU lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism_plugins"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
