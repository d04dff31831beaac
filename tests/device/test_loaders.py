"""Scripts that would compile for the GPU get a clear error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from prism_plugins.device.loaders import guard_cpp_extension
from prism_plugins.errors import PrismError


def cpp_extension(cuda_home=None):
    module = SimpleNamespace(
        CUDA_HOME=cuda_home, load=lambda name, sources: name, load_inline=None, CUDAExtension=None
    )
    guard_cpp_extension(module)
    return module


def test_cuda_home_is_there_to_look_at():
    assert cpp_extension().CUDA_HOME
    assert cpp_extension("/opt/cuda").CUDA_HOME == "/opt/cuda"


def test_host_extensions_still_compile():
    assert cpp_extension().load("helpers", ["helpers.cpp"]) == "helpers"


@pytest.mark.parametrize("compile_it", [
    lambda m: m.load("kernels", ["kernels.cu"]),
    lambda m: m.load("kernels", "kernels.cu"),
    lambda m: m.load_inline("kernels", cuda_sources="__global__"),
    lambda m: m.CUDAExtension("kernels", ["a.cpp"]),
])  # fmt: skip
def test_kernels_for_the_gpu_do_not(compile_it):
    with pytest.raises(PrismError, match="compiles a CUDA extension"):
        compile_it(cpp_extension())


def test_torch_has_what_the_guard_replaces():
    import torch.utils.cpp_extension as real

    for name in ("CUDA_HOME", "load", "load_inline", "CUDAExtension"):
        assert hasattr(real, name)
