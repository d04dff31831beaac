"""The table of what is added to and replaced in torch, and the torch.cuda that results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.device import library, torch_cuda
from prism_plugins.device.bindings import bindings
from prism_plugins.program.slices import SliceSpec

DEVICE = "virtual"


class Context:
    """What install() needs of a slice's context."""

    def __init__(self):
        self.spec = SliceSpec(
            rank=0,
            world_size=8,
            gpus_per_node=8,
            argv=(),
            gpu=load_cluster("dgx-h100").gpu_facts(),
            slice_dir=".",
        )
        self.assumed = []

    def on_import(self, module, hook):
        pass

    def assume(self, text):
        self.assumed.append(text)


def test_every_addition_is_a_name_that_torch_declares_or_uses():
    root = Path(torch.__file__).parent
    declared = "".join(path.read_text() for path in (root / "_C/__init__.pyi", *(root / "cuda").glob("*.py")))
    for name in bindings(Context().spec):
        assert name in declared, f"torch.{name} is not known to torch {torch.__version__}"


def test_every_replacement_exists_upstream():
    set_by_cuda_builds = {"_get_device_properties"}
    for entry in torch_cuda.replacements(Context()):
        assert entry.why
        if entry.name not in set_by_cuda_builds:
            assert hasattr(entry.target, entry.name)
    assert "_get_device_properties(device)" in Path(torch.cuda.__file__).read_text()


def test_install_is_undone():
    targets = [(e.target, e.name) for e in torch_cuda.replacements(Context())]
    targets += [(torch._C, name) for name in bindings(Context().spec)]
    before = [vars(target).get(name) for target, name in targets]
    uninstall = torch_cuda.install(Context())
    assert [vars(target).get(name) for target, name in targets] != before
    uninstall()
    assert [vars(target).get(name) for target, name in targets] == before


def test_a_name_that_upstream_dropped_is_an_error():
    original = torch.cuda._device_count_nvml
    del torch.cuda._device_count_nvml
    try:
        with pytest.raises(AttributeError, match="_device_count_nvml"):
            torch_cuda.install(Context())
    finally:
        torch.cuda._device_count_nvml = original


def test_identity_of_the_gpu():
    assert torch.cuda.is_available()
    assert torch.backends.cuda.is_built()
    assert torch.version.cuda
    assert torch.cuda.device_count() == 8
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.is_bf16_supported()
    properties = torch.cuda.get_device_properties(0)
    assert properties.multi_processor_count == 132
    assert properties.total_memory == load_cluster("dgx-h100").gpu_facts().memory_bytes
    assert "sm_90" in torch.cuda.get_arch_list()
    assert torch.cuda.nccl.version() >= (2, 20)
    assert torch.cuda.can_device_access_peer(0, 1)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.accelerator.current_accelerator().type == "cuda"


def test_devices():
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(3):
        assert torch.cuda.current_device() == 3
        torch.cuda.set_device(4)
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(8)


def test_legacy_types():
    t = torch.cuda.FloatTensor([1.0, 2.0])
    assert t.is_cuda
    assert isinstance(t, torch.cuda.FloatTensor)
    assert not isinstance(t, torch.cuda.LongTensor)
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(3, 2).shape == (3, 2)
    assert t.type() == "torch.cuda.FloatTensor"
    assert t.type("torch.cuda.HalfTensor").dtype == torch.float16


def test_profiling_and_tools_do_nothing():
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("x"):
        pass
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.device_memory_used() == torch.cuda.memory_reserved()


def test_what_cannot_work_says_so():
    with pytest.raises(NotImplementedError, match="CUDA graphs"):
        torch.cuda.CUDAGraph()
    if library.is_native():
        return
    with pytest.raises(NotImplementedError, match="memory_snapshot"):
        torch.cuda.memory_snapshot()


def test_loaders_stay_in_the_process():
    context = Context()
    uninstall = torch_cuda.install(context)
    try:
        data = torch.utils.data.TensorDataset(torch.arange(10))
        loader = torch.utils.data.DataLoader(
            data, 2, num_workers=4, pin_memory=True, prefetch_factor=2, persistent_workers=True
        )
        assert loader.num_workers == 0
        assert len(list(loader)) == 5
        assert any("DataLoader" in line for line in context.assumed)
    finally:
        uninstall()
