"""A plain megatron-core script and an unmodified pretrain_gpt.py from the flag to the prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.megatron_jobs import CORE_SCRIPT, CORE_SIZES, MEGATRON_LM, TRAINING_SIZES

pytestmark = pytest.mark.e2e

JOBS = {
    "core": (
        CORE_SCRIPT,
        f"{CORE_SIZES} --num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --global-batch-size 8",
    ),
    "training": (
        MEGATRON_LM / "pretrain_gpt.py",
        f"{TRAINING_SIZES} --num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --sequence-parallel --global-batch-size 8 --use-distributed-optimizer",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_launch_ends_with_a_prediction_and_the_log(tmp_path: Path, name: str):
    script, arguments = JOBS[name]
    if not script.exists():
        pytest.skip("MEGATRON_LM names no Megatron-LM checkout")
    run = tmp_path / "run"
    command = [
        *(sys.executable, str(script), *arguments.split()),
        *("--prism-emulate", "--prism-world-size", "8", "--prism-out", str(run), "--prism-no-cache"),
    ]
    env = {**os.environ, "PYTHONPATH": str(MEGATRON_LM), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    prediction = json.loads((run / "prediction.json").read_text())
    layout = {"tp": 2, "pp": 2, "dp": 2, "vpp": 1, "cp": 1, "ep": 1}
    assert {k: prediction["layout"][k] for k in layout} == layout
    assert prediction["num_microbatches"] == 4
    assert prediction["iteration_time_ms"] > 0
    assert prediction["tflops_per_gpu"] > 0

    lines = [line for line in (run / "predicted.log").read_text().splitlines() if "iteration " in line]
    assert len(lines) >= 2
    for line in lines:
        assert f"elapsed time per iteration (ms): {prediction['iteration_time_ms']:.1f} |" in line
        assert "grad norm" in line
        assert "* |" in line
