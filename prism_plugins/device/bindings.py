"""The functions of ``torch._C`` that a CPU build lacks, for the virtual device; of a CUDA build, the few that cannot
do without a GPU.

torch.cuda's own Python runs unmodified on top of them, so only this layer follows upstream.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from prism_plugins.device import library
from prism_plugins.device.library import call
from prism_plugins.device.memory import configure_allocator, memory_counts, reset_peaks
from prism_plugins.device.streams import CUDA_DEVICE_TYPE, CudaEventBase, CudaStreamBase
from prism_plugins.program.allocator_settings import parse_settings
from prism_plugins.program.slices import GpuFacts, SliceSpec

CUDA_VERSION = "13.0"
"""``torch.version.cuda`` of the default wheels of torch 2.11 and newer."""

NCCL_VERSION = (2, 28, 9)

_ARCH_FLAGS = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` returns. Beyond the facts of the spec, values common to sm80 and sm90
    (CUDA programming guide, compute capabilities)."""

    def __init__(self, gpu: GpuFacts) -> None:
        self.name = gpu.name
        self.major, self.minor = gpu.capability
        self.total_memory = gpu.memory_bytes
        self.multi_processor_count = gpu.num_sms
        self.L2_cache_size = gpu.l2_bytes
        self.is_integrated = 0
        self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = 2048
        self.max_threads_per_block = 1024
        self.regs_per_multiprocessor = 65536
        self.warp_size = 32
        self.gcnArchName = gpu.name
        self.uuid = "00000000-0000-0000-0000-000000000000"
        self.pci_bus_id = self.pci_device_id = self.pci_domain_id = 0
        self.shared_memory_per_block = 48 * 1024
        hopper = gpu.capability[0] >= 9
        self.shared_memory_per_block_optin = (227 if hopper else 163) * 1024
        self.shared_memory_per_multiprocessor = (228 if hopper else 164) * 1024

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


def native_bindings() -> dict[str, Any]:
    """Attributes of ``torch._C`` to replace in a CUDA build, by name."""
    return {
        "_cuda_sleep": lambda cycles: None,
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_clearCublasWorkspaces": lambda: call("free_workspaces"),
        "_cuda_emptyCache": lambda: call("empty_cache"),
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_jiterator_compile_and_launch_kernel": _unsupported("torch.cuda.jiterator"),
    }


def bindings(spec: SliceSpec) -> dict[str, Any]:
    """Attributes to add to ``torch._C``, by name."""
    count = spec.gpus_per_node

    def stream_data(stream_id: int, device: int) -> tuple[int, int, int]:
        return (stream_id, device, CUDA_DEVICE_TYPE)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        call("set_device", device_index)
        call("exchange_stream", device_index, stream_id)

    def set_device(device: int) -> None:
        if not 0 <= device < count:
            raise torch.AcceleratorError(
                f"CUDA error: invalid device ordinal ({device}; a node of the described cluster has {count} GPUs)"
            )
        call("set_device", device)

    fractions: dict[int, float] = {}

    def set_memory_fraction(fraction: float, device: int) -> None:
        fractions[device] = fraction
        call("limit_memory", device, int(fraction * spec.gpu.memory_bytes))

    def exchange_device(device: int) -> int:
        previous = call("get_device")
        if device >= 0:
            set_device(device)
        return previous

    return native_bindings() | {
        "_has_cuda": True,
        "_CudaStreamBase": CudaStreamBase,
        "_CudaEventBase": CudaEventBase,
        "_CudaDeviceProperties": DeviceProperties,
        "_cuda_init": _initialise(count),
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": lambda: call("get_device"),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        # A function of its own: torch.compile keys its handlers by function.
        "_cuda_maybeExchangeDevice": lambda device: exchange_device(device),
        "_cuda_getArchFlags": lambda: _ARCH_FLAGS,
        "_cuda_getCompiledVersion": lambda: int(CUDA_VERSION.replace(".", "")) * 100,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_getCurrentStream": lambda d: stream_data(call("current_stream", d), d),
        "_cuda_getCurrentRawStream": lambda device: call("current_stream", device),
        "_cuda_getDefaultStream": lambda d: stream_data(0, d),
        "_cuda_getStreamFromExternal": lambda p, d: stream_data(call("external_stream", p), d),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: call("synchronize"),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_memoryStats": memory_counts,
        "_cuda_resetAccumulatedMemoryStats": lambda device: call("reset_accumulated_stats", device),
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_getMemoryFraction": lambda device: fractions.get(device, 1.0),
        "_accelerator_setAllocatorSettings": lambda text: configure_allocator(parse_settings(text)),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": _unsupported("torch.cuda.memory_snapshot"),
        "_cuda_record_memory_history": _unsupported("torch.cuda.memory._record_memory_history"),
        "_cuda_record_memory_history_legacy": _unsupported("torch.cuda.memory._record_memory_history"),
        "_nccl_version": lambda: NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2],
        "_nccl_version_suffix": lambda: b"",
    }


def cudart(spec: SliceSpec) -> types.SimpleNamespace:
    """What ``torch.cuda.cudart()`` returns."""

    def memory_info(device: int) -> tuple[int, int]:
        reserved = memory_counts(device)["reserved_bytes"]["all"]["current"]
        return (max(0, spec.gpu.memory_bytes - reserved), spec.gpu.memory_bytes)

    def ok(*arguments: object) -> int:
        return 0

    class CudaError(int):
        success = 0

    return types.SimpleNamespace(
        cudaError=CudaError,
        cudaGetErrorString=lambda error: "no error",
        cudaProfilerStart=ok,
        cudaProfilerStop=ok,
        cudaHostRegister=ok,
        cudaHostUnregister=ok,
        cudaStreamCreate=ok,
        cudaStreamDestroy=ok,
        cudaMemGetInfo=memory_info,
    )


class Nvtx:
    """What ``torch.cuda.nvtx`` calls: ranges go nowhere."""

    rangePushA = rangePop = rangeStartA = deviceRangeStart = staticmethod(lambda *arguments: 0)
    markA = rangeEnd = deviceRangeEnd = staticmethod(lambda *arguments: None)


def _initialise(count: int) -> Callable[[], None]:
    def initialise() -> None:
        generators = []
        for index in range(count):
            library.call("hand_out_default_generator", index)
            generators.append(torch.Generator(device=f"cuda:{index}"))
        torch.cuda.default_generators = tuple(generators)

    return initialise


def _unsupported(what: str) -> Callable[..., None]:
    def refuse(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"{what} is not supported on prism's virtual CUDA device")

    return refuse
