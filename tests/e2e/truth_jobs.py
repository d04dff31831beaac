"""Small GPT jobs run twice: for real with eight processes, watched by truth_logger.py, and emulated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.e2e.megatron_jobs import CORE_SCRIPT, CORE_SIZES
from tests.e2e.truth_compare import Witnessed, read_log

WORLD_SIZE = 8
ITERATIONS = 3
_SIZES = f"{CORE_SIZES} --num-layers 4 --global-batch-size 8"
_LOGGER = Path(__file__).with_name("truth_logger.py")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of eight ranks, whose ranks are in Megatron's default order: tp, dp, pp."""

    arguments: str
    tp: int
    pp: int


CASES = {
    "tp2 pp2 dp2": Case(
        tp=2, pp=2, arguments="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    ),
    "pp4 dp2": Case(tp=1, pp=4, arguments="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"),
    "pp2 vpp2 tp2 dp2": Case(
        tp=2,
        pp=2,
        arguments="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --virtual-pipeline-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "tp2 ep2 pp2": Case(
        tp=2,
        pp=2,
        arguments="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --expert-model-parallel-size 2 --num-experts 4",
    ),
}

DEEP_CASES = {
    "pp8": Case(
        tp=1,
        pp=8,
        arguments="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --num-layers 8"
        " --global-batch-size 16",
    ),
    "pp4 vpp2 tp2": Case(
        tp=2,
        pp=4,
        arguments="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
        " --virtual-pipeline-model-parallel-size 2 --num-layers 8",
    ),
}
"""With middle stages that no slice runs: their programs are derived from another stage's."""


def run_for_real(case: Case, folder: Path) -> Path:
    """Run all ranks as processes that really compute and communicate, watched; returns the run directory."""
    site, logs = folder / "site", folder / "truth"
    for directory in (site, logs):
        directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(_LOGGER, site / "sitecustomize.py")
    _launch(
        case,
        folder / "real",
        "--prism-device cpu --prism-ranks all",
        num_processes=WORLD_SIZE,
        # Compiled regions compute the same op by op, without eight processes planning them.
        env={"PYTHONPATH": str(site), "TRUTH_LOG": str(logs), "TORCHDYNAMO_DISABLE": "1"},
    )
    return folder / "real"


def read_logs(folder: Path) -> dict[int, list[Witnessed]]:
    """What each rank did in each iteration of :func:`run_for_real`."""
    return {rank: read_log(folder / "truth" / f"rank{rank}.jsonl") for rank in range(WORLD_SIZE)}


def emulate(case: Case, folder: Path) -> Path:
    """Emulate the same job with one process; returns the run directory."""
    _launch(case, folder / "emulated", "--prism-device virtual --prism-no-cache", num_processes=1, env={})
    return folder / "emulated"


def _launch(case: Case, out: Path, flags: str, *, num_processes: int, env: dict[str, str]) -> None:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PRISM_", "TORCHELASTIC_", "TRUTH_"))}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            str(CORE_SCRIPT), *_SIZES.split(), *case.arguments.split(),
            "--prism-emulate", "--prism-world-size", str(WORLD_SIZE),
            "--prism-iterations", str(ITERATIONS), "--prism-out", str(out), *flags.split(),
        ],
        env={**own, **env},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the launch failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
