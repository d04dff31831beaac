"""Slices are reused exactly when nothing they depend on changed."""

import os
import shutil
import sys
import time

import msgspec
import pytest

from prism_plugins import cache as cache_module
from prism_plugins.cache import Manifest, SliceCache, make_manifest, relevant_environment, slice_key
from prism_plugins.program.measured import GpuState, Measured
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import GpuFacts, SliceReport, SliceSpec
from prism_plugins.rundir import SliceDir, read_json, write_json

GPU = GpuFacts(name="H100", memory_bytes=80 * 10**9, num_sms=132, capability=(9, 0))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def spec(place, rank=0, **changes):
    base = SliceSpec(
        rank=rank,
        world_size=8,
        gpus_per_node=8,
        argv=("train.py", "--config=config.json", "--lr", "0.1"),
        gpu=GPU,
        slice_dir=str(place / "run" / str(rank)),
    )
    return msgspec.structs.replace(base, **changes)


def finished(piece, files=()):
    """Lay down what a slice leaves behind."""
    directory = SliceDir(cache_module.Path(piece.slice_dir))
    directory.path.mkdir(parents=True, exist_ok=True)
    write_json(directory.report, SliceReport(rank=piece.rank, status="ok", num_ops=5))
    directory.program.write_bytes(b"program")
    directory.log.write_text("iteration 1\n")
    write_json(directory.manifest, Manifest(files=tuple(cache_module._stamp(f) for f in files)))
    return directory


def test_a_kept_slice_comes_back_with_its_files(place):
    cache = SliceCache(place / "cache")
    piece = spec(place)
    directory = finished(piece)
    cache.keep(piece)
    shutil.rmtree(directory.path)
    report = cache.fetch(piece)
    assert report is not None
    assert (report.cached, report.num_ops) == (True, 5)
    assert directory.program.read_bytes() == b"program"
    assert directory.log.read_text() == "iteration 1\n"


def test_where_it_runs_does_not_matter_what_it_runs_does(place):
    key = slice_key(spec(place))
    assert slice_key(spec(place, slice_dir="/elsewhere")) == key
    for change in (
        {"argv": ("train.py", "--lr", "0.2")},
        {"rank": 1},
        {"world_size": 16},
        {"device": "cpu"},
        {"gpu": msgspec.structs.replace(GPU, memory_bytes=1)},
        {"gpus_per_node": 4},
        {"iterations": 2},
        {"run_as": "module"},
    ):
        assert slice_key(spec(place, **change)) != key, change


def test_the_script_and_named_files_count_by_content(place):
    key = slice_key(spec(place))
    os.utime(place / "train.py", (1, 1))
    assert slice_key(spec(place)) == key
    (place / "config.json").write_text('{"a": 1}')
    changed = slice_key(spec(place))
    assert changed != key
    (place / "train.py").write_text("print('other')")
    assert slice_key(spec(place)) != changed


def test_journals_count_by_content(place):
    journal = place / "journal.json"
    journal.write_text("[]")
    key = slice_key(spec(place, journals=(str(journal),)))
    shutil.copy(journal, place / "copy.json")
    assert slice_key(spec(place, journals=(str(place / "copy.json"),))) == key
    journal.write_text("[1]")
    assert slice_key(spec(place, journals=(str(journal),))) != key


