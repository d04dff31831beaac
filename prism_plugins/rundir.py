"""The run directory: where every artefact lies, atomic writes, and readers that say what is wrong with a file."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prism_plugins import __version__
from prism_plugins.costs.cluster import Cluster
from prism_plugins.errors import FileFormatError, Interrupted, PrismError
from prism_plugins.files import put_in_place, read_regular
from prism_plugins.options import Job
from prism_plugins.program.model import SCHEMA
from prism_plugins.program.slices import JobFacts, SliceReport

T = TypeVar("T")
_MAX_JSON_BYTES = 1 << 30


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: what was run, and what there is to read."""

    schema: int = SCHEMA
    prism_version: str = __version__
    started: str = ""
    """ISO 8601, local time with offset."""
    status: str = "running"
    """``running``, ``ok``, ``failed`` or ``interrupted``."""
    job: Job
    cluster: Cluster | None = None
    """As it was described when the run was made; its file may have changed since."""
    nccl_variables: dict[str, str] = {}
    """The variables of the launch that change what collectives cost."""
    launch_world: int = 1
    """Physical ranks of the launch."""
    facts: JobFacts | None = None
    slices: tuple[int, ...] = ()
    """Ranks whose programs inference may use (audited ranks are not among them)."""
    audited: tuple[int, ...] = ()
    versions: dict[str, str] = {}


class SliceDir:
    """Paths of one slice's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.facts = path / "facts.json"
        self.report = path / "report.json"
        self.program = path / "program.npz"
        self.journal = path / "journal.json"
        self.log = path / "log.txt"
        self.manifest = path / "manifest.json"
        self.measured = path / "measured.json"
        self.plan = path / "plan.json"
        self.replay = path / "replay.json"


class RunDir:
    """Paths of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.run = self.path / "run.json"
        self.slices = self.path / "slices"
        self.derived = self.path / "derived.npz"
        self.replays = self.path / "replay"
        self.prediction = self.path / "prediction.json"
        self.predicted_log = self.path / "predicted.log"
        self.kineto = self.path / "kineto"
        self.trace = self.path / "trace.pftrace"
        self.chakra = self.path / "chakra"
        self.memory = self.path / "memory"
        self.tensorboard = self.path / "tensorboard"
        self.what_if = self.path / "what-if"
        self.report = self.path / "report.html"

    def slice(self, rank: int) -> SliceDir:
        """Where one rank's slice lies."""
        return SliceDir(self.slices / str(rank))

    def replay(self, rank: int) -> SliceDir:
        """Where the replay of a rank lies."""
        return SliceDir(self.replays / str(rank))

    def kineto_trace(self, rank: int) -> Path:
        """The Kineto-style trace of one rank."""
        return self.kineto / f"rank{rank}.json.gz"

    def clear(self) -> None:
        """Remove what an earlier run left, so that nothing old is taken for new."""
        for file in (
            self.run,
            self.derived,
            self.prediction,
            self.predicted_log,
            self.report,
            self.trace,
            *self.kineto.glob("rank*.json.gz"),
            *self.chakra.glob("rank*.et"),
            *self.memory.glob("rank*.pickle"),
            *self.tensorboard.glob("events.out.tfevents.*"),
        ):
            file.unlink(missing_ok=True)
        for folder in (self.slices, self.replays, self.what_if):
            if folder.exists():
                shutil.rmtree(folder)

    def read_info(self) -> RunInfo:
        """run.json; raises :class:`FileFormatError` or, where there is none, :class:`PrismError`."""
        if not self.run.exists():
            raise PrismError(f"{self.path} is not a run directory (it has no run.json)")
        return read_json(self.run, RunInfo)

    def read_report(self, rank: int) -> SliceReport:
        """The report of one slice."""
        return read_json(self.slice(rank).report, SliceReport)

    def write_info(self, info: RunInfo) -> None:
        """Write run.json."""
        write_json(self.run, info)

    @contextlib.contextmanager
    def recording(
        self, job: Job, *, cluster: Cluster, launch_world: int, nccl_variables: dict[str, str] | None = None
    ) -> Iterator[Callable[..., None]]:
        """Keep run.json up to date while the run goes on; yields a function that changes fields of it."""
        info = RunInfo(
            job=job,
            cluster=cluster,
            nccl_variables=nccl_variables or {},
            launch_world=launch_world,
            started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            versions=_versions(),
        )
        self.write_info(info)

        def record(**fields: Any) -> None:
            nonlocal info
            info = msgspec.structs.replace(info, **fields)
            self.write_info(info)

        try:
            yield record
        except BaseException as error:
            with contextlib.suppress(PrismError):
                record(status="interrupted" if isinstance(error, Interrupted) else "failed")
            raise
        record(status="ok")


