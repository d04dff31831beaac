"""A replay on the virtual clock: what the script's own clocks show is what the simulation says."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import datetime, time
import torch, torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4))).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
deadline = time.time() + 600
before = None
for step in range(100):
    began = time.perf_counter()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    loss = model(torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean()
    last.record()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    now = time.time()
    assert now < deadline
    print(f"step {step} took {1e3 * (time.perf_counter() - began):.3f} from {1e3 * (now - before) if before else 0:.3f} "
          f"forward {first.elapsed_time(last):.3f} ms", flush=True)
    before = now
"""


def prism(folder: Path, *words: str) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "train.py").write_text(SCRIPT)
    prism(
        folder, "-m", "prism_plugins.run", "train.py", "--prism-emulate", "--prism-world-size", "2", "--prism-replay", "1",
        "--prism-iterations", "7", "--prism-out", "run",
    )  # fmt: skip
    return folder


def shown(log: Path) -> dict[str, float]:
    """Medians of what the script printed, ms, its first steps left out."""
    lines = re.findall(r"step \d+ took ([\d.]+) from ([\d.]+) forward ([\d.]+) ms", log.read_text())[2:]
    assert lines
    return {
        name: statistics.median(float(line[i]) for line in lines)
        for i, name in enumerate(("took", "from", "forward"))
    }


def test_the_scripts_own_log_shows_simulated_times(folder: Path) -> None:
    prediction = json.loads((folder / "run" / "prediction.json").read_text())
    (replay,) = prediction["replay"]
    simulated = prediction["iteration_time_ms"]
    assert (replay["rank"], replay["timer"]) == (1, "virtual clock")
    assert replay["iteration_time_ms"] == pytest.approx(simulated, rel=1e-6)
    times = shown(folder / "run" / replay["log"])
    assert times["from"] == pytest.approx(simulated, abs=0.02)
    assert 0 < times["forward"] < times["took"] <= simulated + 0.02
    # 4 GEMMs of 2 x 8192 x 4096 x 4096 each, twice as many behind them, and 134 MB to reduce.
    assert times["forward"] < simulated / 2
    assert shown(folder / "run" / "slices" / "1" / "log.txt")["from"] != pytest.approx(simulated, rel=0.01), (
        "a slice sees the clock of this machine"
    )
    assert not [f for f in prediction["findings"] if f["kind"] == "replay"]


def test_a_slow_rank_is_late_in_the_logs_of_both(folder: Path) -> None:
    done = prism(
        folder, "-c", "import sys; from prism_plugins.cli import main; sys.exit(main())", "what-if", "run", "--slow-rank", "1=2",
        "--replay", "0,1", "--json",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert [one["rank"] for one in report["replay"]] == [0, 1]
    before = shown(folder / "run" / "replay" / "1" / "log.txt")
    fast, slow = (shown(folder / "run" / "what-if" / one["log"]) for one in report["replay"])
    for times in (fast, slow):
        assert times["from"] == pytest.approx(report["iteration_ms"][0], abs=0.02)
    assert fast["from"] > 1.3 * before["from"]
    assert slow["forward"] == pytest.approx(2 * fast["forward"], rel=0.1), (
        "the slow one itself, not who waits for it"
    )


@pytest.mark.slow
def test_timers_of_deepspeed_show_simulated_times_too(tmp_path: Path) -> None:
    """``wall_clock_breakdown`` reads CUDA events, the script a host clock; the steps are those of the simulation."""
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2}, "wall_clock_breakdown": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = Path(__file__).parents[2] / "scripts" / "train_llama_deepspeed.py"
    prism(
        tmp_path, "-m", "prism_plugins.run", str(script), "--deepspeed_config", "ds.json", "--layers", "2", "--steps", "50",
        "--prism-emulate", "--prism-world-size", "4", "--prism-replay", "0", "--prism-out", "run",
    )  # fmt: skip
    prediction = json.loads((tmp_path / "run" / "prediction.json").read_text())
    text = (tmp_path / "run" / "replay" / "0" / "log.txt").read_text()
    steps = [float(ms) for ms in re.findall(r"step \d+ ms ([\d.]+)", text)][2:]
    assert steps
    assert steps == pytest.approx([prediction["iteration_time_ms"]] * len(steps), abs=0.02)
    forward, backward, step = map(
        float, re.findall(r"\| fwd: ([\d.]+) \| bwd: ([\d.]+) .*step: ([\d.]+)", text)[-1]
    )
    assert 0.9 * steps[-1] < forward + backward + step < 1.05 * steps[-1]
    assert backward > forward > 0
