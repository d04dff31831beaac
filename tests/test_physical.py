"""Slices shared between physical ranks, with and without a common file system."""

import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from prism_plugins import physical
from prism_plugins.errors import PrismError
from prism_plugins.options import Options
from prism_plugins.physical import Launch, Leadership, launch_from_environment, runs_for_real, serve
from prism_plugins.program.slices import GpuFacts, SliceReport, SliceSpec
from prism_plugins.rundir import RunDir, write_json

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_launch_is_read_from_the_environment():
    launch = launch_from_environment(TORCHRUN)
    assert launch == Launch(rank=1, world=2, local_world=2, host="node0", port=29500, agent_store=True)
    assert not launch.leads


@pytest.mark.parametrize(
    "change",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": ""},
        {"MASTER_ADDR": ""},
        {"MASTER_PORT": "x"},
        {"LOCAL_WORLD_SIZE": "many"},
    ],
)
def test_anything_else_is_a_single_process(change):
    assert launch_from_environment(TORCHRUN | change) == Launch()
    assert launch_from_environment({}).leads


def test_deepspeeds_launcher_names_its_processes_otherwise():
    launcher = TORCHRUN | {"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": ""}
    assert launch_from_environment(launcher) == Launch(
        rank=1, world=2, local_world=2, host="node0", port=29500
    )


@pytest.mark.parametrize("task", ["0", "3"])
def test_tasks_of_a_scheduler_leave_the_emulation_to_the_first(task):
    environ = {"SLURM_PROCID": task, "SLURM_NTASKS": "64"}
    led = physical.led_elsewhere(environ)
    assert led == (None if task == "0" else "task 3 of 64 (SLURM_PROCID) leaves the emulation to task 0")
    assert physical.led_elsewhere(environ | {"RANK": "3", "WORLD_SIZE": "64"}) is None


def test_for_real_needs_a_process_for_every_rank_and_all_of_interest():
    launch = Launch(rank=0, world=4)
    assert runs_for_real(Options(world_size=4, ranks=(0, 1, 2, 3)), launch)
    assert not runs_for_real(Options(world_size=4), launch)
    assert not runs_for_real(Options(world_size=8, ranks=tuple(range(8))), launch)
    assert not runs_for_real(Options(world_size=1, ranks=(0,)), Launch())


def test_real_ranks_wait_for_each_other_at_the_end():
    store, address = physical.serve_store()
    gpu = GpuFacts(name="H100", memory_bytes=1, num_sms=1, capability=(9, 0))
    spec = SliceSpec(
        rank=0,
        world_size=2,
        gpus_per_node=8,
        argv=("t.py",),
        gpu=gpu,
        slice_dir="/x",
        real_ranks=(0, 1),
        store=address,
    )
    first = threading.Thread(target=physical.meet_at_end, args=(spec,))
    first.start()
    time.sleep(0.3)
    assert first.is_alive()
    physical.meet_at_end(spec)
    first.join(timeout=5)
    assert not first.is_alive()
    physical.meet_at_end(msgspec.structs.replace(spec, real_ranks=tuple(range(9))), timeout_s=0.1)
    del store


class FakePool:
    """Ends every slice at the second look, with a report and a large program."""

    def __init__(self, jobs, sink):
        self.running = []
        self.jobs = jobs

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def free(self):
        return self.jobs - len(self.running)

    def start(self, spec, *, stream):
        self.running.append(spec)

    def collect(self):
        ended, self.running = self.running, []
        pairs = []
        for spec in ended:
            directory = Path(spec.slice_dir)
            directory.mkdir(parents=True, exist_ok=True)
            report = SliceReport(rank=spec.rank, status="ok", num_ops=len(spec.journals))
            write_json(directory / "report.json", report)
            (directory / "program.npz").write_bytes(bytes(range(256)) * 40_000)
            (directory / "journals.txt").write_text("".join(Path(j).read_text() for j in spec.journals))
            pairs.append((spec, report))
        return pairs


@pytest.mark.parametrize("shared", [True, False])
def test_slices_run_on_the_other_ranks(tmp_path, monkeypatch, shared):
    monkeypatch.setattr(physical, "SlicePool", FakePool)
    if not shared:
        write = physical.write_bytes
        monkeypatch.setattr(
            physical, "write_bytes", lambda path, data: None if ".probe" in path.name else write(path, data)
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = Launch(rank=0, world=2, host="127.0.0.1", port=port)
    rundir = RunDir(tmp_path / "run")
    rundir.path.mkdir()
    journal = tmp_path / "journal.json"
    journal.write_text("the journal")
    results = []
    leadership = Leadership(launch, rundir)
    worker = threading.Thread(
        target=lambda: results.append(serve(Launch(rank=1, world=2, host="127.0.0.1", port=port), jobs=2))
    )
    worker.start()
    with leadership:
        (remote,) = leadership.workers
        assert remote.free() == 2
        gpu = GpuFacts(name="H100", memory_bytes=1, num_sms=1, capability=(9, 0))
        for rank in (4, 5):
            remote.start(
                SliceSpec(
                    rank=rank,
                    world_size=8,
                    gpus_per_node=8,
                    argv=("t.py",),
                    gpu=gpu,
                    slice_dir=str(rundir.slice(rank).path),
                    journals=(str(journal),),
                ),
                stream=False,
            )
        assert remote.free() == 0
        ended = []
        deadline = time.monotonic() + 60
        while len(ended) < 2:
            assert time.monotonic() < deadline
            ended += remote.collect()
            time.sleep(0.02)
    worker.join(timeout=60)
    assert results == [0]
    assert {spec.rank for spec, _ in ended} == {4, 5}
    for spec, report in ended:
        assert (report.status, report.rank, report.num_ops) == ("ok", spec.rank, 1)
        directory = rundir.slice(spec.rank)
        assert directory.program.read_bytes() == bytes(range(256)) * 40_000
        assert (directory.path / "journals.txt").read_text() == "the journal"
        assert rundir.read_report(spec.rank) == report
    assert not list(rundir.path.glob(".probe*"))


LONELY = """
import signal, sys
from prism_plugins import physical
from prism_plugins.errors import Interrupted
def stop(number, frame):
    raise Interrupted(number)
signal.signal(signal.SIGTERM, stop)
print("connecting", flush=True)
try:
    physical.connect(physical.Launch(rank=1, world=2, host="127.0.0.1", port=int(sys.argv[1])))
except Interrupted:
    print("interrupted")
"""


@pytest.fixture
def deaf_port():
    """A port that nobody listens to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_worker_without_a_leader_can_be_interrupted(deaf_port):
    child = subprocess.Popen(
        [sys.executable, "-c", LONELY, str(deaf_port)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "connecting\n"
    time.sleep(3.0)  # Into the constructor.
    child.terminate()
    assert child.communicate(timeout=30)[0] == "interrupted\n"


def test_a_store_that_nobody_serves_is_named(monkeypatch, deaf_port):
    monkeypatch.setattr(physical, "_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(PrismError, match=f"launch rank 1 cannot reach the store at 127.0.0.1:{deaf_port} "):
        physical.connect(Launch(rank=1, world=2, host="127.0.0.1", port=deaf_port))


def test_a_worker_that_does_not_come_is_named(monkeypatch, capsys):
    monkeypatch.setattr(physical, "_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(physical, "_PATIENCE_S", 0.1)
    store, _ = physical.serve_store()
    with pytest.raises(PrismError, match="launch rank 1 did not start within 1 s; RANK and WORLD_SIZE say"):
        physical.RemoteWorker(store, 1)
    assert capsys.readouterr().err.count("waiting for launch rank 1") == 1
