"""Compile the virtual CUDA backend for the installed torch, once, into a cache.

One build serves every Python of a torch version: the library uses libtorch only and is spoken to through ctypes
and torch operators. From one source tree come two modes (docs/cuda-builds.md):

* *hooks*, for CPU builds of torch: the device layer (guard, streams, generators, allocator) is ours;
* *native*, for CUDA builds: it is torch's own, on a CUDA runtime of ours that needs no driver and no GPU, a library
  of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from prism_plugins.device.elf import needed_libraries
from prism_plugins.errors import PrismError
from prism_plugins.user_cache import cache_folders

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility-inlines-hidden", "-DAT_PER_OPERATOR_HEADERS")
LINK_FLAGS = ("-shared", "-Wl,--exclude-libs,ALL")
"""Compilers of a toolset (RHEL's gcc-toolset, one built beside the system's) link parts of libstdc++ statically. The library
has global symbols, so torch would call those parts in place of its own, and crash: none of them is exported."""
_TYPICAL_CPU_SECONDS = 60
LIBRARY, RUNTIME, NVML = "libprism_cuda.so", "libprism_cudart.so", "libprism_nvml.so"
_NVML_SOURCE = SOURCES / "cudart_nvml.cpp"
_SONAMES = {RUNTIME: "libcuda.so.1", NVML: "libnvidia-ml.so.1"}
"""Whoever looks for the driver in a slice finds the virtual runtime, and no GPU."""

_HOOKS_ONLY = frozenset(
    f"{name}.cpp" for name in ("bindings", "blocks", "guard", "streams", "virtual_generator")
)


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True):
    """The torch that ``import torch`` would find, known without importing it."""

    root: Path
    version: str
    cuda: str | None

    @property
    def native(self) -> bool:
        """Whether the native mode is the one for it."""
        return self.cuda is not None

    @property
    def mode(self) -> str:
        """The mode in words."""
        if self.native:
            return "native mode: torch's own CUDA layer and allocator on a virtual CUDA runtime"
        return "hooks mode: prism's CUDA layer under torch.cuda"


def obstacle(torch: TorchBuild) -> str | None:
    """Why the virtual device cannot run on this build of torch, in one line; None when it can."""
    if not torch.native:
        return None
    library = torch.root / "lib/libc10_cuda.so"
    try:
        needed = needed_libraries(library)
    except (OSError, ValueError) as error:
        return f"torch {torch.version} for CUDA {torch.cuda}: {library} cannot be read ({error})"
    if not any(name.startswith("libcudart.so") for name in needed):
        return (
            f"torch {torch.version} for CUDA {torch.cuda} has the CUDA runtime built into it (libc10_cuda.so is not linked "
            "to libcudart.so), where no virtual one can take its place: install torch from PyPI, or a CPU build"
        )
    return None


def sources(*, native: bool) -> tuple[list[Path], list[Path]]:
    """The sources of the backend and, in native mode, those of the CUDA runtime under it."""
    backend, runtime = [], []
    for path in sorted(SOURCES.glob("*.cpp")):
        if path.name.startswith("cudart_"):
            runtime.append(path)
        elif path.name not in _HOOKS_ONLY if native else not path.name.startswith("native_"):
            backend.append(path)
    return backend, runtime if native else []


def find_torch() -> TorchBuild:
    """Locate torch. Raises PrismError when there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise PrismError("torch is not installed in this Python: pip install 'torch>=2.11'")
    root = Path(spec.submodule_search_locations[0])
    facts: dict[str, str | None] = {}
    text = (root / "version.py").read_text()
    for name in ("__version__", "cuda"):
        match = re.search(rf"^{name}\b[^=]*= *(?:'([^']*)'|None)", text, re.MULTILINE)
        facts[name] = match[1] if match else None
    return TorchBuild(root=root, version=facts["__version__"] or "unknown", cuda=facts["cuda"])


def library_path(torch: TorchBuild) -> Path:
    """The compiled backend for this torch, building it when the cache has none.

    Raises:
        PrismError: no compiler, no place to write, or the compilation failed.
    """
    name = f"torch-{torch.version}-{_source_hash(torch)}"
    for cache in cache_folders():
        path = cache / name / LIBRARY
        if path.exists():
            return path
    cache = _writable_cache()
    folder = cache / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LIBRARY
    with _lock(folder / "lock"):
        if not path.exists():  # else another process built it while we waited
            _compile(torch, path)
    return path


def cuda_ops(native_functions: Path) -> list[str]:
    """Names (``aten::mm``, with overload) of the operators that have a CUDA kernel in a CUDA build of torch.

    Read from torch's own ``native_functions.yaml``: operators with ``CUDA`` under ``dispatch`` (or with a generated
    ``ufunc_inner_loop``), directly or through the out variant they are made from (``structured_delegate``).
    """
    keys: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    name, in_dispatch = "", False
    for line in native_functions.read_text().splitlines():
        if match := re.match(r"- func: ([\w.]+)\(", line):
            name, in_dispatch = match[1], False
            keys[name] = set()
        elif match := re.match(r"  structured_delegate: (\S+)", line):
            delegates[name] = match[1]
        elif line.startswith("  ufunc_inner_loop:"):
            keys[name].add("CUDA")  # generated for CPU and CUDA
            in_dispatch = False
        elif line.startswith("  dispatch:"):
            in_dispatch = True
        elif in_dispatch and line.startswith("    "):
            if not line.lstrip().startswith("#"):
                keys[name] |= {key.strip() for key in line.split(":")[0].split(",")}
        else:
            in_dispatch = False
    return [
        f"aten::{op}"
        for op, own in keys.items()
        if "CUDA" in own or "CUDA" in keys.get(delegates.get(op, ""), ())
    ]


