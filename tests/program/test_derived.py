"""Derived stages that were kept: the same programs again, whatever has become of the file."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from prism_plugins.program import derived as module
from prism_plugins.program.derive import CapturedStage
from prism_plugins.program.derived import DerivedStages
from prism_plugins.program.model import EventKind
from tests.program.pipeline_model import schedule_of
from tests.program.test_derive import KINDS, all_stages

NUM_STAGES = 6


@pytest.fixture
def stages(request, tmp_path: Path):
    """(programs by stage, the file), stages 2 to 4 derived from 1 and kept."""
    programs = all_stages(NUM_STAGES, 2 * NUM_STAGES, **KINDS[getattr(request, "param", "interleaved")])
    source, kept = programs[1], DerivedStages(tmp_path / "derived.npz")
    captured = CapturedStage(source, schedule_of(source))
    for stage in range(2, NUM_STAGES - 1):
        target = schedule_of(programs[stage])
        kept.add(source, schedule_of(source), target, captured.derive(target))
    kept.save()
    return programs, tmp_path / "derived.npz"


def get(path: Path, programs, stage: int, source=None):
    source = source or programs[1]
    return DerivedStages(path).get(source, schedule_of(source), schedule_of(programs[stage]))


@pytest.mark.parametrize("stages", KINDS, indirect=True)
def test_the_same_programs_again(stages) -> None:
    programs, path = stages
    captured = CapturedStage(programs[1], schedule_of(programs[1]))
    for stage in range(2, NUM_STAGES - 1):
        fresh, kept = captured.derive(schedule_of(programs[stage])).program, get(path, programs, stage)
        assert np.array_equal(kept.events, fresh.events)
        assert kept.phases == fresh.phases
        assert (kept.rank, kept.source) == (fresh.rank, fresh.source)


def test_kept_for_this_program_and_schedule_only(stages) -> None:
    programs, path = stages
    assert get(path, programs, 0) is None
    events = programs[1].events.copy()
    kernel = np.flatnonzero(events["kind"] == EventKind.KERNEL)[0]
    events["stream"][kernel] += 1
    changed = msgspec.structs.replace(programs[1], events=events)
    assert get(path, programs, 2, source=changed) is None
    assert get(path, programs, 2) is not None


def test_a_version_of_its_own(stages, monkeypatch) -> None:
    programs, path = stages
    monkeypatch.setattr(module, "__version__", "0.0")
    assert get(path, programs, 2) is None


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_not_believed(stages, seed: int) -> None:
    programs, path = stages
    rng = np.random.default_rng(seed)
    data = bytearray(path.read_bytes())
    if seed % 4 == 0:
        data = data[: int(rng.integers(len(data)))]
    else:
        for at in rng.integers(len(data), size=1 + seed % 3).tolist():
            data[at] ^= 1 << int(rng.integers(8))
    whole = get(path, programs, 3)
    path.write_bytes(data)
    found = get(path, programs, 3)
    assert found is None or np.array_equal(found.events, whole.events)


def _first_piece_from(first: int, length: int):
    def change(pieces, rows):
        pieces[0] = first, length

    return change


def _first_row(**columns):
    def change(pieces, rows):
        for name, value in columns.items():
            rows[name][0] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _first_piece_from(-2, 5),
        _first_piece_from(1 << 40, 5),
        _first_piece_from(0, 1 << 40),
        _first_piece_from(0, -1),
        _first_piece_from(1, 3),
        _first_row(kind=200),
        _first_row(kind=int(EventKind.KERNEL), ref=10_000),
        _first_row(kind=int(EventKind.COMM), ref=10_000),
        _first_row(kind=int(EventKind.FREE), ref=4_000_000_000),
        _first_row(kind=int(EventKind.PHASE_BEGIN)),
    ],
)
def test_a_hostile_file_with_right_checksums(stages, change) -> None:
    programs, path = stages
    kept = DerivedStages(path)
    assert kept.get(programs[1], schedule_of(programs[1]), schedule_of(programs[2])) is not None
    forged = DerivedStages(path.with_name("forged.npz"))
    forged._kept, forged._has_new = {}, True
    for digest, (pieces, rows) in kept._kept.items():
        pieces, rows = pieces.copy(), rows.copy()
        change(pieces, rows)
        forged._kept[digest] = pieces, rows
    forged.save()
    assert get(path.with_name("forged.npz"), programs, 2) is None


def test_nothing_is_written_without_news(tmp_path: Path) -> None:
    DerivedStages(tmp_path / "derived.npz").save()
    assert not (tmp_path / "derived.npz").exists()
