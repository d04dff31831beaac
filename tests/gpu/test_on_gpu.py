"""On a real GPU: the timer kernel, answers without memory, a slice and its replay, faults. Skipped without one."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from prism_plugins.collectives import mirror, values
from prism_plugins.gpu.recorder import GpuRecorder
from prism_plugins.gpu.timing import make_schedule
from prism_plugins.program.model import CommSignature, EventKind, GroupInfo, Phase
from prism_plugins.program.replay import ReplayCall, ReplayPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.version.cuda is None or not torch.cuda.is_available(), reason="needs a real GPU"
    ),
]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_gpt_megatron.py"
SMALL = (
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 --seq-length 1024 "
    "--micro-batch-size 2 --global-batch-size 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
)


def elapsed_us(work) -> float:
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # so that launching does not show
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


@pytest.fixture(scope="module")
def timer():
    from prism_plugins.replay.device_timer import GlobalTimer

    return GlobalTimer()


@pytest.mark.parametrize("us", [20, 200, 5000])
@pytest.mark.parametrize("channels", [0, 16])
def test_a_call_takes_its_predicted_time(timer, us: int, channels: int) -> None:
    stream = torch.cuda.current_stream()

    def call() -> None:
        timer.reached(1, stream)
        timer.take_part(
            1, stream, duration_ns=us * 1e3, peers_ns=-1, channels=channels, hbm_bytes=us * 1e-6 * 1e12
        )

    assert us <= elapsed_us(call) <= us + 8


def test_late_peers_come_at_their_time_and_long_iterations_do_not_overflow(timer) -> None:
    stream = torch.cuda.current_stream()

    def call(peers_ns: float) -> None:
        timer.begin(stream)
        timer.reached(2, stream)
        timer.take_part(2, stream, duration_ns=1e5, peers_ns=peers_ns, channels=0, hbm_bytes=0)

    assert elapsed_us(lambda: call(3e6)) == pytest.approx(3_100, abs=15)
    assert elapsed_us(lambda: call(0)) == pytest.approx(100, abs=15)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(2.5e9)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(2_500, rel=0.002), "beyond 31 bits of nanoseconds"


def test_answers_of_peers_take_no_memory() -> None:
    full = torch.randn(4, 1 << 20, device="cuda", dtype=torch.bfloat16)
    shard, out = full[1], torch.empty(1 << 20, device="cuda", dtype=torch.bfloat16)
    expected = full[1].float() * 4
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mirror.reduce_scatter_flat(out, full, "SUM", 4, 1)
    mirror.reduce_(out, "SUM", 4)
    mirror.all_gather_flat(full, shard, 4)
    mirror.reduce_scatter_flat(full[2], full, "SUM", 4, 2)
    values.fill_plausible(full, full, scale=0.5)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert full.float().std().item() == pytest.approx(0.5, rel=0.01)
    assert torch.equal(out.float(), expected * 4)
    mirror.all_gather_flat(full, shard, 4)
    assert torch.equal(full[0], full[3])


def matmuls(recorder: GpuRecorder, x: torch.Tensor, y: torch.Tensor, group: int, times: int) -> None:
    recorder.begin_phase(Phase(kind="forward", microbatch=0))
    for _ in range(times):
        torch.mm(x, x, out=y)
    recorder.comm(
        CommSignature(
            kind="all_reduce", group=group, dtype="bfloat16", in_numel=y.numel(), out_numel=y.numel()
        ),
        work=recorder.new_work(),
        is_async=False,
    )
    with recorder.answering():
        y.mul_(0.5)
    recorder.end_phase()


def test_the_recorder_measures_what_events_measure(tmp_path: Path) -> None:
    recorder = GpuRecorder(make_schedule(9), work_dir=tmp_path)
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    for _ in range(9):
        recorder.start()
        matmuls(recorder, x, y, group, 20)
        iteration = recorder.stop()
    assert recorder.has_program
    kinds = iteration.events["kind"].tolist()
    assert kinds.count(EventKind.KERNEL) == 20, "the answer is no part of it"
    assert [kinds.count(k) for k in (EventKind.COMM, EventKind.PHASE_BEGIN, EventKind.PHASE_END)] == [1, 1, 1]
    measured = recorder.measured(0)
    (op,) = measured.ops
    assert op.signature.op.startswith("aten::mm")
    alone = elapsed_us(lambda: [torch.mm(x, x, out=y) for _ in range(20)]) / 20
    assert op.ns / 1e3 == pytest.approx(alone, rel=0.1)
    assert len(measured.iteration_ms) == recorder.schedule.timed
    assert measured.watched is not None, recorder.remarks
    assert 0 < measured.watched.busy_ms < statistics.median(measured.watched.iteration_ms)
    assert 1e3 < op.host_ns < 1e6, "CUPTI alone tells when the host launched"
    assert not list(tmp_path.iterdir()), "traces are removed"


def test_a_replay_takes_the_time_of_its_plan(tmp_path: Path) -> None:
    from prism_plugins.replay.participants import ReplayRecorder

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    call = ReplayCall("all_reduce", y.nbytes, 4e6, channels=8, hbm_bytes=1e9)
    plan = ReplayPlan(rank=0, iteration_ns=30e6, idle_ns=1.0, calls=(call,))
    recorder = ReplayRecorder(plan, iterations=12, work_dir=tmp_path)
    group = recorder.group(GroupInfo(ranks=(0, 1), name="g"))
    for _ in range(12):
        recorder.start()
        matmuls(recorder, x, y, group, 5)
        recorder.stop()
    result = recorder.result()
    assert (result.unmatched, result.calls, result.timer) == (0, 1, "globaltimer")
    assert statistics.median(result.iteration_ms[4:]) == pytest.approx(30.0, rel=0.01), "waits for the others"


class Launched(NamedTuple):
    """A launch that ended, and where it ran."""

    folder: Path
    process: subprocess.CompletedProcess


def launch(
    tmp_path: Path,
    *flags: str,
    script: Path = SCRIPT,
    extra_path: Path | None = None,
    name: str = "run",
    timeout: float = 200,
    cache: bool = False,
) -> subprocess.CompletedProcess:
    command = [
        sys.executable, "-m", "prism_plugins.run", str(script), *SMALL.split(), "--prism-emulate", "--prism-device", "cuda",
        "--prism-cluster", "dgx-h200", "--prism-out", str(tmp_path / name), *flags,
        *(() if cache else ("--prism-no-cache",)),
    ]  # fmt: skip
    env = {**os.environ, "PRISM_SLICE_CACHE": str(tmp_path / "cache")}
    if extra_path is not None:
        env["PYTHONPATH"] = f"{extra_path}:{env.get('PYTHONPATH', '')}"
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=tmp_path)


def error_line(done: subprocess.CompletedProcess) -> str:
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("prism: error:")]
    return line


def script_that_first(tmp_path: Path, code: str) -> Path:
    """The training script, after ``code`` ran in its process."""
    path = tmp_path / "sabotaged.py"
    path.write_text(f"{code}\nimport runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    return path


def prediction_of(tmp_path: Path, name: str = "run") -> dict:
    return json.loads((tmp_path / name / "prediction.json").read_text())


def test_a_job_is_sliced_simulated_and_replayed(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    sizes = ("--prism-world-size", "2", "--prism-iterations", "8")
    done = launch(tmp_path, *sizes, cache=True)
    assert done.returncode == 0, done.stderr[-3000:]
    prediction = prediction_of(tmp_path)
    assert prediction["device"] == "cuda"
    assert prediction["iteration_time_ms"] > 1
    assert not prediction["unpriced_ops"]
    (replay,) = prediction["replay"]
    assert replay["unmatched_calls"] == 0
    assert "elapsed time per iteration" in (tmp_path / "run" / replay["log"]).read_text()
    report = json.loads((tmp_path / "run" / "slices" / "0" / "report.json").read_text())
    assert report["steady"]
    measured = json.loads((tmp_path / "run" / "slices" / "0" / "measured.json").read_text())
    assert measured["watched"]["iteration_ms"]
    replay_file = tmp_path / "run" / "replay" / str(replay["rank"]) / "replay.json"
    replayed = json.loads(replay_file.read_text())
    assert report["peak_requested_bytes"] == replayed["peak_requested_bytes"], "both are the real allocator's"
    # Which cached block it takes depends on what came before; up to 1 MiB more is not split off.
    assert abs(report["peak_allocated_bytes"] - replayed["peak_allocated_bytes"]) < 2**21
    told = [finding["message"] for finding in prediction["findings"] if finding["kind"] == "shared_gpu"]
    pids = {int(pid) for text in told for pid in re.findall(r"pid (\d+)", text)}
    assert pids <= {os.getpid()}, "a slice does not take itself for a neighbour"
    if not told and "slowed down" not in str(prediction["assumptions"]):
        again = launch(tmp_path, *sizes, "--prism-replay", "none", name="again", cache=True)
        assert again.returncode == 0, again.stderr[-3000:]
        second = prediction_of(tmp_path, "again")
        assert second["iteration_time_ms"] == pytest.approx(prediction["iteration_time_ms"], rel=1e-9)
        assert any("measured on this GPU by an earlier launch" in text for text in second["assumptions"])


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    """Launches that need no GPU of their own, side by side."""
    pytest.importorskip("megatron.core")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("cap", "killed", "bare", "no_profiler")}
    hidden = folders["bare"] / "hidden"
    hidden.mkdir()
    (hidden / "pynvml.py").write_text("raise ImportError('hidden by a test')\n")
    killed = script_that_first(
        folders["killed"],
        "import os, signal\n"
        "from torch.optim.optimizer import register_optimizer_step_post_hook as hook\n"
        "steps = []\n"
        "def count(*_):\n"
        "    steps.append(0)\n"
        "    if os.environ['RANK'] == '1' and len(steps) == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "hook(count)",
    )
    without_nccl = script_that_first(
        folders["bare"],
        "import torch.distributed.distributed_c10d as c10d\n"
        "class Broken(c10d.ProcessGroupNCCL):\n"
        "    def __init__(self, *_, **__):\n"
        "        raise RuntimeError('libnccl.so.2: cannot open shared object file')\n"
        "c10d.ProcessGroupNCCL = Broken",
    )
    without_profiler = script_that_first(
        folders["no_profiler"],
        "import torch\n"
        "def start(self):\n"
        "    raise RuntimeError('CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED')\n"
        "torch.profiler.profile.start = start",
    )
    short = ("--prism-iterations", "6", "--prism-replay", "none")
    pipeline = ("--pipeline-model-parallel-size", "2", "--prism-world-size", "2")
    wanted: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "cap": (("--prism-world-size", "1", "--prism-gpu-memory", "2GiB"), {}),
        "killed": ((*pipeline, *short), {"script": killed}),
        "bare": (("--prism-world-size", "2", *short), {"script": without_nccl, "extra_path": hidden}),
        "no_profiler": (("--prism-world-size", "1"), {"script": without_profiler}),
    }
    with ThreadPoolExecutor(len(wanted)) as pool:
        running = {
            name: pool.submit(launch, folders[name], *flags, **given)
            for name, (flags, given) in wanted.items()
        }
        return {name: Launched(folders[name], done.result()) for name, done in running.items()}


def test_a_cap_that_is_too_small_is_one_line(faults: dict[str, Launched]) -> None:
    done = faults["cap"].process
    assert done.returncode == 2
    assert "does not fit the cap of 2.0 GiB" in error_line(done)
    assert "Traceback" not in done.stderr


def test_a_slice_that_is_killed_leaves_the_earlier_ones(faults: dict[str, Launched]) -> None:
    folder, done = faults["killed"]
    assert done.returncode == 1
    line = error_line(done)
    assert "rank 1" in line
    assert "SIGKILL" in line
    assert "Traceback" not in done.stderr
    kept = folder / "run" / "slices" / "0"
    assert json.loads((kept / "report.json").read_text())["status"] == "ok"
    assert json.loads((kept / "measured.json").read_text())["iteration_ms"]


def test_without_nvml_and_nccl_the_rest_is_measured(faults: dict[str, Launched]) -> None:
    """``pynvml`` cannot be imported, and no communicator of NCCL can be made."""
    folder, done = faults["bare"]
    assert done.returncode == 0, done.stderr[-3000:]
    prediction = prediction_of(folder)
    assert prediction["iteration_time_ms"] > 1
    assert any("NVML is not available" in text for text in map(str, prediction["assumptions"]))


def test_without_a_profiler_there_is_one_line(faults: dict[str, Launched]) -> None:
    done = faults["no_profiler"].process
    assert done.returncode == 2
    assert "MULTIPLE_SUBSCRIBERS" in error_line(done)
    assert "Traceback" not in done.stderr


def test_a_gpu_that_is_too_small_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    total = torch.cuda.get_device_properties(0).total_memory
    # The scores of one layer (8 heads, 1024 x 1024, bf16) alone are half of the GPU.
    micro_batch = total // 2 // (8 * 1024 * 1024 * 2)
    sizes = ("--micro-batch-size", str(micro_batch), "--global-batch-size", str(micro_batch))
    done = launch(tmp_path, *sizes, "--prism-world-size", "1")
    assert done.returncode == 2
    line = error_line(done)
    assert "does not fit the GPU" in line
    assert "live GiB" in line
    assert "Traceback" not in done.stderr


def test_a_neighbour_on_the_gpu_is_told(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("pynvml")
    code = "import torch; x = torch.zeros(2**30, dtype=torch.uint8, device='cuda'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as neighbour:
        try:
            neighbour.stdout.readline()
            done = launch(
                tmp_path, "--prism-world-size", "1", "--prism-iterations", "6", "--prism-replay", "none"
            )
        finally:
            neighbour.communicate(b"\n")
    assert done.returncode == 0, done.stderr[-3000:]
    (finding,) = [f for f in prediction_of(tmp_path)["findings"] if f["kind"] == "shared_gpu"]
    assert f"pid {neighbour.pid} (1." in finding["message"]


def test_with_nvml_clocks_power_and_memory_are_read() -> None:
    from prism_plugins.gpu.device import neighbours
    from prism_plugins.gpu.sensors import GpuSensors

    pytest.importorskip("pynvml")
    sensors = GpuSensors(uuid=str(torch.cuda.get_device_properties(0).uuid))
    assert sensors.available, sensors.why_not
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sensors.watch()
    for _ in range(1200):
        torch.mm(x, x)
    torch.cuda.synchronize()
    state = sensors.stop()
    assert state.samples >= 3
    assert 300 < state.clock_mhz <= state.max_clock_mhz
    assert 100 < state.power_w < 1.2 * state.cap_w
    assert not neighbours(sensors)
    free, total = torch.cuda.mem_get_info()
    assert sensors.used_bytes() == pytest.approx(total - free, rel=0.05)