def _source_hash(torch: TorchBuild) -> str:
    digest = hashlib.sha256()
    backend, runtime = sources(native=torch.native)
    for path in sorted([*SOURCES.glob("*.h"), *backend, *runtime]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    digest.update(inspect.getsource(cuda_ops).encode())
    digest.update(repr((FLAGS, LINK_FLAGS, torch.version, torch.cuda, os.uname().machine)).encode())
    return digest.hexdigest()[:16]


def _writable_cache() -> Path:
    tried = []
    for cache in cache_folders():
        try:
            cache.mkdir(mode=0o755, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache):
                pass
        except OSError as error:
            tried.append(f"{cache} ({error.strerror})")
            continue
        if tried:
            _say(f"cannot write to {tried[0]}; the compiled backend goes to {cache}")
        return cache
    raise PrismError(
        f"no place to keep the compiled backend: {', '.join(tried) or 'no home directory'}; "
        "set XDG_CACHE_HOME to a writable directory"
    )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> str:
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if candidate and shutil.which(candidate.split()[0]):
            return candidate
    raise PrismError(
        "no C++ compiler for the virtual CUDA backend (compiled once per torch): install g++ "
        "(Debian/Ubuntu: apt install g++; RHEL/Fedora: dnf install gcc-c++; conda: conda install gxx) or set CXX"
    )


def _compile(torch: TorchBuild, path: Path) -> None:
    compiler = _compiler()
    include = torch.root / "include"
    native_functions = torch.root.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    for needed in (include / "ATen/ATen.h", native_functions):
        if not needed.exists():
            raise PrismError(
                f"torch {torch.version} comes without {needed}: install an official build of torch"
            )
    cores = len(os.sched_getaffinity(0))
    backend, runtime = sources(native=torch.native)
    seconds = max(20, _TYPICAL_CPU_SECONDS // min(cores, len(backend)))
    _say(f"compiling the virtual CUDA backend for torch {torch.version} (once, about {seconds} s)")
    start = time.monotonic()
    for left in path.parent.glob("build-*"):  # We hold the lock: of a compilation that was killed.
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        work = Path(scratch)
        (work / "cuda_ops.inc").write_text("".join(f'"{op}",\n' for op in cuda_ops(native_functions)))
        includes = [
            f"-I{work}",
            "-isystem",
            str(include),
            "-isystem",
            str(include / "torch/csrc/api/include"),
        ]
        with ThreadPoolExecutor(cores) as pool:
            objects = list(pool.map(lambda s: _compile_one(compiler, s, work, includes), backend))
        if runtime:
            link_runtime(compiler, work, path.parent)
        lib = torch.root / "lib"
        libraries = ["-ltorch_cpu", "-lc10"]
        if torch.native:
            libraries = ["-Wl,--no-as-needed", "-ltorch_cuda", *libraries]
        _link(compiler, work, path, [*objects, f"-L{lib}", *libraries, f"-Wl,-rpath,{lib}"])
    _say(f"compiled in {time.monotonic() - start:.0f} s: {path}")


def link_runtime(compiler: str, work: Path, folder: Path) -> None:
    """Compile the virtual CUDA runtime, and what stands for NVML beside it, into ``folder``, with ``work`` for scratch.
    They use neither torch nor CUDA."""
    _, runtime = sources(native=True)
    for name, own in ((NVML, [_NVML_SOURCE]), (RUNTIME, [s for s in runtime if s != _NVML_SOURCE])):
        objects = [_compile_one(compiler, source, work, []) for source in own]
        _link(compiler, work, folder / name, [*objects, f"-Wl,-soname,{_SONAMES[name]}"])


def _compile_one(compiler: str, source: Path, work: Path, includes: list[str]) -> str:
    target = work / f"{source.stem}.o"
    _call([*compiler.split(), *FLAGS, *includes, "-c", str(source), "-o", str(target)], source.name)
    return str(target)


def _link(compiler: str, work: Path, path: Path, arguments: list[str]) -> None:
    library = work / path.name
    _call([*compiler.split(), *LINK_FLAGS, "-o", str(library), *arguments], path.name)
    os.replace(library, path)


def _call(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise PrismError(
            f"the compiler {command[0]} cannot be run: {error.strerror}; install g++ or set CXX"
        ) from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error:" in line] or [
            done.stderr.strip()[-300:]
        ]
        raise PrismError(
            f"compiling {what} for the virtual CUDA backend failed: {errors[0].strip()} (compiler: {command[0]}; "
            "g++ 11 or newer is needed)"
        )


def _say(text: str) -> None:
    print(f"[prism] {text}", file=sys.stderr, flush=True)
