"""The C interface of the virtual CUDA backend (``csrc/library.cpp``), typed.

Calls keep the GIL (``ctypes.PyDLL``): every function here returns in well under a microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from prism_plugins.errors import PrismError

_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "torch_version": (c_char_p, ()),
    "configure": (None, (c_size_t, c_size_t, c_int, c_int64, c_int, c_int, c_size_t)),
    "register": (None, ()),
    "get_device": (c_int, ()),
    "current_stream": (c_uint32, (c_int,)),
    "exchange_stream": (c_uint32, (c_int, c_uint32)),
    "external_stream": (c_uint32, (c_uint64,)),
    "start": (None, ()),
    "stop": (None, ()),
    "recording": (c_int, ()),
    "add_event": (None, (c_int, c_uint32, c_int64, c_int)),
    "num_events": (c_size_t, ()),
    "copy_events": (None, (c_void_p,)),
    "intern": (c_uint32, (c_char_p, c_size_t)),
    "num_signatures": (c_size_t, ()),
    "signature": (c_size_t, (c_uint32, c_char_p, c_size_t)),
    "empty_cache": (None, ()),
    "free_workspaces": (None, ()),
    "reset_peak_stats": (None, (c_int,)),
    "reset_accumulated_stats": (None, (c_int,)),
    "device_stats": (None, (c_int, POINTER(c_int64))),
    "live_allocations": (c_size_t, (POINTER(c_int64), c_size_t)),
    "late_peaks": (None, (c_int, POINTER(c_int64))),
    "limit_memory": (None, (c_int, c_int64)),
    "configure_allocator": (None, (c_int, c_size_t, c_size_t, c_double, POINTER(c_uint64))),
    "use_in_message": (None, (c_void_p,)),
    "used_on_other_streams": (c_size_t, (POINTER(c_uint32), c_size_t)),
    "host_stats": (None, (POINTER(c_int64),)),
    "reset_host_peaks": (None, ()),
    "is_host_shape_only": (c_int, (c_void_p,)),
    "real_host": (None, (c_int,)),
    "allocation_id": (c_int64, (c_void_p,)),
    "storage_state": (c_int, (c_void_p,)),
    "set_synthesized": (None, (c_void_p, c_int)),
    "set_category": (None, (c_void_p, c_int)),
    "resize_storage": (None, (c_void_p, c_size_t)),
    "event_record": (c_uint32, (c_void_p,)),
    "counters": (None, (POINTER(c_int64),)),
    "tally": (c_size_t, (c_int, c_char_p, c_size_t)),
}

_HOOKS_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "set_device": (None, (c_int,)),
    "stream_from_pool": (c_uint32, (c_int,)),
    "synchronize": (None, ()),
    "hand_out_default_generator": (None, (c_int,)),
    "elapsed_ms": (c_double, (c_void_p, c_void_p)),
}
"""Of the mode for CPU builds of torch: what ``bindings.py`` calls."""

_NATIVE_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "configure_gpu": (None, (c_int, c_size_t, c_int, c_int, c_int, c_size_t, c_char_p)),
    "native_tally": (c_size_t, (c_char_p, c_size_t)),
}
"""Of the mode for CUDA builds of torch."""

_loaded: ctypes.PyDLL | None = None


_native = False


def load_library(path: Path, *, runtime: Sequence[Path] = ()) -> None:
    """Load the compiled backend with global symbols, before ``import torch``. In a CUDA build of torch, ``runtime``
    are the libraries that it is to find in place of CUDA's."""
    global _loaded, _native
    try:
        for part in runtime:
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.PyDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise PrismError(
            f"the virtual CUDA backend {path} does not load ({error}); delete it to build it again"
        ) from None
    functions = _FUNCTIONS | (_NATIVE_FUNCTIONS if runtime else _HOOKS_FUNCTIONS)
    for name, (result, arguments) in functions.items():
        function = getattr(library, f"prism_{name}")
        function.restype = result
        function.argtypes = arguments
    _loaded = library
    _native = bool(runtime)


def is_native() -> bool:
    """Whether this process has the virtual device under torch's own CUDA layer (a CUDA build of torch)."""
    return _native


def is_loaded() -> bool:
    """Whether this process has the virtual device."""
    return _loaded is not None


def call(name: str, *arguments: object) -> object:
    """Call ``prism_<name>``."""
    return function(name)(*arguments)


def function(name: str) -> Callable[..., Any]:
    """The C function ``prism_<name>``. Raises PrismError outside a slice."""
    if _loaded is None:
        raise PrismError("the virtual CUDA device is not loaded: this works inside a slice only")
    return getattr(_loaded, f"prism_{name}")


def text(name: str, *arguments: object) -> str:
    """What a function of the form ``size_t f(..., char* out, size_t capacity)`` writes."""
    write = function(name)
    size = write(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(size)
    write(*arguments, buffer, size)
    return buffer.raw.decode()
