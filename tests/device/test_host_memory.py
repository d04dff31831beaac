"""Large floating-point CPU tensors are shape only: no memory, no arithmetic, but real tensors to everyone."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from prism_plugins.device.host_memory import is_host_shape_only, real_host_tensors
from prism_plugins.device.library import text
from prism_plugins.device.memory import host_counts

DEVICE = "virtual"
MIB = 2**20
HUGE = (64, 1024, MIB)
"""256 GiB of fp32: whoever touches it dies."""


def shape_only(t):
    return is_host_shape_only(t.untyped_storage())


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


FACTORIES = {
    "empty": lambda: torch.empty(HUGE),
    "zeros": lambda: torch.zeros(HUGE),
    "full": lambda: torch.full(HUGE, 2.0, dtype=torch.bfloat16),
    "randn": lambda: torch.randn(HUGE),
    "pinned": lambda: torch.empty(HUGE, pin_memory=True),
    "empty_strided": lambda: torch.empty_strided((1024, MIB), (1, 1024)),
    "new_zeros": lambda: torch.ones(3).new_zeros(HUGE),
    "module": lambda: torch.nn.Linear(1024, MIB).weight,
    "conversion": lambda: torch.arange(MIB).to(torch.float64),
}


@pytest.mark.parametrize("name", list(FACTORIES))
def test_factories_reserve(name):
    before = rss()
    t = FACTORIES[name]()
    assert shape_only(t)
    assert t.device.type == "cpu"
    assert rss() - before < 512 * MIB


def test_ops_give_shapes():
    x = torch.empty(HUGE)
    before = rss()
    y = (x * 2).sub_(1).to(torch.bfloat16).clone().transpose(0, 1).contiguous()
    assert y.shape == (1024, 64, MIB)
    assert y.dtype == torch.bfloat16
    assert shape_only(y)
    assert shape_only(x > 0)
    assert torch.cat([x, x]).shape == (128, 1024, MIB)
    assert x[3, :5, ::7].shape == (5, 149797)
    assert torch._utils._flatten_dense_tensors([x[0], x[1]]).numel() == 2 * 1024 * MIB
    assert rss() - before < 512 * MIB


def test_results_that_the_script_can_read_are_plausible_and_counted():
    x = torch.empty(HUGE)
    assert x.norm().item() == 1.0
    assert x.sum().item() == 1.0
    assert x[0, 0, 0].item() == 1.0
    assert not torch.isinf(x).any().item()
    assert not shape_only(x.sum())
    counted = text("tally", 0)
    assert "aten::linalg_vector_norm Float on the host" in counted
    assert "aten::_local_scalar_dense Float on the host" in counted


def test_what_torch_did_not_allocate_for_a_tensor_stays_real():
    array = np.arange(MIB, dtype=np.float32)
    for t in (torch.from_numpy(array), torch.tensor(array.tolist())):
        assert not shape_only(t)
        assert t[12345].item() == 12345.0
    assert shape_only(torch.from_numpy(array).double())
    file = io.BytesIO()
    torch.save(torch.from_numpy(array), file)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    assert not shape_only(loaded)
    assert loaded[7].item() == 7.0
    assert torch.zeros(MIB, dtype=torch.int64).sum().item() == 0
    assert torch.full((1000,), 0.5).sum().item() == 500.0


def test_inside_a_real_scope_everything_is_computed():
    with real_host_tensors():
        x = torch.full((MIB,), 0.5)
        assert x.sum().item() == MIB / 2
    assert not shape_only(x)


def test_data_can_be_swapped():
    large = torch.empty(HUGE)
    p = torch.nn.Parameter(torch.empty(0))
    p.data = large
    assert shape_only(p * 1)
    p.data = torch.ones(2)
    assert (p * 1).tolist() == [1.0, 1.0]
    viewed = torch.empty(0).set_(large.untyped_storage(), 5, (10, 20))
    assert shape_only(viewed + torch.ones(20)) is False
    assert viewed.sum().item() == 1.0
    viewed.set_(torch.ones(3).untyped_storage())
    assert viewed.sum().item() == 3.0


def test_storages_grow_shrink_and_copy_untouched():
    before = rss()
    x = torch.empty(MIB)
    x.resize_(64 * 1024 * MIB)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(4 * 64 * 1024 * MIB)
    twin = copy.deepcopy(torch.nn.Parameter(x))
    assert shape_only(twin)
    assert twin.shape == x.shape
    assert shape_only(x.share_memory_())
    assert rss() - before < 512 * MIB


def test_legacy_constructors_know_the_device():
    x = torch.empty(HUGE)
    assert x.new(3).shape == (3,)
    assert x.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert x.type() == "torch.FloatTensor"


def test_autograd_and_optimizers_run_on_them():
    linear = torch.nn.Linear(16384, 16384)
    before = rss()
    linear(torch.randn(64, 16384)).square().mean().backward()
    assert shape_only(linear.weight.grad)
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        torch.optim.AdamW(linear.parameters(), **options).step()
    assert rss() - before < 512 * MIB


def test_copies_leave_both_sides_alone():
    host, device = torch.empty(HUGE), torch.empty(HUGE, device="cuda")
    device.copy_(host)
    host.copy_(device)
    assert host.cuda().shape == device.cpu().shape == HUGE
    assert shape_only(device.cpu())
    small = torch.ones(HUGE[2])
    small[:10].copy_(host[0, 0, :10])
    host[0].copy_(torch.ones(HUGE[2]))
    assert host.to("meta").is_meta


def test_other_threads_know_them():
    x, got = torch.empty(HUGE), []
    thread = threading.Thread(target=lambda: got.append((x + 1).shape))
    thread.start()
    thread.join()
    assert got == [HUGE]


def test_pinned_memory_is_rounded_up_and_kept():
    before = host_counts()
    pinned = torch.empty(3 * MIB).pin_memory()
    again = pinned.pin_memory()
    assert again is pinned
    assert pinned.is_pinned()
    assert not torch.empty(MIB).is_pinned()
    now = host_counts()
    assert now.pinned - before.pinned == 12 * MIB
    assert now.page_locked - before.page_locked == 16 * MIB
    del pinned, again
    after = host_counts()
    assert after.pinned == before.pinned
    assert after.page_locked == now.page_locked
    reused = torch.empty(4 * MIB - 1, pin_memory=True)
    assert host_counts().page_locked == now.page_locked
    assert reused.is_pinned()


def test_pageable_memory_and_its_peak_are_counted():
    before = host_counts()
    x = torch.empty(HUGE)
    del x
    after = host_counts()
    assert after.pageable == before.pageable
    assert after.total_peak >= 4 * 64 * 1024 * MIB
    assert after.untouched_peak >= 4 * 64 * 1024 * MIB
