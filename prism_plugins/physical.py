"""Several physical ranks: ``torchrun --nproc-per-node N`` starts N conductors. Launch rank 0 leads, the others run
slices for it. They talk through the launcher's own store; results lie in the run directory, or travel through the
store where the file system is not shared.

Keys, all under ``prism/``: ``begin`` (from the leader: where the run directory is), ``hello/<worker>`` (what it
can), ``task/<worker>/<n>``, ``done/<worker>/<n>``, ``file/<worker>/<n>/<name>/<chunk>``, ``stop``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.errors import PrismError, SliceFailed
from prism_plugins.options import Options
from prism_plugins.program.slices import SliceReport, SliceSpec
from prism_plugins.progress import Progress
from prism_plugins.rundir import RunDir, SliceDir, write_bytes
from prism_plugins.slice_pool import SlicePool

_POLL_S = 0.05
_CHUNK_BYTES = 4 * 2**20
_TIMEOUT = timedelta(seconds=300)
_PATIENCE_S = 15.0
"""Launched processes start within seconds of each other; after this the user is told who is missing."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The physical launch as its environment describes it."""

    rank: int = 0
    world: int = 1
    local_world: int = 1
    host: str = ""
    port: int = 0
    agent_store: bool = False
    """The launcher's agent already serves the store."""

    @property
    def leads(self) -> bool:
        """Whether this process conducts the run."""
        return self.rank == 0


