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
from prism_plugins.device.build import find_torch, obstacle
from prism_plugins.emit.console import gib, make_console, show
from prism_plugins.errors import PrismError
from prism_plugins.user_cache import cache_folders

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
    try:
        torch = find_torch()
    except PrismError as error:
        yield Check("torch", "problem", str(error))
        return
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"
    release = tuple(int(part) for part in torch.version.split("+")[0].split(".")[:2] if part.isdecimal())
    if release < _MIN_TORCH:
        least = ".".join(map(str, _MIN_TORCH))
        yield Check("torch", "problem", f"{torch.version}, {build}; prism needs {least} or later")
    elif trouble := obstacle(torch):
        yield Check("torch", "problem", trouble)
    else:
        yield Check("torch", "ok", f"{torch.version}, {build}; {torch.mode}")


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
    candidates = [name for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name]
    name = next((name for name in candidates if shutil.which(name.split()[0])), None)
    if name is None:
        yield Check(
            "compiler",
            "problem",
            f"none of {', '.join(candidates)} found; install g++ (Debian, Ubuntu: apt install g++; "
            "RHEL: dnf install gcc-c++; conda: conda install gxx) or set CXX",
        )
        return
    command = [*name.split(), "--version"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    yield Check("compiler", "ok", f"{(output.splitlines() or [name])[0]}")


def _simulation() -> Iterator[Check]:
    from prism_plugins.simulate.native import is_compiled

    if is_compiled():
        yield Check("simulation", "ok", "its inner loop is compiled")
    else:
        yield Check(
            "simulation", "note",
            "its inner loop runs in Python, about four times slower, same results: it could not be compiled",
        )  # fmt: skip


def _virtual_gpu() -> Iterator[Check]:
    folder = cache_root()
    try:
        version = find_torch().version
    except PrismError:
        return
    built = list(folder.glob(f"torch-{version}-*/*.so"))
    if built:
        newest = max(built, key=lambda path: path.stat().st_mtime)
        yield Check("virtual GPU", "ok", f"compiled for torch {version} ({newest.parent})")
    else:
        yield Check(
            "virtual GPU", "note", f"not compiled yet; the first emulation does it, once, into {folder}"
        )
    probe = folder
    while not probe.exists():
        probe = probe.parent
    if not os.access(probe, os.W_OK):
        yield Check(
            "cache",
            "note",
            f"{folder} cannot be written; the virtual GPU goes to the temporary directory and slices are not "
            "kept for reuse (XDG_CACHE_HOME may name another place)",
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
    yield _transformer_engine(found["transformer-engine"])
    yield Check("apex", "note", found["apex"] or "not installed (the job runs as it would without it)")
    names = sorted(
        entry.name for entry in importlib.metadata.entry_points(group="prism_plugins.integrations")
    )
    state = "ok" if names else "problem"
    yield Check("integrations", state, ", ".join(names) or "none registered; pip install prism-plugins again")


def _transformer_engine(installed: str) -> Check:
    from prism_plugins.integrations.transformer_engine.obtain import selected

    name = "transformer-engine"
    if installed:
        return Check(name, "ok", installed)
    set_up = selected()
    if set_up is not None:
        return Check(name, "ok", f"{set_up[0].name}, its Python layer in {set_up[0]}")
    return Check(name, "note", "not installed; Megatron's default needs it: prism setup-te")


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


def _outputs() -> Iterator[Check]:
    """What can be written everywhere, and what needs a package here."""
    yield Check("outputs", "ok", "report.html, trace.pftrace, Kineto and Chakra traces need nothing more")
    for package, what in (
        ("tensorboard", "prism trace --format tensorboard"),
        ("HolisticTraceAnalysis", "analyses of Kineto traces"),
    ):
        found = _version(package)
        yield Check(package, "ok" if found else "note", found or f"not installed; {what} needs it")


_EXAMINERS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python, _torch, _autoload, _compiler, _simulation, _virtual_gpu, _slice_cache, _frameworks, _machine, _gpu,
    _outputs,
)  # fmt: skip


def cache_root() -> Path:
    """Where the compiled virtual GPU lies."""
    folders = cache_folders()
    if not folders:
        raise PrismError("there is no home directory and no temporary one to keep it in: set XDG_CACHE_HOME")
    return folders[0]


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
