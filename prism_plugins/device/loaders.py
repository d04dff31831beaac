"""Data loading and kernel compilation inside a slice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.utils.data

from prism_plugins.errors import PrismError
from prism_plugins.integration import SliceContext

_CUDA_HOME = "/usr/local/cuda"

_IN_PROCESS = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
}


def dataloader_init(context: SliceContext) -> Callable[..., None]:
    """``DataLoader.__init__`` that loads in the process, and says so once."""
    original = torch.utils.data.DataLoader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        bound = signature.bind(self, *arguments, **options)
        if bound.arguments.get("num_workers"):
            context.assume("DataLoader: batches are loaded in the process, without workers")
        bound.arguments.update({k: v for k, v in _IN_PROCESS.items() if k in bound.arguments})
        original(*bound.args, **bound.kwargs)

    return __init__


class CannotCompile(PrismError, RuntimeError):
    """torch's own error of a build that fails is a RuntimeError too: who can do without the extension goes on."""


def guard_cpp_extension(module: ModuleType) -> None:
    """``torch.utils.cpp_extension``: a CUDA_HOME to look at, and a clear error for who would compile for the GPU."""

    def refuse(what: str) -> Callable[..., None]:
        def fail(*arguments: Any, **options: Any) -> None:
            raise CannotCompile(
                f"the script compiles a CUDA extension ({what}), which the virtual CUDA device cannot run: "
                "switch the option off that needs it"
            )

        return fail

    if module.CUDA_HOME is None:
        module.CUDA_HOME = _CUDA_HOME
    module.load_inline = refuse("torch.utils.cpp_extension.load_inline")
    module.CUDAExtension = refuse("torch.utils.cpp_extension.CUDAExtension")
    original = module.load

    def load(name: str, sources: Any, *arguments: Any, **options: Any) -> Any:
        listed = [sources] if isinstance(sources, str) else sources
        if any(str(s).endswith((".cu", ".cuh")) for s in listed):
            refuse(name)()
        return original(name, sources, *arguments, **options)

    module.load = load
