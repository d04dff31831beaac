"""A virtual world in this process, recorded by a plain Python recorder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from prism_plugins.collectives.install import Collectives, install_collectives
from prism_plugins.program.slices import GpuFacts, SliceSpec


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


FakeRecorder = _load("fake_recorder").FakeRecorder


def make_spec(rank: int = 0, world_size: int = 4, **fields: Any) -> SliceSpec:
    gpu = GpuFacts(name="GPU", memory_bytes=1 << 30, num_sms=132, capability=(9, 0))
    return SliceSpec(
        **{
            "rank": rank,
            "world_size": world_size,
            "gpus_per_node": 8,
            "argv": (),
            "gpu": gpu,
            "slice_dir": "/nonexistent/slices/0",
            **fields,
        }
    )


class World:
    """An installed virtual world."""

    def __init__(self, collectives: Collectives, recorder: Any) -> None:
        self.collectives = collectives
        self.recorder = recorder
        self.journal = collectives.journal
        self.rank = collectives.spec.rank
        self.size = collectives.spec.world_size

    def take(self) -> list[Any]:
        return self.recorder.take()


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Install worlds one after another; each is destroyed before the next."""
    installed: list[Collectives] = []

    def close() -> None:
        while installed:
            if dist.is_initialized():
                dist.destroy_process_group()
            installed.pop().undo()

    def make(
        rank: int = 0, world_size: int = 4, backend: str | None = "cpu:gloo,cuda:nccl", **fields: Any
    ) -> World:
        close()
        recorder = FakeRecorder()
        installed.append(install_collectives(make_spec(rank, world_size, **fields), recorder=recorder))
        if backend != "uninitialized":
            dist.init_process_group(backend)
        return World(installed[0], recorder)

    yield make
    close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """Rank 1 of 4."""
    return make_world(rank=1, world_size=4)
