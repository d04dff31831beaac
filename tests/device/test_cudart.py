"""The virtual CUDA runtime, called as torch calls libcudart. It uses neither torch nor CUDA, so it is tested anywhere."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import pytest

from prism_plugins.device import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")

OUT_OF_MEMORY, INVALID_DEVICE, INVALID_HANDLE, NOT_SUPPORTED = 2, 101, 400, 801
GIB = 2**30


class Gpu(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int),
        ("memory_bytes", ctypes.c_size_t),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("num_sms", ctypes.c_int),
        ("l2_bytes", ctypes.c_size_t),
        ("name", ctypes.c_char * 256),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build.link_runtime(build._compiler(), tmp_path_factory.mktemp("work"), folder)
    return folder / build.RUNTIME


@pytest.fixture
def cudart(library):
    runtime = ctypes.CDLL(str(library))
    runtime.prism_cudart_stream_of.restype = ctypes.c_void_p
    runtime.prism_cudart_memory_used.restype = ctypes.c_size_t
    runtime.prism_cudart_tally.restype = ctypes.c_size_t
    runtime.prism_cudart_configure(
        ctypes.byref(Gpu(4, 10 * GIB, 9, 0, 132, 50 << 20, b"NVIDIA H100 80GB HBM3"))
    )
    runtime.cudaSetDevice(0)
    runtime.cudaGetLastError()
    return runtime


def pointer():
    return ctypes.c_void_p()


def malloc(cudart, nbytes):
    p = pointer()
    return cudart.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(nbytes)), p


def tally(cudart):
    buffer = ctypes.create_string_buffer(65536)
    n = cudart.prism_cudart_tally(buffer, ctypes.c_size_t(65536))
    rows = (line.rsplit("\t", 1) for line in buffer.raw[:n].decode().splitlines())
    return {name: int(count) for name, count in rows}


def test_it_needs_nothing_of_cuda_and_takes_the_drivers_place(library):
    from prism_plugins.device.elf import needed_libraries

    assert not [name for name in needed_libraries(library) if "cuda" in name]
    code = f"import ctypes; ctypes.CDLL({str(library)!r}); print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "100"  # CUDA_ERROR_NO_DEVICE


def test_nvml_knows_of_no_gpu_but_answers_torch(library):
    nvml = ctypes.CDLL(str(library.with_name(build.NVML)))
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetGpuFabricInfoV() == 3  # NVML_ERROR_NOT_SUPPORTED
    assert not hasattr(nvml, "nvmlInitWithFlags")  # pynvml's


def test_devices(cudart):
    n = ctypes.c_int()
    assert cudart.cudaGetDeviceCount(ctypes.byref(n)) == 0
    assert n.value == 4
    assert cudart.cudaSetDevice(4) == INVALID_DEVICE
    assert cudart.cudaPeekAtLastError() == INVALID_DEVICE
    assert cudart.cudaGetLastError() == INVALID_DEVICE
    assert cudart.cudaGetLastError() == 0
    assert cudart.cudaSetDevice(3) == 0
    assert cudart.cudaGetDevice(ctypes.byref(n)) == 0
    assert n.value == 3
    for which, value in ((16, 132), (38, 50 << 20), (75, 9), (76, 0), (97, 227 * 1024)):
        assert cudart.cudaDeviceGetAttribute(ctypes.byref(n), which, 0) == 0
        assert n.value == value


@pytest.mark.parametrize(
    ("function", "size", "multi_processor_count", "l2"),
    [("cudaGetDeviceProperties", 1008, 384, 596), ("cudaGetDeviceProperties_v2", 1032, 388, 616)],
)
def test_properties_have_the_layout_of_their_cuda(cudart, function, size, multi_processor_count, l2):
    """Offsets of cudaDeviceProp in the headers of CUDA 13.0 and 12.9."""
    buffer = ctypes.create_string_buffer(b"\xee" * (size + 64), size + 64)
    assert getattr(cudart, function)(buffer, 2) == 0
    assert buffer.raw[:21] == b"NVIDIA H100 80GB HBM3"
    assert int.from_bytes(buffer.raw[288:296], "little") == 10 * GIB
    assert int.from_bytes(buffer.raw[multi_processor_count : multi_processor_count + 4], "little") == 132
    assert int.from_bytes(buffer.raw[l2 : l2 + 4], "little") == 50 << 20
    assert buffer.raw[size : size + 64] == b"\xee" * 64
    assert getattr(cudart, function)(buffer, 9) == INVALID_DEVICE


def test_memory_is_counted_limited_and_given_back(cudart):
    assert cudart.prism_cudart_memory_used(1) == 0
    cudart.cudaSetDevice(1)
    status, p = malloc(cudart, 6 * GIB)
    assert status == 0
    status, refused = malloc(cudart, 6 * GIB)
    assert status == OUT_OF_MEMORY
    assert refused.value is None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cudart.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    assert (free.value, total.value) == (4 * GIB, 10 * GIB)
    cudart.prism_cudart_beyond_limit(1)
    status, beyond = malloc(cudart, 6 * GIB)
    cudart.prism_cudart_beyond_limit(-1)
    assert status == 0
    assert cudart.prism_cudart_memory_used(1) == 12 * GIB
    assert cudart.cudaFree(beyond) == 0
    assert cudart.cudaFree(p) == 0
    assert cudart.prism_cudart_memory_used(1) == 0
    assert cudart.cudaFree(p) != 0


def test_addresses_are_on_their_device_and_cannot_be_touched(cudart):
    cudart.cudaSetDevice(2)
    _, p = malloc(cudart, 1000)
    assert p.value & 1 << 62
    attributes = (ctypes.c_int * 6)()
    cudart.cudaPointerGetAttributes(attributes, ctypes.c_void_p(p.value + 999))
    assert tuple(attributes[:2]) == (2, 2)  # cudaMemoryTypeDevice, device
    cudart.cudaPointerGetAttributes(attributes, ctypes.create_string_buffer(8))
    assert attributes[0] == 0  # unregistered
    source = ctypes.create_string_buffer(b"values", 8)
    target = ctypes.create_string_buffer(8)
    assert cudart.cudaMemcpy(p, source, ctypes.c_size_t(8), 1) == 0
    assert cudart.cudaMemcpy(target, source, ctypes.c_size_t(8), 0) == 0
    assert target.value == b"values"
    assert tally(cudart)["cudaMemcpy"] >= 2
    cudart.cudaFree(p)


def test_virtual_memory_for_expandable_segments(cudart):
    def prototype(name, *types):
        function = pointer()
        cudart.cudaGetDriverEntryPointByVersion(
            name, ctypes.byref(function), 12000, ctypes.c_ulonglong(0), None
        )
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(function.value)

    u64, size = ctypes.c_uint64, ctypes.c_size_t
    create = prototype(b"cuMemCreate", ctypes.POINTER(u64), size, ctypes.c_void_p, u64)
    release = prototype(b"cuMemRelease", u64)
    properties, handle = (ctypes.c_int * 8)(1, 0, 1, 3), u64()
    used = cudart.prism_cudart_memory_used(3)
    assert create(ctypes.byref(handle), 8 * GIB, properties, 0) == 0
    assert cudart.prism_cudart_memory_used(3) == used + 8 * GIB
    assert create(ctypes.byref(u64()), 8 * GIB, properties, 0) == OUT_OF_MEMORY
    assert release(handle) == 0
    assert release(handle) != 0
    assert cudart.prism_cudart_memory_used(3) == used
    assert prototype(b"cuMulticastCreate")() == NOT_SUPPORTED


def test_streams_are_numbered_as_torchs_pools_are(cudart):
    cudart.cudaSetDevice(1)
    normal, high = [], []
    for _ in range(32):
        for made, priority in ((normal, 0), (high, -1)):
            stream = pointer()
            assert cudart.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, priority) == 0
            made.append(stream)
    assert [cudart.prism_cudart_stream_id(s) for s in normal] == list(range(1, 33))
    assert [cudart.prism_cudart_stream_id(s) for s in high] == list(range(33, 65))
    assert cudart.prism_cudart_stream_id(None) == 0
    other = cudart.prism_cudart_stream_id(ctypes.c_void_p(0x7F0012345600))
    assert other > 64
    assert other == cudart.prism_cudart_stream_id(ctypes.c_void_p(0x7F0012345600))
    assert cudart.prism_cudart_stream_of(1, other) == 0x7F0012345600
    assert cudart.prism_cudart_stream_of(1, 33) == high[0].value
    priority = ctypes.c_int()
    cudart.cudaStreamGetPriority(high[3], ctypes.byref(priority))
    assert priority.value == -1


def test_the_listener_hears_events(cudart):
    heard = []
    record = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
    one = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    stream_done = ctypes.CFUNCTYPE(None, ctypes.c_uint32)
    nothing = ctypes.CFUNCTYPE(None)
    listener = (
        record(lambda e, s: heard.append(("record", s))),
        record(lambda e, s: heard.append(("wait", s))),
        one(lambda e: heard.append("sync")),
        stream_done(lambda s: heard.append(("stream", s))),
        nothing(lambda: heard.append("device")),
    )
    table = (ctypes.c_void_p * 6)(*(ctypes.cast(f, ctypes.c_void_p) for f in listener), None)
    cudart.prism_cudart_listen(table)
    try:
        begin, end, never, stream = pointer(), pointer(), pointer(), pointer()
        cudart.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
        for event in (begin, end, never):
            cudart.cudaEventCreateWithFlags(ctypes.byref(event), 0)
        number = cudart.prism_cudart_stream_id(stream)
        cudart.cudaEventRecord(begin, stream)
        cudart.cudaStreamWaitEvent(None, begin, 0)
        cudart.cudaEventRecord(end, None)
        cudart.cudaEventSynchronize(end)
        cudart.cudaStreamSynchronize(stream)
        cudart.cudaDeviceSynchronize()
        assert heard == [("record", number), ("wait", 0), ("record", 0), "sync", ("stream", number), "device"]
        ms = ctypes.c_float(-1)
        assert cudart.cudaEventElapsedTime(ctypes.byref(ms), begin, end) == 0
        assert 0 <= ms.value < 1000
        assert cudart.cudaEventElapsedTime(ctypes.byref(ms), begin, never) == INVALID_HANDLE
    finally:
        cudart.prism_cudart_listen((ctypes.c_void_p * 6)())


def test_a_kernel_that_gets_here_is_counted_by_name(cudart):
    function = ctypes.c_char_p(b"host function")
    getattr(cudart, "__cudaRegisterFunction")(None, function, None, ctypes.c_char_p(b"a_kernel"))
    assert cudart.cudaLaunchKernelExC(None, function, None) == 0
    assert tally(cudart)["a_kernel"] == 1
    assert cudart.cudaGraphLaunch() == NOT_SUPPORTED
    assert tally(cudart)["cudaGraphLaunch (not supported)"] == 1
