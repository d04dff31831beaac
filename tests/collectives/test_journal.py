"""Control payloads from the slice of their source to later slices."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prism_plugins.collectives import install
from prism_plugins.collectives.journal import (
    MAX_TENSOR_BYTES,
    SCHEMA,
    Journal,
    group_shape,
)
from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.world.layout import Layout
from tests.collectives.conftest import make_spec


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        ((5,), "1"),
        ((0, 1, 2, 3), "4x1"),
        ((8, 9, 10, 11), "4x1"),
        ((0, 16, 32), "3x16"),
        ((3, 19, 35), "3x16"),
        ((0, 1, 8, 9, 16, 17), "6x(1*1,7*1)"),
        ((0, 3, 4), "3x(3*1,1*1)"),
    ],
)
def test_group_shape_names_no_ranks(ranks: tuple[int, ...], shape: str) -> None:
    assert group_shape(ranks).startswith(shape.split("(")[0])
    assert group_shape(ranks) == group_shape([r + 5 for r in ranks])


def test_different_patterns_have_different_shapes() -> None:
    patterns = [(0, 1), (0, 2), (0, 1, 2), (0, 1, 8, 9), (0, 8, 9, 17), (0, 1, 8, 9, 16, 17), (0, 3, 4)]
    assert len({group_shape(p) for p in patterns}) == len(patterns)


def tp_group(rank: int, **options: Any) -> Any:
    """The tensor-parallel group of a rank (TP8), created after some others."""
    for start in range(0, 64, 16):
        dist.new_group(range(start, start + 16))
    groups = [dist.new_group(range(start, start + 8), **options) for start in range(0, 64, 8)]
    return groups[rank // 8]


def run_source(make_world: Callable[..., Any], rank: int = 0) -> None:
    make_world(rank=rank, world_size=64)
    group = tp_group(rank)
    root = rank - rank % 8
    dist.broadcast(torch.tensor([1, 0, 25]), root, group=group)
    dist.broadcast(torch.tensor([0.5], dtype=torch.bfloat16), root, group=group)
    dist.broadcast(torch.tensor(True), root, group=group)
    dist.broadcast_object_list(["train", {"steps": 25}], root, group=group)
    dist.scatter(torch.zeros(1), [torch.tensor([float(i)]) for i in range(8)], root, group=group)
    dist.scatter_object_list([None], [f"part {i}" for i in range(8)], root, group=group)
    dist.send(torch.tensor([3, 4]), root + 1, group=group)
    dist.send_object_list([{"shape": (2, 3)}], root + 1, group=group)


def replay(make_world: Callable[..., Any], rank: int, journals: tuple[str, ...]) -> tuple[Any, list[Any]]:
    world = make_world(rank=rank, world_size=64, journals=journals)
    group = tp_group(rank)
    root = rank - rank % 8
    flags, scale, flag = (
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1, dtype=torch.bfloat16),
        torch.tensor(False),
    )
    for tensor in (flags, scale, flag):
        dist.broadcast(tensor, root, group=group)
    objects: list[Any] = [None, None]
    dist.broadcast_object_list(objects, root, group=group)
    part = torch.zeros(1)
    dist.scatter(part, None, root, group=group)
    object_part: list[Any] = [None]
    dist.scatter_object_list(object_part, None, root, group=group)
    header = torch.zeros(2, dtype=torch.int64)
    dist.recv(header, root, group=group)
    received: list[Any] = [None]
    dist.recv_object_list(received, root, group=group)
    return world, [
        flags.tolist(),
        scale.item(),
        flag.item(),
        objects,
        part.item(),
        object_part,
        header.tolist(),
        received,
    ]


def expected(group_rank: int) -> list[Any]:
    return [
        [1, 0, 25],
        0.5,
        True,
        ["train", {"steps": 25}],
        float(group_rank),
        [f"part {group_rank}"],
        [3, 4],
        [{"shape": (2, 3)}],
    ]


@pytest.mark.parametrize("rank", [1, 9, 57])
def test_the_journal_of_rank_0_serves_every_tensor_parallel_group(
    make_world: Callable[..., Any], tmp_path: Path, rank: int
) -> None:
    run_source(make_world)
    path = tmp_path / "journal.json"
    save_journal(path)
    world, values = replay(make_world, rank, (str(path),))
    assert values == expected(rank % 8)
    assert (world.journal.stats.misses, world.journal.stats.nearest) == (0, 0)
    assert world.journal.stats.hits == 9
    assert world.collectives.assumptions() == []


def save_journal(path: Path) -> None:
    """Save the journal of the world that is installed now."""
    install._active[-1].save(path)


def test_without_a_journal_own_values_stay_and_are_counted(make_world: Callable[..., Any]) -> None:
    world, values = replay(make_world, 9, ())
    assert values[0] == [0, 0, 0]
    assert values[3] == [None, None]
    assert world.journal.stats.hits == 0
    assert world.journal.stats.misses == 9
    assert "9 small payload(s)" in world.collectives.assumptions()[0]


def test_first_journal_that_knows_wins(make_world: Callable[..., Any], tmp_path: Path) -> None:
    paths = []
    for value in (1, 2):
        make_world(rank=0, world_size=2)
        dist.broadcast(torch.tensor([value]), 0)
        paths.append(str(tmp_path / f"{value}.json"))
        save_journal(Path(paths[-1]))
    make_world(rank=1, world_size=2, journals=tuple(paths))
    x = torch.tensor([0])
    dist.broadcast(x, 0)
    assert x.item() == 1


def test_a_call_beyond_the_source_takes_the_nearest_and_says_so(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    make_world(rank=0, world_size=2)
    for value in (1, 2):
        dist.broadcast(torch.tensor([value]), 0)
    save_journal(tmp_path / "j.json")
    world = make_world(rank=1, world_size=2, journals=(str(tmp_path / "j.json"),))
    x = torch.tensor([0])
    for _ in range(3):
        dist.broadcast(x, 0)
    assert x.item() == 2
    assert (world.journal.stats.hits, world.journal.stats.nearest) == (2, 1)
    assert "another call" in world.collectives.assumptions()[0]


def test_headers_between_other_stages_are_like_those_of_rank_0(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    make_world(rank=0, world_size=4)
    dist.send(torch.tensor([64, 1, 256]), 1)
    save_journal(tmp_path / "j.json")
    world = make_world(rank=2, world_size=4, journals=(str(tmp_path / "j.json"),))
    for peer in (1, 3):
        header = torch.zeros(3, dtype=torch.int64)
        dist.recv(header, peer)
        assert header.tolist() == [64, 1, 256]
    assert (world.journal.stats.alike, world.journal.stats.misses) == (2, 0)
    assert "2 header(s)" in world.collectives.assumptions()[0]


def test_headers_between_stages_pass_from_one_data_parallel_replica_to_another(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    """PP4 x DP2, p2p in the world group: journals of ranks 0 and 2 (stages 0 and 1, replica 0)."""
    layout = Layout(world_size=8, pp=4, dp=2)
    for rank in (0, 2):
        make_world(rank=rank, world_size=8).journal.layout = layout
        dist.send(torch.tensor([rank, 7]), rank + 2)
        save_journal(tmp_path / f"{rank}.json")
    journals = (str(tmp_path / "0.json"), str(tmp_path / "2.json"))
    for rank, told, counted in ((3, 0, "hits"), (5, 2, "hits"), (7, 2, "alike")):
        world = make_world(rank=rank, world_size=8, journals=journals)
        world.journal.layout = layout
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, rank - 2)
        assert header.tolist() == [told, 7]
        assert getattr(world.journal.stats, counted) == 1


def test_a_header_back_is_like_the_header_sent(make_world: Callable[..., Any], tmp_path: Path) -> None:
    """PP2 x TP2: stage 0 answers itself; its second tensor-parallel rank has headers of its own."""
    layout = Layout(world_size=4, pp=2, tp=2)
    for rank in (0, 1):
        world = make_world(rank=rank, world_size=4)
        world.journal.layout = layout
        dist.send(torch.tensor([rank, 7]), rank + 2)
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, rank + 2)
        assert header.tolist() == [rank, 7]
        assert (world.journal.stats.mirrored, world.journal.stats.misses) == (1, 0)
        save_journal(tmp_path / f"{rank}.json")
    world = make_world(rank=3, world_size=4, journals=(str(tmp_path / "0.json"), str(tmp_path / "1.json")))
    world.journal.layout = layout
    dist.recv(header, 1)
    assert header.tolist() == [1, 7]
    assert world.journal.stats.hits == 1


def test_the_loss_of_a_later_stage_is_unknown(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=0, world_size=2)
    world.journal.layout = Layout(world_size=2, pp=2)
    loss = torch.zeros(2)
    dist.broadcast(loss, 1)
    assert loss.tolist() == [1, 1]
    dist.broadcast(torch.zeros(2, dtype=torch.int64), 1)
    assert world.journal.stats.misses == 1


def test_large_payloads_are_mirrored_not_journalled(make_world: Callable[..., Any], tmp_path: Path) -> None:
    world = make_world(rank=0, world_size=2)
    dist.broadcast(torch.zeros(MAX_TENSOR_BYTES + 1, dtype=torch.uint8), 0)
    assert world.journal.stats.recorded == 0
    dist.broadcast(torch.zeros(MAX_TENSOR_BYTES, dtype=torch.uint8), 0)
    assert world.journal.stats.recorded == 1


def test_activations_between_stages_are_no_control_data(make_world: Callable[..., Any]) -> None:
    world = make_world(rank=0, world_size=2)
    dist.send(torch.ones(4), 1)
    assert world.journal.stats.recorded == 0


def test_equal_payloads_are_stored_once(make_world: Callable[..., Any], tmp_path: Path) -> None:
    make_world(rank=0, world_size=2)
    for _ in range(50):
        dist.broadcast(torch.tensor([1, 2, 3]), 0)
    save_journal(tmp_path / "j.json")
    assert len(json.loads((tmp_path / "j.json").read_text())["payloads"]) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "truncated or not a prism journal"),
        ('{"schema": 2, "rank"', "truncated or not a prism journal"),
        ("[1, 2]", "truncated or not a prism journal"),
        ('{"schema": 2, "rank": 0, "payloads": ["%%"], "entries": {}}', "truncated or not a prism journal"),
        ('{"schema": 2, "rank": 0, "payloads": [], "entries": {"a": [[1, 0, 5]]}}', "bad entry"),
        (f'{{"schema": {SCHEMA + 1}, "rank": 0}}', "schema 3"),
    ],
)
def test_damaged_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "journal.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match=message):
        Journal(make_spec(journals=(str(path),)))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        Journal(make_spec(journals=(str(tmp_path / "none.json"),)))


def test_saving_leaves_no_temporary_file(tmp_path: Path) -> None:
    Journal(make_spec()).save(tmp_path / "journal.json")
    assert [p.name for p in tmp_path.iterdir()] == ["journal.json"]


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PrismError, match=r"journal\.json: No space left on device; free some space"):
        Journal(make_spec()).save(tmp_path / "journal.json")
    assert list(tmp_path.iterdir()) == []


def test_the_slice_is_told_what_was_assumed(make_world: Callable[..., Any], tmp_path: Path) -> None:
    class Context:
        def __init__(self) -> None:
            self.assumptions: list[str] = []

        def assume(self, text: str) -> None:
            self.assumptions.append(text)

    world = make_world(rank=1, world_size=2)
    context = world.collectives._context = Context()
    dist.broadcast(torch.tensor([0]), 0)
    world.collectives.save(tmp_path / "journal.json")
    assert context.assumptions == world.collectives.assumptions() != []


def test_a_journal_that_grows_is_read_again(tmp_path):
    source = Journal(make_spec(0, 8))
    source.record("c", sequence=1, slot=0, payload=b"abcd")
    path = tmp_path / "journal.json"
    source.save(path)
    reader = Journal(make_spec(1, 8, journals=(str(path),)))
    assert reader.look_up("c", sequence=1, slot=0) == b"abcd"
    assert reader.look_up("c", sequence=2, slot=0) is None
    source.record("c", sequence=2, slot=0, payload=b"efgh")
    source.save(path)
    assert reader.look_up("c", sequence=2, slot=0, num_bytes=4) == b"efgh"
    assert (reader.stats.hits, reader.stats.nearest, reader.stats.misses) == (2, 0, 1)
