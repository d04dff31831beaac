"""What only a CUDA build of torch has: its own caching allocator, streams and properties, on the virtual runtime."""

from __future__ import annotations

import contextlib
import subprocess

import pytest
import torch

from prism_plugins.device import build, library
from prism_plugins.device.memory import memory_counts

DEVICE = "virtual"
pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")

GIB = 2**30
# They look at nothing but their argument, or the runtime's own version.
HARMLESS = {"cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion"}


@contextlib.contextmanager
def an_empty_device():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    yield
    torch.cuda.empty_cache()


def gib(n):
    return torch.empty(int(n * GIB), dtype=torch.uint8, device="cuda")


def test_the_device_layer_is_torchs_own():
    assert library.is_native()
    assert type(torch._C._cuda_getDeviceCount).__name__ == "builtin_function_or_method"
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    assert torch.cuda.get_device_capability() == (9, 0)


def test_torch_calls_nothing_of_the_runtime_that_is_not_virtual():
    """Of the libraries that come with torch; what another version of torch calls in addition is found here."""
    torch_build = build.find_torch()
    runtime = build.library_path(torch_build).with_name(build.RUNTIME)

    def symbols(path, *options):
        lines = subprocess.run(
            ["nm", "-D", *options, path], capture_output=True, text=True
        ).stdout.splitlines()
        return {line.split()[-1] for line in lines}

    ours = symbols(runtime, "--defined-only")
    libraries = sorted((torch_build.root / "lib").glob("*.so"))
    assert libraries
    missing = {
        name.split("@")[0]
        for path in libraries
        for name in symbols(path, "--undefined-only")
        if "@libcudart" in name
    }
    assert len(missing) > 50
    assert missing - ours <= HARMLESS


def test_memory_is_reserved_by_torchs_allocator():
    with an_empty_device():
        before = torch.cuda.memory_reserved()
        small = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_reserved() - before == 2 * 2**20
        large = gib(1.5)
        assert torch.cuda.mem_get_info()[0] == torch.cuda.get_device_properties(0).total_memory - (
            torch.cuda.memory_reserved()
        )
        segments = torch.cuda.memory_snapshot()
        assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
        assert "large pool" in torch.cuda.memory_summary()
        del small, large


def test_out_of_memory_is_torchs_finding_and_the_slice_goes_on():
    with an_empty_device():
        cached = gib(50)
        del cached  # 50 GiB reserved, none allocated: released before torch gives up
        fits = gib(60)
        counts = memory_counts(0)
        assert (counts["num_alloc_retries"], counts["num_ooms"]) == (1, 0)
        assert torch.cuda.memory_reserved() < 62 * GIB
        beyond = gib(40)
        counts = memory_counts(0)
        assert (counts["num_alloc_retries"], counts["num_ooms"]) == (2, 1)
        assert torch.cuda.memory_allocated() > torch.cuda.get_device_properties(0).total_memory
        assert torch.cuda.mem_get_info()[0] == 0
        del fits, beyond


def test_a_limit_of_the_scripts_own_raises():
    with an_empty_device():
        torch.cuda.set_per_process_memory_fraction(0.25)
        try:
            with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Tried to allocate 30\.00 GiB"):
                gib(30)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert gib(30).numel() == 30 * GIB


def test_expandable_segments():
    with an_empty_device():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            a = gib(3)
            assert [s["is_expandable"] for s in torch.cuda.memory_snapshot() if s["total_size"] >= GIB] == [
                True
            ]
            b = gib(2)
            # One segment that grew, where the default has one for each.
            large = [s["total_size"] for s in torch.cuda.memory_snapshot() if s["total_size"] >= GIB]
            assert large == [5 * GIB]
            del a, b
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() < GIB
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_a_block_used_on_another_stream_comes_back_after_it():
    with an_empty_device():
        side = torch.cuda.Stream()
        x = gib(1)
        x.record_stream(side)
        address = x.data_ptr()
        del x
        assert gib(1).data_ptr() == address  # the side stream has nothing left to do


def test_nothing_reaches_the_runtime_past_the_operators():
    before = library.text("native_tally")
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        (x @ x).relu().softmax(-1), torch.zeros(2048, device="cuda", dtype=torch.long)
    )
    loss.backward()
    torch.optim.AdamW([x], fused=True).step()
    x.detach().cpu()
    torch.cuda.synchronize()
    assert library.text("native_tally") == before
