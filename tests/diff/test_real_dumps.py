"""prism diff beside dumps that PyTorch's own flight recorder wrote in a job that really ran (gloo, two processes)."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from prism_plugins.diff.read_flight_recorder import read_flight_recorder

pytestmark = pytest.mark.e2e
SCRIPT = pathlib.Path(__file__).with_name("real_job.py")


def launch(*words, processes=1, **env):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *map(str, words)],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """(run directory, dumps of the job as predicted, dumps of one with other calls)."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch records NCCL's calls only")
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "same").mkdir()
    (folder / "more").mkdir()
    real = {"processes": 2, "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    launch(SCRIPT, folder / "same", **real)
    launch(SCRIPT, folder / "more", "--more", **real)
    launch(SCRIPT, folder, "--prism-emulate", "--prism-world-size", 2, "--prism-out", folder / "run")
    return folder / "run", folder / "same", folder / "more"


def diff(*words):
    return subprocess.run(
        [sys.executable, "-m", "prism_plugins.cli", "diff", *map(str, words)],
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip


def test_a_job_that_ran_as_predicted(jobs):
    run, same, _ = jobs
    real = read_flight_recorder(same)
    assert [rank.rank for rank in real.ranks] == [0, 1]
    calls = {
        key.name: sum(t.calls for k, t in real.ranks[0].ops.items() if k[0].name == key.name)
        for (key,) in real.ranks[0].ops
    }
    assert calls["all_reduce"] == 3 * 6
    assert calls["broadcast"] == 6
    text = diff(run, same)
    assert "not predicted" not in text
    assert "not in the dump" not in text
    rows = [
        line.split() for line in text.splitlines() if line.lstrip().startswith(("all_reduce", "broadcast"))
    ]
    assert len(rows) == 2 * 3, text
    assert {row[-1] for row in rows} == {"6.00"}, "calls in the dump per call of an iteration: six iterations"


def test_a_job_with_other_calls(jobs):
    run, _, more = jobs
    assert "broadcast 64 in" in diff(run, more).split("not predicted", 1)[1]
