"""The outputs of a small Megatron-core job, launched as a user launches it."""

import collections
import gzip
import json
import pathlib
import subprocess
import sys

import pytest

from prism_plugins.cli_run import load_view
from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.emit.spans import device_spans, temporal_breakdown
from prism_plugins.rundir import RunDir

pytestmark = pytest.mark.e2e

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "train_gpt_megatron.py"
ARGUMENTS = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128"
    " --vocab-size 512 --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2"
    " --pipeline-model-parallel-size 2"
)


def prism(*words):
    return subprocess.run(
        [sys.executable, "-m", "prism_plugins.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run it once: TP2 PP2 DP2. Gives (run directory, what the launch printed)."""
    pytest.importorskip("megatron.core")
    out = tmp_path_factory.mktemp("job") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "prism_plugins.run", str(SCRIPT), *ARGUMENTS.split(), "--prism-world-size", "8",
         "--prism-out", str(out)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(out), done.stdout


def test_summary_and_files(job):
    rundir, text = job
    prediction = read_prediction(rundir.prediction)
    assert prediction.world_size == 8
    assert prediction.layout["tp"] == prediction.layout["pp"] == prediction.layout["dp"] == 2
    assert prediction.iteration_time_ms > 0
    parts = prediction.breakdown_ms
    total = parts.compute + parts.exposed_communication + parts.bubble + parts.host + parts.optimizer
    assert total == pytest.approx(prediction.iteration_time_ms, rel=1e-6)
    assert "8 ranks (tp 2 · pp 2 · dp 2)" in text
    assert "Verdict       fits" in text
    log = rundir.predicted_log.read_text()
    assert sum("elapsed time per iteration" in line for line in log.splitlines()) >= 2
    assert log in text, "the predicted log is shown, too"
    again = prism("show", rundir.path)
    assert again.splitlines()[1] == "prism prediction"
    for line in again.splitlines()[1:20]:
        assert line in text


def test_what_it_says_about_itself(job):
    """Expected error or why there is none, what to change first, the report and the trace of all ranks."""
    rundir, text = job
    prediction = read_prediction(rundir.prediction)
    assert prediction.expected_error.fraction is not None or prediction.expected_error.basis
    assert {"tp", "dp", "pp"} <= prediction.exposed_communication_ms.keys()
    assert prediction.opportunities
    for opportunity in prediction.opportunities:
        assert 0 < opportunity.gain_ms < prediction.iteration_time_ms
        assert opportunity.what in text or opportunity not in prediction.opportunities[:3]
    report = rundir.report.read_text()
    assert report.count("<svg") >= 6
    assert "stage 1" in report
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace.FromString(gzip.decompress(rundir.trace.read_bytes()))
    processes = [p for p in trace.packet if p.track_descriptor.HasField("process")]
    assert len(processes) == 8
    last = max(p.timestamp for p in trace.packet if p.HasField("track_event"))
    assert last <= 1e6 * prediction.iteration_time_ms + 1
    assert (rundir.path / "trace.pftrace").name in text


def test_the_programs_they_are_meant_for_open_all_outputs(job):
    """scripts/check_outputs.py: tools that are not installed are named, one that reads something else fails."""
    rundir, _ = job
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("check_outputs.py")), str(rundir.path), "--ranks", "0,2"],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split(" ok")[0]) >= 3, done.stdout


def test_ops_of_a_rank_no_slice_ran(job):
    rundir, _ = job
    sliced = rundir.read_info().slices
    rank = next(r for r in range(8) if r not in sliced)
    rows = [json.loads(line) for line in prism("ops", rundir.path, "--rank", rank, "--json").splitlines()]
    kinds = collections.Counter(row["name"] for row in rows if row["kind"] == "comm")
    assert kinds["all_reduce"] > 0
    assert kinds["send"] + kinds["recv"] > 0
    assert all(rank in row["group_ranks"] for row in rows if row["kind"] == "comm")
    assert all(row["peer"] != rank for row in rows if row["name"] in ("send", "recv"))
    phases = {row["phase"].split(" ")[0] for row in rows}
    assert {"forward", "backward", "optimizer"} <= phases
    assert sum(row["duration_us"] > 0 for row in rows) > 100


def test_holistic_trace_analysis_agrees(job, monkeypatch):
    # Rounded to microseconds, kernels that wait for a slow host lose up to one each.
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    rundir, _ = job
    prism("trace", rundir.path, "--ranks", "0,7")
    files = {rank: str(rundir.kineto_trace(rank)) for rank in (0, 7)}
    table = hta.TraceAnalysis(trace_files=files).get_temporal_breakdown(visualize=False).set_index("rank")
    view = load_view(rundir)
    for rank in files:
        ours = temporal_breakdown(device_spans(*view.timed_program(rank)))
        assert ours.kernel_ns <= view.timeline.iteration_time_ns * (1 + 1e-9)
        for column, value in (("idle_time(us)", ours.idle_ns), ("compute_time(us)", ours.compute_ns),
                              ("non_compute_time(us)", ours.non_compute_ns), ("kernel_time(us)", ours.kernel_ns)):  # fmt: skip
            assert table.loc[rank, column] * 1e3 == pytest.approx(value, abs=3_000), column


def test_traces_of_all_ranks_hold_the_same_collectives(job):
    """Members of a group have the same kernels of that group, in the same order."""
    rundir, _ = job
    prism("trace", rundir.path, "--ranks", "all")
    calls = collections.defaultdict(dict)
    for rank in range(8):
        data = json.loads(gzip.decompress(rundir.kineto_trace(rank).read_bytes()))
        sequence = collections.defaultdict(list)
        for event in data["traceEvents"]:
            args = event.get("args", {})
            if event.get("cat") == "kernel" and args.get("Collective name") in (
                "allreduce",
                "_allgather_base",
            ):
                key = (args["Process Group Description"], args["Process Group Ranks"])
                sequence[key].append((args["Collective name"], args["In msg nelems"], args["dtype"]))
        for key, value in sequence.items():
            calls[key][rank] = value
    assert len(calls) >= 4 + 4, "tp groups and dp groups"
    for (_, ranks), by_rank in calls.items():
        assert sorted(by_rank) == json.loads(ranks)
        assert len(set(map(tuple, by_rank.values()))) == 1