def create(job: Job, *, now: datetime.datetime | None = None) -> RunDir:
    """Make the run directory, or take over one of an earlier run.

    Raises:
        PrismError: the place cannot be written, or holds something that is not a run directory.
    """
    try:
        os.getcwd().encode()
    except FileNotFoundError:
        raise PrismError("the working directory does not exist any more; change to one that does") from None
    except UnicodeEncodeError:
        raise PrismError(f"the path {os.getcwdb()!r} is not UTF-8; work in another directory") from None
    if job.options.out:
        path = Path(job.options.out)
    else:
        stamp = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
        stem = Path(job.argv[0]).stem if job.run_as == "script" else job.argv[0]
        path = _new_directory(Path("prism_out") / f"{stamp}-{stem}")
    with writing(path):
        rundir = RunDir(path.absolute())
        if path.exists():
            if not path.is_dir():
                raise PrismError(f"--prism-out {path} is a file; name a directory")
            if _holds_anything(path) and not rundir.run.exists():
                raise PrismError(
                    f"--prism-out {path} is not empty and not a run directory (no run.json); nothing was written"
                )
            if rundir.run.exists():
                rundir.read_info()
        path.mkdir(parents=True, exist_ok=True)
        _claim(rundir)
        rundir.clear()
        rundir.slices.mkdir(exist_ok=True)
        # Only a real write tells: root passes permission checks on a read-only file system's directories.
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"prism")
    return rundir


def _new_directory(base: Path) -> Path:
    """Make ``base``, or ``base-2``, … where another run of the same second took it."""
    path, n = base, 1
    with writing(base):
        base.parent.mkdir(exist_ok=True)
        while True:
            try:
                path.mkdir()
            except FileExistsError:
                n += 1
                path = base.with_name(f"{base.name}-{n}")
            else:
                return path


def _holds_anything(path: Path) -> bool:
    """Whether there is more than the empty folder of a run that was killed, or met a full disk, as it began."""
    return any(
        entry.name != "slices" or not entry.is_dir() or any(entry.iterdir()) for entry in path.iterdir()
    )


def _claim(rundir: RunDir) -> None:
    """Keep other runs out of the directory as long as the object lives."""
    descriptor = os.open(rundir.path, os.O_RDONLY)
    weakref.finalize(rundir, os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PrismError(
            f"another run writes to {rundir.path} right now; wait for it or choose another --prism-out"
        ) from None
    except OSError:
        return  # A file system without locks.


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn an operating system's refusal to write into one line for the user."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: "; free some space or choose another --prism-out",
            errno.EROFS: "; choose another --prism-out",
            errno.EACCES: "; choose another --prism-out",
            errno.EPERM: "; choose another --prism-out",
            errno.EDQUOT: "; the quota is used up",
        }.get(error.errno or 0, "")
        raise PrismError(f"cannot write {path}: {error.strerror or error}{hint}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a temporary name and rename, so that a reader never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(data)
            put_in_place(temporary, path)
        except BaseException:  # Also Ctrl-C.
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write a struct as readable JSON, atomically."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "deepspeed", "transformer-engine", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


class _Versioned(msgspec.Struct):
    schema: int


def read_json(path: Path, kind: type[T], *, versioned: bool = True) -> T:
    """Read a struct, checking the schema number first.

    Raises:
        FileFormatError: missing, not a regular file, truncated, foreign, or written by a newer version.
    """
    data = read_regular(path, max_bytes=_MAX_JSON_BYTES)
    try:
        if versioned:
            schema = msgspec.json.decode(data, type=_Versioned).schema
            if schema > SCHEMA:
                raise FileFormatError(
                    f"{path} was written by a newer version of prism (schema {schema}, this one reads up to "
                    f"{SCHEMA}); upgrade prism-plugins"
                )
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{path} is not what it should be ({kind.__name__}): {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path} is truncated or not JSON: {error}") from None
