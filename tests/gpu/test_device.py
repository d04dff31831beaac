"""The memory cap of a slice on a real GPU, on a fake one."""

from __future__ import annotations

import types

import pytest
import torch

from prism_plugins.errors import PrismError
from prism_plugins.gpu import device
from prism_plugins.gpu.device import GIB, USUAL_CONTEXT, prepare_gpu

TOTAL = 140 * GIB


@pytest.fixture
def shares(monkeypatch):
    """What prepare_gpu sets, for a GPU of which so much is taken, by others too or not."""

    def prepare(cap: int, *, taken: int, others: bool, own: int = 0) -> float:
        fractions: list[float] = []
        neighbours = [(1, taken)] if others else []
        monkeypatch.setattr(device, "check_gpu", lambda: None)
        monkeypatch.setattr(device, "_uuid", lambda: "")
        monkeypatch.setattr(
            device,
            "GpuSensors",
            lambda uuid: types.SimpleNamespace(others=lambda: neighbours, own_bytes=lambda: own),
        )
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (TOTAL - taken, TOTAL))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
        _, context = prepare_gpu(types.SimpleNamespace(gpu_memory_bytes=cap))
        assert context == (0 if others else taken)
        return fractions[0] * TOTAL

    return prepare


def test_the_context_is_part_of_the_cap(shares) -> None:
    assert shares(80 * GIB, taken=GIB // 2, others=False) == pytest.approx(79.5 * GIB)
    with pytest.raises(PrismError, match=r"context alone takes 2\.0 GiB"):
        shares(GIB, taken=2 * GIB, others=False)


def test_what_other_processes_take_is_not_counted(shares) -> None:
    """Four launches side by side on an H200: a cap of 2 GiB left nothing."""
    assert shares(2 * GIB, taken=9 * GIB, others=True) == pytest.approx(2 * GIB - USUAL_CONTEXT)


def test_a_process_whose_context_is_being_made_is_not_counted_either(shares) -> None:
    assert shares(2 * GIB, taken=2 * GIB, others=False, own=GIB // 2) == pytest.approx(1.5 * GIB)
    assert shares(2 * GIB, taken=9 * GIB, others=True, own=GIB // 4) == pytest.approx(1.75 * GIB)
