"""Everything the slice changes in torch so that ``torch.cuda`` is the virtual device: one table, applied and undone
here.

Two kinds of entries. *Additions* are the names of ``torch._C`` that only CUDA builds have (:mod:`.bindings`);
torch.cuda's Python works on top of them as it is. *Replacements* are attributes that torch binds at import time, or
that cannot work without a GPU. In a CUDA build (native mode) most of both is torch's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.cuda.graphs
import torch.cuda.nvtx
import torch.cuda.streams
import torch.utils._triton
import torch.utils.data

from prism_plugins.device import library
from prism_plugins.device.bindings import (
    CUDA_VERSION,
    DeviceProperties,
    Nvtx,
    bindings,
    cudart,
    native_bindings,
)
from prism_plugins.device.host_memory import clone_storage, new, new_tensor, share_storage
from prism_plugins.device.library import call
from prism_plugins.device.loaders import dataloader_init, guard_cpp_extension
from prism_plugins.device.memory import memory_counts
from prism_plugins.integration import SliceContext

_MISSING = object()

LEGACY_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class Replacement(NamedTuple):
    """One attribute that is replaced."""

    target: Any
    name: str
    value: Any
    why: str


def replacements(context: SliceContext) -> list[Replacement]:
    """The table for this build of torch. A missing attribute means that upstream renamed it."""
    return _everywhere(context) + (_in_cuda_builds() if library.is_native() else _in_cpu_builds(context))


def _everywhere(context: SliceContext) -> list[Replacement]:
    cuda = torch.cuda
    graph_error = "CUDA graphs are not supported on prism's virtual CUDA device: run without them"

    def refuse_graph(cls: type, *arguments: object, **options: object) -> None:
        raise NotImplementedError(graph_error)

    return [
        Replacement(cuda, "_device_count_nvml", lambda: -1, "must not count the GPUs of this machine"),
        Replacement(
            cuda,
            "device_memory_used",
            lambda device=None: memory_counts(_index(device))["reserved_bytes"]["all"]["current"],
            "asks NVML",
        ),
        Replacement(
            cuda.CUDAGraph, "__new__", refuse_graph, "capture needs a GPU; a clear error instead of a stub's"
        ),
        Replacement(
            torch.utils._triton, "has_triton_package", lambda: False, "Triton kernels cannot run here"
        ),
        Replacement(torch.utils._triton, "has_triton", lambda: False, "Triton kernels cannot run here"),
        Replacement(
            torch.utils.data.DataLoader,
            "__init__",
            dataloader_init(context),
            "worker processes would inherit the slice; data is loaded in the process",
        ),
        Replacement(torch.UntypedStorage, "resize_", _resize_storage, "compiled without the CUDA branch"),
        Replacement(torch.UntypedStorage, "__new__", _new_storage, "does not know CUDA in a CPU build"),
        Replacement(torch.UntypedStorage, "clone", clone_storage, "would copy memory that nobody touches"),
        Replacement(torch.UntypedStorage, "share_memory_", share_storage, "would touch reserved memory"),
        Replacement(torch.Tensor, "new", new, "takes the key of shape-only host tensors for a device"),
        Replacement(torch.Tensor, "new_tensor", new_tensor, "takes that key for a device"),
    ]


def _in_cuda_builds() -> list[Replacement]:
    return [
        Replacement(
            torch.backends.cudnn, "is_acceptable", lambda tensor: False, "cuDNN cannot start without a GPU"
        ),
    ]


def _in_cpu_builds(context: SliceContext) -> list[Replacement]:
    cuda, spec = torch.cuda, context.spec
    properties = DeviceProperties(spec.gpu)
    added = bindings(spec)
    bound = "bound at import time, from a function a CPU build lacks"
    return [
        Replacement(torch.version, "cuda", CUDA_VERSION, "scripts ask it whether this is a CUDA build"),
        Replacement(cuda, "_cudart", cudart(spec), "None in a CPU build; _lazy_init checks it"),
        Replacement(cuda, "_exchange_device", added["_cuda_exchangeDevice"], bound),
        Replacement(cuda, "_maybe_exchange_device", added["_cuda_maybeExchangeDevice"], bound),
        Replacement(cuda, "_CudaDeviceProperties", DeviceProperties, bound),
        Replacement(
            cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False, "a stub that raises in a CPU build"
        ),
        Replacement(cuda.nvtx, "_nvtx", Nvtx(), "raises in a CPU build"),
        *(
            Replacement(cuda, name, _legacy_type(name, dtype), "its constructor refuses in a CPU build")
            for name, dtype in LEGACY_TYPES.items()
        ),
        # Not in torch.cuda before the device is initialised in a CUDA build either.
        Replacement(
            cuda, "_get_device_properties", lambda device: properties, "set by _cuda_init in a CUDA build"
        ),
    ]


def install(context: SliceContext) -> Callable[[], None]:
    """Apply the table. Returns the function that undoes it."""
    undo: list[tuple[Any, str, Any]] = []

    def put(target: Any, name: str, value: Any) -> None:
        undo.append((target, name, vars(target).get(name, _MISSING)))
        setattr(target, name, value)

    added_later = {"_get_device_properties"}
    native = library.is_native()
    for name, value in (native_bindings() if native else bindings(context.spec)).items():
        put(torch._C, name, value)
    for entry in replacements(context):
        if entry.name not in added_later and not hasattr(entry.target, entry.name):
            raise AttributeError(
                f"torch {torch.__version__} has no {entry.target.__name__}.{entry.name}: renamed upstream?"
            )
        put(entry.target, entry.name, entry.value)
    for name, cls in ({} if native else _rebuilt_stream_classes()).items():
        put(torch.cuda.streams, name, cls)
        put(torch.cuda, name, cls)
    context.on_import("torch.utils.cpp_extension", guard_cpp_extension)
    torch.cuda._lazy_init()

    def uninstall() -> None:
        while undo:
            target, name, value = undo.pop()
            if value is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, value)

    return uninstall


def _rebuilt_stream_classes() -> dict[str, type]:
    """torch.cuda's own Stream, ExternalStream and Event, defined again over the virtual base classes."""
    spec = importlib.util.find_spec("torch.cuda.streams")
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: getattr(module, name) for name in ("Stream", "ExternalStream", "Event")}


def _legacy_type(name: str, dtype: torch.dtype) -> type:
    """``torch.cuda.FloatTensor`` and its kin: constructor and isinstance, as in a CUDA build."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == dtype

    def new(cls: type, *arguments: Any) -> torch.Tensor:
        if arguments and not isinstance(arguments[0], int):
            return torch.tensor(arguments[0], dtype=dtype, device="cuda")
        return torch.empty(arguments or (0,), dtype=dtype, device="cuda")

    return Meta(name, (), {"__new__": new, "__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})


_storage_resize = torch.UntypedStorage.resize_
_storage_new = torch.UntypedStorage.__new__


def _resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _storage_resize(self, size)
    with torch.cuda.device(self.device):
        call("resize_storage", self._cdata, size)
    return self


def _new_storage(cls: type, *arguments: Any, device: Any = None, **options: Any) -> torch.UntypedStorage:
    if device is None or torch.device(device).type != "cuda":
        return _storage_new(cls, *arguments, **({} if device is None else {"device": device}), **options)
    if arguments and not isinstance(arguments[0], int):
        return torch.tensor(arguments[0], dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(arguments[0] if arguments else 0, dtype=torch.uint8, device=device).untyped_storage()


def _index(device: Any) -> int:
    return torch.cuda._utils._get_device_index(device, optional=True)
