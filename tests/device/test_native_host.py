"""A CUDA build of torch in slices on machines that have a driver, NVML or a GPU: none of them is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")

POISON = """
#include <cstdio>
#include <cstdlib>
#define POISON(name) extern "C" int name() { std::fputs("touched the real " #name "\\n", stderr); std::abort(); }
POISON(cuInit) POISON(cuDeviceGetCount) POISON(cuDeviceGet) POISON(cuDriverGetVersion) POISON(cuGetProcAddress_v2)
POISON(cuDevicePrimaryCtxGetState) POISON(cuCtxGetCurrent) POISON(cuMemAlloc_v2) POISON(nvmlInit_v2)
POISON(nvmlInitWithFlags) POISON(nvmlDeviceGetCount_v2)
"""

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import device_process
sys.stdin = iter([])
import os
os._exit = lambda status: None
device_process._serve("virtual")
import torch
assert torch.cuda.device_count() == 8 and torch.cuda.is_available()
x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).sum().backward()
assert torch.empty(10).pin_memory().is_pinned()
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
torch.empty(2**30, device="cuda")
print("done", x.grad.shape, file=sys.stderr)
"""


@pytest.mark.parametrize("visible", ["", "0", None])
def test_a_driver_and_a_gpu_of_this_machine_are_not_touched(tmp_path, visible):
    """A node where libcuda and NVML are installed, whether or not there is a GPU behind them."""
    source = tmp_path / "poison.cpp"
    source.write_text(POISON)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-o", tmp_path / name, source, f"-Wl,-soname,{name}"], check=True
        )
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    code = SCRIPT.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert "done torch.Size([2048, 2048])" in done.stderr
    assert "touched" not in done.stderr
