"""Real launches of a small training script: torchrun, python, -m; what goes wrong, and what the user then sees."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launches import FILES, TORCHRUN, mount, slice_processes, wait_for

pytestmark = pytest.mark.e2e


def test_torchrun_end_to_end(place):
    done = place.run("train.py", "--pp", 2, "--prism-audit=0", launcher=[*TORCHRUN, "1"])
    # The normal training log of the lead slice, without prism's flags in the script's sight.
    assert "rank 0 of 8 argv ['--pp', '2']" in done.stdout
    assert f"path {place.path} name __main__" in done.stdout
    assert " iteration 0 | loss " in done.stdout
    assert "a warning of the script" in done.stderr
    assert "predicted" in done.stdout
    prediction = place.prediction()
    assert prediction["world_size"] == 8
    assert prediction["layout"] == {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 2}
    assert prediction["iteration_time_ms"] > 0
    assert sum(c["num_ranks"] for c in prediction["classes"]) == 8
    assert len(prediction["memory"]) == len(prediction["classes"])
    assert abs(sum(prediction["breakdown_ms"].values()) - prediction["iteration_time_ms"]) < 1e-6
    info = place.info()
    assert info["status"] == "ok"
    assert info["slices"] == place.slices() == [s["rank"] for s in prediction["slices"]]
    assert 0 in info["slices"]
    assert 7 in info["slices"]
    assert all((place.out / "slices" / str(rank) / "log.txt").stat().st_size for rank in info["slices"])


def test_python_module_and_explicit_starts_are_the_same_run(place):
    place.run("train.py")
    first = place.prediction()
    assert not any(s["cached"] for s in first["slices"])
    done = place.run("train.py")
    assert all(s["cached"] for s in place.prediction()["slices"])
    assert " iteration 0 | loss " in done.stdout  # The kept log is the training log.
    place.run("-m", "prism_plugins.run", "train.py", flags=("--prism-world-size", "8"))
    assert all(s["cached"] for s in place.prediction()["slices"])
    assert place.prediction()["iteration_time_ms"] == first["iteration_time_ms"]
    done = place.run("-m", "train")
    assert "name __main__" in done.stdout
    # Slices of its own, whose CPU time is another one; the device's work is the same.
    assert place.prediction()["breakdown_ms"]["compute"] == pytest.approx(first["breakdown_ms"]["compute"])


def test_another_cluster_simulates_again_without_slicing_again(place):
    place.run("train.py")
    text = (Path(__file__).parents[2] / "prism_plugins/costs/clusters/dgx-h100.toml").read_text()
    slow = text + "\n[host]\nop_us = 500.0\n"
    (place.path / "slow.toml").write_text(slow)
    before = place.prediction()["iteration_time_ms"]
    place.run("train.py", "--prism-cluster=slow.toml")
    assert all(s["cached"] for s in place.prediction()["slices"])
    assert place.prediction()["iteration_time_ms"] > before


def test_a_changed_module_of_the_user_is_sliced_again(place):
    (place.path / "fake_framework.py").write_text((FILES / "fake_framework.py").read_text())
    place.run("train.py")
    with open(place.path / "fake_framework.py", "a") as file:
        file.write("\n# changed\n")
    place.run("train.py")
    assert not any(s["cached"] for s in place.prediction()["slices"])


def test_environment_instead_of_flags(place):
    place.env |= {"PRISM_EMULATE": "1", "PRISM_WORLD_SIZE": "4", "PRISM_NO_CACHE": "1"}
    done = place.run("train.py", launcher=[*TORCHRUN, "1"], flags=())
    assert "rank 0 of 4 argv []" in done.stdout
    assert place.prediction()["world_size"] == 4
    assert not (place.path / "cache").exists()


def test_without_autoload_the_explicit_start_works(place):
    place.env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    place.run("-m", "prism_plugins.run", "train.py", flags=("--prism-world-size", "2"))
    assert place.prediction()["world_size"] == 2


def test_two_physical_ranks_share_the_slices(place):
    done = place.run("train.py", "--pp", 2, launcher=[*TORCHRUN, "2"])
    assert place.slices() == place.info()["slices"]
    assert place.info()["launch_world"] == 2
    assert len(place.slices()) >= 3
    assert done.stdout.count("rank 0 of 8") == 1
    assert done.stderr.count("slice rank 0 done") == 1


def test_every_rank_for_real(place):
    done = place.run(
        "train.py",
        launcher=[*TORCHRUN, "2"],
        flags=("--prism-emulate", "--prism-world-size", "2", "--prism-ranks", "all", "--prism-device", "cpu"),
    )
    assert place.slices() == [0, 1]
    for rank in (0, 1):
        spec = json.loads((place.out / "slices" / str(rank) / "spec.json").read_text())
        assert spec["real_ranks"] == [0, 1]
        assert spec["store"]
    assert "for real" in done.stderr
    assert place.prediction()["world_size"] == 2


def test_ranks_of_interest_are_sliced(place):
    place.run("train.py", "--prism-ranks", "2,5")
    assert {2, 5} <= set(place.slices())


def test_a_crash_in_one_slice_shows_rank_phase_and_the_scripts_traceback(place):
    done = place.run("train.py", "--crash-rank", 7, check=False)
    assert done.returncode == 1
    assert re.search(
        r"prism: error: the script failed as rank 7 \(after iteration 1\): ValueError: a deliberate crash",
        done.stderr,
    )
    tail = done.stderr[done.stderr.index("prism: error") :]
    assert 'raise ValueError("a deliberate crash")' in tail
    assert f'File "{place.path}/train.py"' in tail
    assert "prism_plugins/" not in tail.replace("fake_integration", "")
    assert "slices/7/log.txt" in tail
    assert place.info()["status"] == "failed"
    assert not (place.out / "prediction.json").exists()


def test_a_script_that_fails_after_enough_iterations_is_predicted_all_the_same(place):
    done = place.run("train.py", "--crash-rank", 0, "--crash-at", 2, check=False)
    assert done.returncode == 1
    tail = done.stderr[done.stderr.index("prism: error") :]
    assert "the script failed as rank 0 (after iteration 2): ValueError: a deliberate crash" in tail
    assert 'raise ValueError("a deliberate crash")' in tail
    prediction = place.prediction()
    assert prediction["iteration_time_ms"] > 0
    (found,) = (f for f in prediction["findings"] if f["kind"] == "script_failed")
    assert found["severity"] == "error"
    assert "predicted is the last of the 2 iterations before" in found["message"]
    place.run("train.py")
    by_rank = {s["rank"]: s["cached"] for s in place.prediction()["slices"]}
    assert not by_rank[0], "a failed script is not kept"


def test_a_mistake_found_in_the_slice_is_one_line(place):
    done = place.run("train.py", "--tp", 3, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert errors == ["prism: error: the world size 8 is not divisible by tp 3 x pp 1"]
    assert "Traceback" not in done.stderr


def test_a_script_that_never_trains(place):
    done = place.run("train.py", "--steps", 0, check=False)
    assert done.returncode == 1
    assert "rank 0: the script ended without a training iteration that prism recognises" in done.stderr
    assert "fake" in done.stderr.split("frameworks it knows")[1]


def test_a_script_that_trains_with_plain_ddp(place):
    (place.path / "ddp.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())\n"
    )
    done = place.run("ddp.py", check=False)
    assert done.returncode == 2
    assert "error: this script trains with torch's DDP, which prism does not emulate yet" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_exits(place):
    (place.path / "exits.py").write_text("import sys, torch\nprint('bye')\nsys.exit(3)\n")
    done = place.run("exits.py", check=False)
    assert done.returncode == 1
    assert "the script failed as rank 0 (before the first iteration): it exited with status 3" in done.stderr


def test_a_killed_slice(place):
    (place.path / "dies.py").write_text(
        "import os, torch\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = place.run("dies.py", check=False)
    assert done.returncode == 1
    assert "ended by SIGKILL" in done.stderr
    assert "last words" in done.stderr


def test_a_fault_in_compiled_code_says_where_in_the_script(place):
    (place.path / "faults.py").write_text("import ctypes, torch\nctypes.string_at(0)\n")
    done = place.run("faults.py", check=False)
    assert "ended by SIGSEGV" in done.stderr
    assert 'faults.py", line 2' in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prism-emulate",), "--prism-world-size is missing"),
        (("--prism-emulate", "--prism-world-size", "abc"), "expects a whole number, not 'abc'"),
        (("--prism-emulate", "--prism-world-size", "8", "--prism-cluster", "dgx-h101"), "dgx-h100"),
        (("--prism-emulate", "--prism-world-size", "8", "--prism-cluster", "typo.toml"), "did you mean"),
        (("--prism-emulate", "--prism-world-size", "8", "--prism-jbos", "1"), "did you mean --prism-jobs?"),
    ],
)
def test_mistakes_in_flags_run_nothing(place, flags, said):
    (place.path / "typo.toml").write_text('nam = "x"\n')
    done = place.run("train.py", flags=flags, check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("prism: error: ")
    assert said in lines[0]
    assert done.stdout == ""
    assert not place.out.exists()


def test_help_from_the_users_own_launch(place):
    done = place.run("train.py", flags=("--prism-help",))
    assert "--prism-world-size" in done.stdout
    assert "rank" not in done.stdout.splitlines()[0]


def test_a_foreign_output_directory_is_left_alone(place):
    place.out.mkdir()
    (place.out / "thesis.txt").write_text("precious")
    done = place.run("train.py", check=False)
    assert done.returncode == 2
    assert "not a run directory" in done.stderr
    assert [p.name for p in place.out.iterdir()] == ["thesis.txt"]


def test_a_directory_of_a_newer_version_is_refused(place):
    place.out.mkdir()
    (place.out / "run.json").write_text('{"schema": 99}')
    done = place.run("train.py", check=False)
    assert done.returncode == 2
    assert "newer version" in done.stderr


def test_a_full_disk(place):
    mount(place, "16k")
    try:
        done = place.run("train.py", "--prism-out", place.out / "run", check=False)
    finally:
        subprocess.run(["umount", "-l", place.out], check=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"prism: error: cannot write .*No space left on device", done.stderr)


def test_a_read_only_place(place):
    mount(place, "1m")
    subprocess.run(["mount", "-o", "remount,ro", place.out], check=True)
    try:
        done = place.run("train.py", "--prism-out", place.out / "run", check=False)
    finally:
        subprocess.run(["umount", "-l", place.out], check=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize(
    ("number", "launcher", "status"),
    [(signal.SIGINT, (sys.executable,), 130), (signal.SIGTERM, (sys.executable,), 143)],
)
def test_interrupted_children_end_and_finished_slices_are_reused(place, number, launcher, status):
    # Rank 0 finishes quickly; the others hang in their second iteration.
    words = ("train.py", "--pp", 2, "--sleep", 1000, "--sleep-rank", 7, "--prism-jobs", 1)
    child = subprocess.Popen(
        place.command(*words, launcher=launcher),
        cwd=place.path,
        env=place.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: (place.out / "slices/7/facts.json").exists())
        assert slice_processes(place)
        child.send_signal(number)
        _, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == status
    assert f"stopped by {signal.Signals(number).name}" in err
    assert "Traceback" not in err
    wait_for(lambda: not slice_processes(place), timeout=10)
    assert place.info()["status"] == "interrupted"
    shutil.rmtree(place.out)
    child = subprocess.Popen(
        place.command(*words, launcher=launcher),
        cwd=place.path,
        env=place.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: (place.out / "slices/7/facts.json").exists())
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert "slice rank 0 taken from the cache" in err


def test_ctrl_c_under_torchrun(place):
    child = subprocess.Popen(
        place.command("train.py", "--sleep", 1000, launcher=[*TORCHRUN, "1"]),
        cwd=place.path,
        env=place.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: (place.out / "slices/0/facts.json").exists())
        os.killpg(child.pid, signal.SIGINT)  # As a terminal does: the launcher and the conductor.
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode != 0
    assert "prism: stopped by SIGINT" in err
    wait_for(lambda: not slice_processes(place), timeout=10)
    assert place.info()["status"] == "interrupted"


def test_children_do_not_outlive_a_killed_conductor(place):
    child = subprocess.Popen(
        place.command("train.py", "--sleep", 1000),
        cwd=place.path,
        env=place.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (place.out / "slices/0/facts.json").exists())
        assert slice_processes(place)
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not slice_processes(place), timeout=10)


def test_a_damaged_program_in_the_cache_is_sliced_again(place):
    place.run("train.py")
    for program in (place.path / "cache").glob("*/program.npz"):
        program.write_bytes(program.read_bytes()[:100])
    place.run("train.py")
    assert not any(s["cached"] for s in place.prediction()["slices"])
