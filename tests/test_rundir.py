"""The run directory: refusals, atomic writes, and files that are not what they should be."""

import datetime
import json
import os
import subprocess

import pytest

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.errors import FileFormatError, Interrupted, PrismError
from prism_plugins.options import Job, Options
from prism_plugins.rundir import RunDir, RunInfo, create, read_json, write_bytes, write_json


def job(out="", run_as="script", argv=("dir/train.py", "--lr", "1")):
    return Job(options=Options(world_size=8, out=out), run_as=run_as, argv=argv)


def test_default_name_and_no_collision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    first, second = create(job(), now=now), create(job(), now=now)
    assert first.path == tmp_path / "prism_out" / "20260102-030405-train"
    assert second.path.name == "20260102-030405-train-2"


def test_info_round_trip(tmp_path):
    rundir = create(job(str(tmp_path / "run")))
    with rundir.recording(job(), cluster=load_cluster(), launch_world=2) as record:
        assert rundir.read_info().status == "running"
        record(slices=(0, 7))
    info = rundir.read_info()
    assert (info.status, info.slices, info.launch_world) == ("ok", (0, 7), 2)
    assert info.job == job()
    assert info.cluster == load_cluster()
    assert "torch" in info.versions


@pytest.mark.parametrize(("error", "status"), [(ValueError(), "failed"), (Interrupted(2), "interrupted")])
def test_info_says_how_a_run_ended(tmp_path, error, status):
    rundir = create(job(str(tmp_path)))
    with pytest.raises(type(error)), rundir.recording(job(), cluster=load_cluster(), launch_world=1):
        raise error
    assert rundir.read_info().status == status


def test_an_earlier_run_directory_is_taken_over(tmp_path):
    create(job(str(tmp_path))).write_info(RunInfo(job=job()))
    assert create(job(str(tmp_path))).path == tmp_path


def test_a_run_that_was_killed_as_it_began_is_taken_over(tmp_path):
    assert not create(job(str(tmp_path))).run.exists()
    assert create(job(str(tmp_path))).path == tmp_path
    (tmp_path / "slices/mine").mkdir()
    with pytest.raises(PrismError, match="not empty"):
        create(job(str(tmp_path)))


def test_two_runs_do_not_share_a_directory(tmp_path):
    first = create(job(str(tmp_path)))
    first.write_info(RunInfo(job=job()))
    with pytest.raises(PrismError, match="right now; wait for it"):
        create(job(str(tmp_path)))
    assert first.run.exists()


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(PrismError, match="working directory does not exist"):
        create(job(str(tmp_path / "run")))
    assert not list(tmp_path.iterdir())


def test_a_name_too_long_is_one_line(tmp_path):
    with pytest.raises(PrismError, match="File name too long"):
        create(job(str(tmp_path / ("x" * 300))))


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise Interrupted(2)

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(Interrupted):
        write_bytes(tmp_path / "x.json", b"1")
    assert not list(tmp_path.iterdir())


def test_foreign_directories_and_files_are_refused_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(PrismError, match="not empty and not a run directory"):
        create(job(str(tmp_path)))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(PrismError, match="is a file"):
        create(job(str(tmp_path / "thesis.txt")))
    (tmp_path / "run.json").write_text('{"something": "else"}')
    with pytest.raises(FileFormatError, match="not what it should be"):
        create(job(str(tmp_path)))


def test_reading_what_is_no_run_directory(tmp_path):
    with pytest.raises(PrismError, match="not a run directory"):
        RunDir(tmp_path).read_info()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated or not JSON"),
        (b'{"schema": 1, "job": {"opti', "truncated or not JSON"),
        (b"\x00\x01\x02", "truncated or not JSON"),
        (b'{"schema": 1, "x": ' + b"[" * 100_000, "truncated or not JSON: maximum recursion"),
        (b"[1, 2]", "not what it should be"),
        (b'{"job": 3}', "not what it should be"),
        (b'{"schema": 1, "job": 3}', "not what it should be"),
        (b'{"schema": 999, "job": 3}', "newer version of prism .schema 999"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, said):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=said) as caught:
        read_json(path, RunInfo)
    assert str(path) in str(caught.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileFormatError, match=r"slices/3/report\.json is missing"):
        RunDir(tmp_path).read_report(3)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(
        os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(PrismError, match=r"cannot write .*x\.json: No space left on device"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB, where mounting is allowed."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_full_disk(tiny_disk):
    rundir = create(job(str(tiny_disk / "run")))
    with pytest.raises(PrismError, match="No space left on device; free some space"):
        write_bytes(rundir.prediction, b"x" * 2**20)
    assert not rundir.prediction.exists()
    assert not list(rundir.path.glob(".*"))


def test_read_only_place(tiny_disk):
    done = subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], capture_output=True)
    if done.returncode:
        pytest.skip("cannot remount read-only")
    with pytest.raises(PrismError, match="Read-only file system; choose another --prism-out"):
        create(job(str(tiny_disk / "run")))


def test_a_new_run_in_an_old_directory_leaves_nothing_old(tmp_path):
    rundir = create(job(str(tmp_path)))
    rundir.write_info(RunInfo(job=job(), status="ok"))
    written = (
        rundir.prediction, rundir.predicted_log, rundir.report, rundir.trace, rundir.kineto_trace(3), rundir.slice(3).report,
        rundir.chakra / "rank3.et", rundir.memory / "rank3.pickle", rundir.tensorboard / "events.out.tfevents.1",
        rundir.what_if / "replay" / "0" / "replay.json",
    )  # fmt: skip
    for file in written:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    del rundir
    create(job(str(tmp_path)))
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["notes.txt"]