def test_environment_counts_but_not_the_shell(place, monkeypatch):
    key = slice_key(spec(place))
    monkeypatch.setenv("TERM", "dumb2")
    monkeypatch.setenv("SSH_CLIENT", "1.2.3.4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("MASTER_PORT", "4711")
    monkeypatch.setenv("RANK", "0")
    assert slice_key(spec(place)) == key
    monkeypatch.setenv("MODEL_SIZE", "7b")
    assert slice_key(spec(place)) != key


def test_relevant_environment_drops_prism_options():
    assert relevant_environment({"PRISM_JOBS": "4", "A": "b"}) == {"A": "b"}


def test_a_changed_imported_module_invalidates(place):
    cache = SliceCache(place / "cache")
    module = place / "model.py"
    module.write_text("layers = 4")
    piece = spec(place)
    finished(piece, files=[module])
    cache.keep(piece)
    os.utime(module, (1, 1))
    assert cache.fetch(piece) is not None
    module.write_text("layers = 8")
    assert cache.fetch(piece) is None
    module.unlink()
    assert cache.fetch(piece) is None


def test_a_damaged_entry_is_no_hit(place):
    cache = SliceCache(place / "cache")
    piece = spec(place)
    finished(piece)
    cache.keep(piece)
    (entry,) = (place / "cache").iterdir()
    (entry / "program.npz").write_bytes(b"prog")
    assert cache.fetch(piece) is None


def test_the_least_recently_used_go_first(place):
    cache = SliceCache(place / "cache", cap_bytes=50_000)
    pieces = [spec(place, rank) for rank in range(3)]
    for age, piece in enumerate(pieces[:2]):
        finished(piece).program.write_bytes(b"x" * 20_000)
        cache.keep(piece)
        entry = place / "cache" / slice_key(piece)
        os.utime(entry, (1000 + age, 1000 + age))
    assert cache.fetch(pieces[0]) is not None
    finished(pieces[2]).program.write_bytes(b"x" * 20_000)
    cache.keep(pieces[2])
    assert [cache.fetch(piece) is not None for piece in pieces] == [True, False, True]


def test_what_a_killed_process_left_goes(place):
    cache = SliceCache(place / "cache")
    for name, age_s in ((".new-old", 1e5), (".new-now", 0)):
        (place / "cache" / name).mkdir(parents=True)
        os.utime(place / "cache" / name, (time.time() - age_s,) * 2)
    piece = spec(place)
    finished(piece)
    cache.keep(piece)
    assert [p.name for p in (place / "cache").glob(".*")] == [".new-now"]
    assert cache.fetch(piece) is not None


def test_an_unwritable_cache_is_no_error(place):
    (place / "file").write_text("")
    cache = SliceCache(place / "file" / "cache")
    piece = spec(place)
    finished(piece)
    cache.keep(piece)
    assert cache.fetch(piece) is None


def test_the_manifest_lists_the_users_modules_only(place, monkeypatch):
    (place / "my_model.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(place))
    import my_model  # noqa: F401

    paths = {stamp.path for stamp in make_manifest().files}
    sys.modules.pop("my_model")
    assert str(place / "my_model.py") in paths
    assert not any("site-packages" in path or path.endswith("msgspec/__init__.py") for path in paths)
    assert not any("/prism_plugins/" in path for path in paths)


@pytest.fixture
def on_gpu(place, monkeypatch):
    """A slice on a GPU, and what it measured."""
    gpus = ["driver 1: NVIDIA H200 GPU-1"]
    monkeypatch.setattr(cache_module, "gpu_identity", lambda: gpus[0])
    piece = spec(place, device="cuda")

    def lay_down(*, findings=(), throttled=()):
        directory = finished(piece)
        report = SliceReport(rank=piece.rank, status="ok", num_ops=5, findings=findings)
        write_json(directory.report, report)
        state = GpuState(name="NVIDIA H200", throttled=dict(throttled))
        write_json(directory.measured, Measured(rank=0, iteration_ms=(3.0,), gpu=state))
        return directory

    return piece, lay_down, gpus


def test_what_was_measured_on_this_gpu_is_reused_and_told(place, on_gpu):
    piece, lay_down, gpus = on_gpu
    cache = SliceCache(place / "cache")
    directory = lay_down(throttled={"power cap": 1.0})
    cache.keep(piece)
    shutil.rmtree(directory.path)
    report = cache.fetch(piece)
    assert report.cached
    assert cache_module.MEASURED_BEFORE in report.assumptions
    assert read_json(directory.measured, Measured).iteration_ms == (3.0,)
    gpus[0] = "driver 1: NVIDIA H200 GPU-2"
    assert cache.fetch(piece) is None, "another GPU"


@pytest.mark.parametrize(
    "disturbed",
    [
        {"throttled": {"thermal limit (hardware)": 0.5}},
        {"findings": (Finding(kind="shared_gpu", severity="warning", ranks="", phase="", message="pid 7"),)},
    ],
)
def test_what_was_measured_on_a_disturbed_gpu_is_not_kept(place, on_gpu, disturbed):
    piece, lay_down, _ = on_gpu
    cache = SliceCache(place / "cache")
    lay_down(**disturbed)
    cache.keep(piece)
    assert cache.fetch(piece) is None
