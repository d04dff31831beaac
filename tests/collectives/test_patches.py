"""The patch table: every entry replaces something that is there, and is undone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from prism_plugins.collectives.install import Collectives
from prism_plugins.collectives.patches import patch_table
from tests.collectives.conftest import FakeRecorder, make_spec

MAY_BE_MISSING = ("ProcessGroupNCCL", "_nccl_version", "_nccl_version_suffix")
"""Added on CPU builds, not replaced."""


def table() -> list[Any]:
    return patch_table(Collectives(make_spec(), FakeRecorder()))


@pytest.mark.parametrize("entry", table(), ids=lambda p: p.name)
def test_upstream_still_has_it(entry: Any) -> None:
    assert entry.why
    assert hasattr(entry.target, entry.name) or entry.name in MAY_BE_MISSING


def test_undo_restores_everything(make_world: Callable[..., Any]) -> None:
    def snapshot() -> dict[tuple[str, str], Any]:
        names = {p.name for p in table()}
        return {
            (module_name, name): vars(module)[name]
            for module_name, module in list(sys.modules.items())
            if module_name.startswith("torch")
            for name in names & set(getattr(module, "__dict__", ()))
        }

    before = snapshot()
    collectives = Collectives(make_spec(), FakeRecorder())
    collectives.apply()
    assert snapshot() != before
    collectives.undo()
    assert snapshot() == before


def test_signatures_stay(make_world: Callable[..., Any]) -> None:
    names = [*("init_process_group", "new_group", "split_group", "batch_isend_irecv", "all_reduce")]
    names += [n for n in dir(dist) if "object" in n and callable(getattr(dist, n))]
    before = {n: inspect.signature(getattr(dist, n)) for n in names}
    make_world()
    for name in names:
        assert inspect.signature(getattr(dist, name)) == before[name]
        assert getattr(dist, name).__name__ == name


def test_modules_that_imported_by_name_are_patched_too(make_world: Callable[..., Any]) -> None:
    make_world()
    assert device_mesh.split_group is c10d.split_group is dist.split_group
    assert dist.TCPStore is not torch._C._distributed_c10d.TCPStore


def test_groups_of_other_backends_keep_torchs_functions(make_world: Callable[..., Any]) -> None:
    """Object collectives and batches of a group that is not ours run as before."""
    make_world()
    plain = torch._C._distributed_c10d.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(Exception, match=r"not registered|No backend|Invalid|not initialized"):
        dist.all_gather_object([None], "x", group=plain)
