"""Full emulations of layouts, each as an ordinary run in a child process with its own run directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prism_plugins.emit.prediction_json import read_prediction
from prism_plugins.errors import PrismError
from prism_plugins.group_guard import GroupGuard
from prism_plugins.options import TABLE, Job
from prism_plugins.program.prediction import Prediction
from prism_plugins.rundir import RunDir
from prism_plugins.tune.compose import Estimate, estimate_of_parts

_POLL_S = 0.2
_GRACE_S = 5.0


def emulation_command(job: Job, argv: Sequence[str], *, cluster: Path, out: Path) -> list[str]:
    """The command line of the emulation of one layout."""
    options = job.options
    flags = [
        f"--prism-world-size={options.world_size}",
        f"--prism-cluster={cluster}",
        f"--prism-device={options.device}",
        f"--prism-iterations={options.iterations}",
        f"--prism-moe-load={options.moe_load}",
        f"--prism-jobs={options.jobs}",
        f"--prism-out={out}",
    ]
    if options.calibration:
        flags.append(f"--prism-calibration={options.calibration}")
    if options.apex:
        flags.append("--prism-apex")
    if not options.cache:
        flags.append("--prism-no-cache")
    module = ["-m"] if job.run_as == "module" else []
    return [sys.executable, "-m", "prism_plugins.run", "--prism-emulate", *flags, *module, *argv]


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an emulation: the only process of its launch, options by its command line alone."""
    options = {option.env for option in TABLE}
    kept = {name: value for name, value in environ.items() if name not in options}
    return kept | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def finished_prediction(out: Path) -> Prediction | None:
    """The prediction of a run directory that came to its end, None otherwise."""
    with contextlib.suppress(PrismError):
        rundir = RunDir(out)
        if rundir.read_info().status == "ok":
            return read_prediction(rundir.prediction)
    return None


def emulate(
    job: Job, argv: Sequence[str], *, cluster: Path, out: Path, seconds: float
) -> Prediction | str | None:
    """The prediction of a layout; a text where the job fails; None when it took longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    known = finished_prediction(out)
    if known is not None:
        return known
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_name(f"{out.name}.log")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            emulation_command(job, argv, cluster=cluster, out=out),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=alone(os.environ),
            start_new_session=True,
        )
    guard = GroupGuard()
    guard.watch(process.pid)
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
    finally:
        _end(process)
        guard.forget(process.pid)
        guard.close()
    prediction = finished_prediction(out)
    if prediction is not None:
        return prediction
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("prism: error:")]
    return (told or lines or ["no output"])[-1].removeprefix("prism: error: ")


def _end(process: subprocess.Popen) -> None:
    """End the run and its slices, if they still go on; the run keeps the slices that had finished."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def hang_of(prediction: Prediction) -> str:
    """Why the job would hang; empty where it would not."""
    return next((f.message for f in prediction.findings if f.kind == "hang"), "")


def estimate_of(prediction: Prediction) -> Estimate:
    """An emulation in the terms of a composition."""
    memory = max(
        (m.peak_allocated_bytes + m.device_used_bytes - m.peak_reserved_bytes for m in prediction.memory),
        default=0,
    )
    return estimate_of_parts(prediction.iteration_time_ms, prediction.breakdown_ms, memory, source="emulated")
