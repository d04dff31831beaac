"""All outputs of a run in one call."""

import gzip
import io
import json

import msgspec
import pytest

from prism_plugins.cli_run import load_view
from prism_plugins.emit import all as emit_module
from prism_plugins.emit import emit_all
from prism_plugins.emit.console import make_console
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.errors import PrismError
from prism_plugins.rundir import RunDir


@pytest.fixture
def emitted(run, tmp_path, prediction):
    """Emit the run into a fresh directory; gives (directory, what the console showed)."""
    view = load_view(run)

    def emit(*, log_lines=(" iteration 1 | lm loss: 1.0* |",), view=view, **fields):
        rundir = RunDir(tmp_path / "fresh")
        rundir.path.mkdir(exist_ok=True)
        file = io.StringIO()
        emit_all(rundir, msgspec.structs.replace(prediction, world_size=8, **fields), view=view,
                 log_lines=log_lines, console=make_console(file))  # fmt: skip
        return rundir, file.getvalue()

    emit.view = view
    return emit


def test_everything_is_written(emitted, prediction):
    rundir, text = emitted()
    assert read_prediction(rundir.prediction) == msgspec.structs.replace(prediction, world_size=8)
    assert " iteration 1 | lm loss: 1.0* |" in rundir.predicted_log.read_text().splitlines()
    assert text.startswith("# megatron log of 8 ranks"), "the log comes first, as in a training run"
    assert "marked *" in text
    ranks = {
        json.loads(gzip.decompress(p.read_bytes()))["distributedInfo"]["rank"]
        for p in rundir.kineto.iterdir()
    }
    slowest = emitted.view.timeline.slowest_rank
    assert slowest in ranks
    job = emitted.view.job
    assert {job.class_of(rank) for rank in ranks} == set(range(len(job.classes))), "one rank of every class"
    assert str(rundir.prediction.name) in text
    assert sorted(p.name for p in rundir.path.iterdir()) == [
        "kineto",
        "predicted.log",
        "prediction.json",
        "trace.pftrace",
    ]


def test_a_cap_on_traces_is_said(emitted, monkeypatch):
    monkeypatch.setattr(emit_module, "MAX_TRACE_ROWS", 1)
    rundir, text = emitted()
    assert [p.name for p in rundir.kineto.iterdir()] == [f"rank{emitted.view.timeline.slowest_rank}.json.gz"]
    assert "3 of 4 classes have no trace yet" in text


def test_a_job_that_would_not_run_has_no_traces(emitted):
    view = msgspec.structs.replace(emitted.view, timeline=None)
    rundir, text = emitted(view=view, iteration_time_ms=0.0, log_lines=())
    assert not rundir.kineto.exists()
    assert not rundir.predicted_log.exists()
    assert "not predicted" in text


def test_a_full_disk_is_one_line_and_leaves_no_half_file(emitted, monkeypatch, tmp_path):
    def full(*_args, **_fields):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr("prism_plugins.emit.kineto.trace_events", full)
    with pytest.raises(PrismError, match=r"rank\d+\.json\.gz: No space left on device"):
        emitted()
    assert not list((tmp_path / "fresh" / "kineto").iterdir())
