"""Imports of Transformer Engine inside a slice: its own Python, on the virtual compiled module.

The Python comes from the environment where Transformer Engine is installed, else from what ``prism setup-te`` left in
the user's cache (:mod:`.obtain`).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from prism_plugins.integration import SliceContext
from prism_plugins.integrations.transformer_engine.obtain import selected, set_up_folder
from prism_plugins.integrations.transformer_engine.signatures import minor_version

COMPILED = "transformer_engine_torch"
APEX_GEMM = "fused_weight_gradient_mlp_cuda"
_TRITON_USERS = (
    "transformer_engine.common.triton.",
    "transformer_engine.pytorch.triton.",
    "transformer_engine.pytorch.permutation",
    "transformer_engine.pytorch.cross_entropy",
)
_FLASH_USERS = (
    "transformer_engine.pytorch.attention.dot_product_attention.backends",
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
)
_ONNX_USER = "transformer_engine.pytorch.onnx_extensions"
VERSION_VARIABLE = "PRISM_TE"
"""Which version that was set up to use, instead of the last one; ``none``: none."""


def install(context: SliceContext) -> None:
    """Make ``import transformer_engine`` work in this process. Does nothing where there is no Python layer, and on
    devices that really compute."""
    if context.spec.device != "virtual":
        return
    version = _installed_version()
    wanted = os.environ.get(VERSION_VARIABLE, "")
    if wanted == "none":
        return
    if version is None:
        if wanted:
            folder = set_up_folder(wanted)
        else:
            found = selected()
            if found is None:
                return
            folder, pointer = found
            context.on_import("transformer_engine", lambda module: context.depends_on(pointer))
        sys.path.append(str(folder))
        importlib.invalidate_caches()
        version = _installed_version()
        if version is None:
            return
        source = f"Python of {folder}"
    else:
        source = "the installed Python"
    # TE's own switch for builds: the shared libraries are not opened.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    sys.meta_path.insert(0, _Finder(context, version, source))
    context.on_import("transformer_engine.common", _no_extension)


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _no_extension(module: ModuleType) -> None:
    """The compiled module is there already; where its file lies does not matter."""
    module.load_framework_extension = lambda framework: None
    module.sanity_checks_for_pypi_installation = lambda: None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the virtual compiled module, and runs modules that use Triton on a stand-in."""

    def __init__(self, context: SliceContext, version: str, source: str) -> None:
        self._context = context
        self._version = version
        self._source = source
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As documented for finders."""
        if fullname == COMPILED:
            return importlib.machinery.ModuleSpec(fullname, _VirtualLoader(self._fill), origin="prism")
        if fullname == APEX_GEMM:
            return importlib.machinery.ModuleSpec(fullname, _VirtualLoader(self._fill_apex), origin="prism")
        if self._busy:
            return None
        if fullname == _ONNX_USER:
            around = _without_onnx
        elif fullname in _FLASH_USERS:
            around = self._with_flash
        elif fullname.startswith(_TRITON_USERS):
            around = _with_triton
        else:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            _execute_inside(spec.loader, around)
        return spec

    def _fill(self, module: ModuleType) -> None:
        from prism_plugins.integrations.transformer_engine.calls import tell_assumptions_to
        from prism_plugins.integrations.transformer_engine.misc import CUBLASLT_VERSION, CUDNN_VERSION
        from prism_plugins.integrations.transformer_engine.module import fill_module

        known = fill_module(module, self._version)
        assume = self._context.assume
        tell_assumptions_to(assume)
        assume(
            f"Transformer Engine {self._version} ({self._source}) runs on virtual kernels; cuDNN {_dotted(CUDNN_VERSION)} "
            f"and cuBLASLt {CUBLASLT_VERSION // 10000}.{CUBLASLT_VERSION // 100 % 100} are assumed"
        )
        if known != minor_version(self._version):
            assume(
                f"Transformer Engine {self._version} is not in prism's table: its compiled module is taken to be that of {known}"
            )

    @contextlib.contextmanager
    def _with_flash(self) -> Iterator[None]:
        """flash-attn, as the environment has it or as it is taken to be, of which only the kernels are virtual."""
        from prism_plugins.integration.stand_ins import stand_in
        from prism_plugins.integrations.transformer_engine import flash_attention

        installed = flash_attention.installed_version()
        version = installed or flash_attention.VERSION
        used = "is installed" if installed else "is taken as installed on the cluster"

        def on_use() -> None:
            self._context.assume(f"flash-attn {version} {used}: attention runs its kernels")

        real = importlib.metadata.version
        importlib.metadata.version = lambda name: version if name == "flash-attn" else real(name)
        try:
            with stand_in(flash_attention.modules(on_use)):
                yield
        finally:
            importlib.metadata.version = real

    def _fill_apex(self, module: ModuleType) -> None:
        from prism_plugins.integrations.apex.weight_gradient import fill_weight_gradient

        fill_weight_gradient(
            module,
            on_use=lambda: self._context.assume(
                "Apex's fused weight gradient kernel is taken as installed on the cluster"
            ),
        )


def _dotted(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


class _VirtualLoader(importlib.abc.Loader):
    def __init__(self, fill: Callable[[ModuleType], None]) -> None:
        self._fill = fill

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        module.__file__ = "<prism>"
        self._fill(module)


def _execute_inside(
    loader: importlib.abc.Loader, around: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with around():
            execute(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _without_onnx() -> contextlib.AbstractContextManager[None]:
    from prism_plugins.integration.stand_ins import onnx_stand_in

    return onnx_stand_in()


def _with_triton() -> contextlib.AbstractContextManager[None]:
    from prism_plugins.integration.triton_kernels import triton_stand_in

    return triton_stand_in()