def launch_from_environment(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch this process is part of; a single process without RANK and WORLD_SIZE."""
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        port = int(environ.get("MASTER_PORT", "0"))
        local_world = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or 1)
    except (KeyError, ValueError):
        return Launch()
    host = environ.get("MASTER_ADDR", "")
    if world <= 1 or not host or not port:
        return Launch()
    return Launch(
        rank=rank,
        world=world,
        local_world=local_world,
        host=host,
        port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


_TASK_VARIABLES = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def led_elsewhere(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this process has nothing to do, in one line: a scheduler (srun, mpirun) started it beside others without
    RANK and WORLD_SIZE, so it cannot find them, and the first one emulates the whole job. None for any other."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return None
    for rank, size in _TASK_VARIABLES:
        task = environ.get(rank, "")
        if task.isdecimal() and int(task) > 0:
            return f"task {task} of {environ.get(size, 'several')} ({rank}) leaves the emulation to task 0"
    return None


def runs_for_real(options: Options, launch: Launch) -> bool:
    """Every rank of the target world has a physical rank and is of interest: nothing is virtual but the GPU."""
    return launch.world == options.world_size > 1 and options.all_ranks


class _Begin(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: str
    token: str


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    jobs: int
    shared: bool
    """Sees the leader's run directory."""


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    spec: SliceSpec
    stream: bool
    journals: dict[str, str] = {}
    """Contents by path, where the file system is not shared."""


class _Done(msgspec.Struct, frozen=True, kw_only=True):
    report: SliceReport
    files: dict[str, int] = {}
    """Name → number of chunks."""


def connect(launch: Launch) -> Any:
    """The launcher's store (a torch TCPStore): its agent's, or one that launch rank 0 serves.

    Raises:
        PrismError: nobody serves it.
    """
    from torch.distributed import TCPStore

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def reach() -> None:
        try:
            store = TCPStore(
                launch.host,
                launch.port,
                is_master=launch.leads and not launch.agent_store,
                timeout=_TIMEOUT,
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            ended.put(error)
        else:
            ended.put(store)

    # In a thread: the constructor waits in C++, where no signal (Ctrl-C) would be seen for minutes.
    threading.Thread(target=reach, daemon=True).start()
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    found: Any = TimeoutError("timed out")
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            found = ended.get(timeout=_POLL_S)
            break
    if isinstance(found, Exception):
        reason = str(found).partition("\n")[0]
        raise PrismError(
            f"launch rank {launch.rank} cannot reach the store at {launch.host}:{launch.port} ({reason}); it takes part "
            f"in a launch of {launch.world} processes because RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say so"
        )
    return found


def serve_store() -> tuple[Any, str]:
    """A store for slices that really communicate, and its address. Lives as long as the object."""
    from torch.distributed import TCPStore

    host = socket.gethostname()
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    store = TCPStore("0.0.0.0", 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def meet_at_end(spec: SliceSpec, *, timeout_s: float = 60.0) -> None:
    """Wait in a slice that runs for real until all others came to their end too: a process that leaves early can
    take messages with it that its peers have not read."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed's is a virtual one in a slice.

    host, _, port = spec.store.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    ended = store.add("prism/ended", 1)
    deadline = time.monotonic() + timeout_s
    while ended < len(spec.real_ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        ended = store.add("prism/ended", 0)


class RemoteWorker:
    """Leader's side of one other physical rank: an executor of slices."""

    def __init__(self, store: Any, worker: int) -> None:
        self._store = store
        self._worker = worker
        # Asked for again and again: a get would wait in C++, where no signal is seen.
        began = time.monotonic()
        told = False
        while not store.check([f"prism/hello/{worker}"]):
            waited = time.monotonic() - began
            if waited > _TIMEOUT.total_seconds():
                raise PrismError(
                    f"launch rank {worker} did not start within {_TIMEOUT.total_seconds():.0f} s; RANK and WORLD_SIZE "
                    "say that it takes part: unset them if this process was started alone"
                )
            if waited > _PATIENCE_S and not told:
                told = True
                print(
                    f"prism: waiting for launch rank {worker}: WORLD_SIZE announces further processes; unset RANK and "
                    "WORLD_SIZE if this one was started alone",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_POLL_S)
        self._hello = msgspec.json.decode(store.get(f"prism/hello/{worker}"), type=_Hello)
        self._sent = 0
        self._open: dict[int, SliceSpec] = {}

    def free(self) -> int:
        """How many more slices it takes now."""
        return self._hello.jobs - len(self._open)

    def start(self, spec: SliceSpec, *, stream: bool) -> None:
        """Send a slice."""
        journals = {} if self._hello.shared else {path: Path(path).read_text() for path in spec.journals}
        task = _Task(spec=spec, stream=stream, journals=journals)
        self._store.set(f"prism/task/{self._worker}/{self._sent}", msgspec.json.encode(task))
        self._open[self._sent] = spec
        self._sent += 1

    def collect(self) -> list[tuple[SliceSpec, SliceReport]]:
        """Slices that came back."""
        ended = []
        for n, spec in list(self._open.items()):
            key = f"prism/done/{self._worker}/{n}"
            if self._store.check([key]):
                done = msgspec.json.decode(self._store.get(key), type=_Done)
                for name, chunks in done.files.items():
                    keys = [f"prism/file/{self._worker}/{n}/{name}/{i}" for i in range(chunks)]
                    Path(spec.slice_dir).mkdir(parents=True, exist_ok=True)
                    write_bytes(Path(spec.slice_dir) / name, b"".join(self._store.get(k) for k in keys))
                    for k in keys:
                        self._store.delete_key(k)
                del self._open[n]
                ended.append((spec, done.report))
        return ended


class Leadership:
    """Leader's side of the launch, as a context manager: announces the run, gives the workers, sends them home."""

    def __init__(self, launch: Launch, rundir: RunDir) -> None:
        self._store = connect(launch)
        self._world = launch.world
        self._rundir = rundir
        self.workers: list[RemoteWorker] = []

    def __enter__(self) -> Leadership:
        token = os.urandom(8).hex()
        probe = self._rundir.path / f".probe-{token}"
        write_bytes(probe, token.encode())
        begin = _Begin(run_dir=str(self._rundir.path), token=token)
        self._store.set("prism/begin", msgspec.json.encode(begin))
        self.workers = [RemoteWorker(self._store, worker) for worker in range(1, self._world)]
        probe.unlink(missing_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every worker end."""
        self._store.set("prism/stop", b"1")
        # A store that this process serves must outlive the workers' last look at it.
        deadline = time.monotonic() + 5.0
        for worker in range(1, self._world):
            while time.monotonic() < deadline and not self._store.check([f"prism/bye/{worker}"]):
                time.sleep(_POLL_S)


def serve(launch: Launch, *, jobs: int) -> int:
    """Worker's side: run the slices the leader sends until it says stop. Returns the exit status."""
    store = connect(launch)
    if not _wait(store, "prism/begin"):
        store.set(f"prism/bye/{launch.rank}", b"1")
        return 0
    begin = msgspec.json.decode(store.get("prism/begin"), type=_Begin)
    probe = Path(begin.run_dir) / f".probe-{begin.token}"
    shared = probe.exists() and probe.read_text() == begin.token
    store.set(f"prism/hello/{launch.rank}", msgspec.json.encode(_Hello(jobs=jobs, shared=shared)))
    scratch = None if shared else Path(tempfile.mkdtemp(prefix="prism-"))
    numbers: dict[int, int] = {}
    received = 0
    with Progress(quiet=True) as progress, SlicePool(jobs, progress.line) as pool:
        try:
            while not store.check(["prism/stop"]):
                key = f"prism/task/{launch.rank}/{received}"
                if pool.free() > 0 and store.check([key]):
                    task = msgspec.json.decode(store.get(key), type=_Task)
                    spec = task.spec if scratch is None else _relocated(task, scratch)
                    numbers[spec.rank] = received
                    received += 1
                    pool.start(spec, stream=task.stream)
                for spec, report in pool.collect():
                    n = numbers.pop(spec.rank)
                    files = (
                        {}
                        if scratch is None
                        else _upload(store, launch.rank, n, SliceDir(Path(spec.slice_dir)))
                    )
                    done = _Done(report=report, files=files)
                    store.set(f"prism/done/{launch.rank}/{n}", msgspec.json.encode(done))
                time.sleep(_POLL_S)
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
    store.set(f"prism/bye/{launch.rank}", b"1")
    return 0


def _wait(store: Any, key: str) -> bool:
    """Wait for a key; False when the leader stopped before."""
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while not store.check([key]):
        if store.check(["prism/stop"]):
            return False
        if time.monotonic() > deadline:
            raise SliceFailed(
                f"prism: error: launch rank 0 did not start within {_TIMEOUT.total_seconds():.0f} s"
            )
        time.sleep(_POLL_S)
    return True


def _relocated(task: _Task, scratch: Path) -> SliceSpec:
    """The spec with local paths; journals are written there."""
    paths = []
    for i, content in enumerate(task.journals.values()):
        path = scratch / f"journal-{task.spec.rank}-{i}.json"
        write_bytes(path, content.encode())
        paths.append(str(path))
    return msgspec.structs.replace(
        task.spec, slice_dir=str(scratch / "slices" / str(task.spec.rank)), journals=tuple(paths)
    )


def _upload(store: Any, worker: int, n: int, directory: SliceDir) -> dict[str, int]:
    """Send a slice's files through the store in chunks; returns name → number of chunks."""
    files = {}
    for file in sorted(directory.path.iterdir()):
        if file == directory.spec:
            continue
        data = file.read_bytes()
        chunks = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
        for i, chunk in enumerate(chunks):
            store.set(f"prism/file/{worker}/{n}/{file.name}/{i}", chunk)
        files[file.name] = len(chunks)
    return files
