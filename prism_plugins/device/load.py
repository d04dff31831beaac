"""Bring the virtual CUDA device into a slice: the library before ``import torch``, the Python side after it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from prism_plugins.device import library
from prism_plugins.device.build import NVML, RUNTIME, find_torch, library_path, obstacle
from prism_plugins.device.memory import configure_allocator
from prism_plugins.errors import PrismError
from prism_plugins.program.allocator_settings import settings_from_environment
from prism_plugins.program.slices import SliceSpec

if TYPE_CHECKING:
    from prism_plugins.integration import SliceContext

REAL_LIMIT_BYTES = 64 * 1024
"""On the virtual device, storages up to this size have real memory and are computed; larger ones are shape only."""

HOST_LIMIT_BYTES = 2**20
"""On the virtual device, floating-point tensors on the host that torch allocates are shape only from this size on."""

_UNLIMITED = 2**63

_configuration: list[int] = []
"""What the backend was configured with, the limit for real storages first."""


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuBLAS workspace per handle (thread) and stream (CUDABlas: ``getChosenWorkspaceSize``): 32 MiB on Hopper,
    ``:4096:2:16:8`` (8.1 MiB) on earlier GPUs."""
    return 32 * 2**20 if capability[0] >= 9 else 4096 * 2 * 1024 + 16 * 8 * 1024


def load_device(spec: SliceSpec) -> None:
    """Build (once) and load the backend for the installed torch. Call before ``import torch``.

    Raises:
        PrismError: torch was imported already, would refuse its allocator's settings, is a build that leaves no room for the device, or the backend cannot
            be built.
    """
    if "torch" in sys.modules:
        raise PrismError(
            "torch was imported before the virtual CUDA device was loaded; start the script through prism"
        )
    torch = find_torch()
    if trouble := obstacle(torch):
        raise PrismError(trouble)
    path = library_path(torch)
    library.load_library(path, runtime=[path.with_name(n) for n in (RUNTIME, NVML)] if torch.native else ())
    built_for = library.call("torch_version").decode()
    if torch.version.split("+")[0].split("a")[0] != built_for:
        raise PrismError(
            f"the virtual CUDA backend was built for torch {built_for}, but torch {torch.version} is installed"
        )
    _configuration[:] = [
        REAL_LIMIT_BYTES if spec.device == "virtual" else _UNLIMITED,
        HOST_LIMIT_BYTES if spec.device == "virtual" else _UNLIMITED,
        spec.gpus_per_node,
        spec.gpu.memory_bytes,
        *spec.gpu.capability,
        cublas_workspace_bytes(spec.gpu.capability),
    ]
    library.call("configure", *_configuration)
    if library.is_native():
        gpu = spec.gpu
        library.call(
            "configure_gpu", spec.gpus_per_node, gpu.memory_bytes, *gpu.capability, gpu.num_sms, gpu.l2_bytes,
            gpu.name.encode(),
        )  # fmt: skip
    configure_allocator(settings_from_environment(os.environ))
    library.call("register")


def set_real_limit(nbytes: int) -> int:
    """Give real memory to storages of up to ``nbytes`` from now on; returns the limit before."""
    before = _configuration[0]
    _configuration[0] = nbytes
    library.call("configure", *_configuration)
    return before


def install_torch_cuda(context: SliceContext) -> None:
    """Make ``torch.cuda`` the virtual device's: supply what a CPU build lacks, replace what needs a GPU. Call after
    ``import torch``."""
    from prism_plugins.device.torch_cuda import install

    install(context)
