"""Values are real, or synthesized and known to be so."""

from __future__ import annotations

import pytest
import torch

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.device import tensors

DEVICE = "virtual"


def small(*values):
    return torch.tensor(values, device="cuda")


def big():
    return torch.randn(256, 1024, device="cuda")


def reads():
    return sum(get_recorder().stats().synthesized_reads.values())


def test_small_storages_are_real_and_large_ones_are_not():
    assert not tensors.is_synthesized(small(1.0))
    assert not tensors.is_shape_only(torch.empty(16384, device="cuda"))  # 64 KiB
    assert tensors.is_shape_only(torch.empty(16385, device="cuda"))
    assert tensors.is_synthesized(big())
    assert not tensors.is_synthesized(torch.ones(3))
    assert tensors.is_virtual(small(1.0))
    assert not tensors.is_virtual(torch.ones(3))


def test_small_results_of_unknown_values_are_synthesized_and_contagious():
    total = big().sum()
    assert not tensors.is_shape_only(total)
    assert tensors.is_synthesized(total)
    assert tensors.is_synthesized(total * small(2.0))
    assert not tensors.is_synthesized(small(1.0) * 2)
    accumulator = small(0.0)
    accumulator += total
    assert tensors.is_synthesized(accumulator)


def test_overwriting_makes_real_again():
    t = small(1.0, 2.0)
    tensors.mark_synthesized(t)
    t[:1].zero_()
    assert tensors.is_synthesized(t)  # only half of it was overwritten
    t.zero_()
    assert not tensors.is_synthesized(t)
    t.copy_(big().sum(1)[:2])
    assert tensors.is_synthesized(t)
    t.copy_(torch.tensor([1.0, 2.0]))
    assert not tensors.is_synthesized(t)
    assert t.tolist() == [1.0, 2.0]


def test_marks():
    t = small(1.0)
    tensors.mark_synthesized(t)
    assert tensors.is_synthesized(t)
    tensors.mark_real(t)
    assert not tensors.is_synthesized(t)
    shape_only = big()
    tensors.mark_real(shape_only)
    assert tensors.is_synthesized(shape_only)


def test_read_backs_of_synthesized_values_are_counted_by_op():
    before = reads()
    small(1.0).item()
    small(1.0).cpu()
    assert reads() == before
    big().sum().item()
    assert reads() == before + 1
    on_host = big().cpu()  # large: shape only there too
    assert reads() == before + 1
    on_host[0, 0].item()
    assert reads() == before + 2
    (big() > 0).nonzero()
    assert reads() == before + 3
    counted = get_recorder().stats().synthesized_reads
    assert counted["aten::_local_scalar_dense Float"] >= 1
    assert counted["aten::nonzero Bool"] >= 1


def test_host_view_aliases_the_memory():
    t = small(1.0, 2.0)
    view = tensors.host_view(t[1:])
    assert view.device.type == "cpu"
    view.fill_(5)
    assert t.tolist() == [1.0, 5.0]
    with pytest.raises(RuntimeError, match="shape-only"):
        tensors.host_view(big())
    on_host = torch.ones(2)
    assert tensors.host_view(on_host).data_ptr() == on_host.data_ptr()
    view = tensors.host_view(small(7.0))  # outlives its tensor
    assert view.tolist() == [7.0]


def test_allocation_ids():
    t = torch.empty(1000, device="cuda")
    assert tensors.allocation_id(t) == tensors.allocation_id(t[10:])
    assert tensors.allocation_id(t) != tensors.allocation_id(torch.empty(1000, device="cuda"))
    assert tensors.allocation_id(torch.ones(1)) == -1
    assert tensors.allocation_id(torch.empty(0, device="cuda")) == -1


def test_copies_to_the_host():
    assert torch.equal(small(1.0, 2.0).cpu(), torch.tensor([1.0, 2.0]))
    assert small(1, 2).to("cpu", torch.float64).tolist() == [1.0, 2.0]
    assert small(1.0, 2.0, 3.0, 4.0).view(2, 2).t().cpu().tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert big().cpu()[0, 0].item() == 1.0


def test_copies_to_the_device():
    assert torch.tensor([1.5, 2.5]).to("cuda", torch.bfloat16).tolist() == [1.5, 2.5]
    assert torch.ones(2, 3).t().to("cuda").shape == (3, 2)
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.arange(4.0).is_pinned()
    assert pinned.to("cuda", non_blocking=True).tolist() == [0, 1, 2, 3]
