"""Small jobs run twice: for real with a process per rank, watched by truth_logger.py, and emulated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e.megatron_jobs import CORE_SCRIPT, CORE_SIZES
from tests.e2e.truth_compare import STEPS, RankResult, Witnessed, check_computed, compare, read_log
from tests.e2e.truth_logger_deepspeed import INSTRUCTIONS

_SIZES = f"{CORE_SIZES} --num-layers 4 --global-batch-size 8"
_HERE = Path(__file__).parent
_DEEPSPEED = _HERE / "deepspeed_scripts"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Ranks are in the order tp, dp, pp, as Megatron's default."""

    script: Path = CORE_SCRIPT
    arguments: str
    config: dict | None = None
    """Of DeepSpeed: written to a file and given as ``--deepspeed_config``."""
    world_size: int = 8
    iterations: int = 3
    tp: int = 1
    pp: int = 1
    vocab_size: int = 256
    shared_weights: bool = True
    """Data-parallel ranks hold the same parameters."""
    steps: frozenset[str] = STEPS
    """Steps that both the logger and the programs tell; only calls are compared where it is empty."""

    min_calls: int = 10
    """A rank that makes fewer in an iteration was not watched properly."""
    min_steps: int = 5

    @property
    def may_slice_all(self) -> bool:
        """Each of the few data-parallel ranks is of a kind of its own: it owns other parameter fragments."""
        return self.config is not None and self.config["zero_optimization"]["stage"] in (1, 2)

    @property
    def command(self) -> list[str]:
        """The script and its arguments, without a configuration."""
        sizes = _SIZES.split() if self.script is CORE_SCRIPT else []
        return [str(self.script), *sizes, *self.arguments.split()]


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


_ZERO_STEPS = frozenset(["forward", "backward", "optimizer"])
_SCRIPTS = _HERE.parents[1] / "scripts" / "deepspeed"
_PIPELINE = _SCRIPTS / "train_gpt_pipeline.py"
_SMALL = "--layers 2 --hidden 64 --heads 4 --seq 32 --vocab 256"
_PIPELINE_SIZES = "--layers 4 --hidden 64 --heads 4 --seq 32 --vocab 256"


def _deepspeed(
    script: str | Path, arguments: str = "", *, zero: dict, world_size: int = 4, **rest: Any
) -> Case:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": rest.pop("accumulate", 2),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        **rest.pop("config", {}),
    }
    return Case(
        script=_DEEPSPEED / script,
        arguments=arguments,
        config=config,
        world_size=world_size,
        iterations=4,
        **rest,
    )


def _pipeline(stages: int, arguments: str = "", **rest: Any) -> Case:
    return _deepspeed(
        _PIPELINE,
        f"{_PIPELINE_SIZES} --stages {stages} {arguments}",
        pp=stages,
        accumulate=2 * stages,
        steps=frozenset(INSTRUCTIONS.values()),
        **rest,
    )


DEEPSPEED_CASES = {
    "zero 0": _deepspeed("train.py", zero={"stage": 0}, steps=_ZERO_STEPS, min_calls=1),
    "zero 1": _deepspeed("train.py", zero={"stage": 1}, steps=_ZERO_STEPS, min_calls=4),
    "zero 2": _deepspeed(
        "train.py",
        zero={
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 20_000,
            "allgather_bucket_size": 20_000,
        },
        steps=_ZERO_STEPS,
    ),
    "zero 3": _deepspeed(
        "train.py",
        "--zero-init",
        zero={"stage": 3, "stage3_param_persistence_threshold": 100, "reduce_bucket_size": 20_000},
        steps=_ZERO_STEPS,
        shared_weights=False,
    ),
    "moe ep2": _deepspeed(
        _SCRIPTS / "train_moe.py",
        f"{_SMALL} --ep 2 --experts 4 --topk 2 --no-drop",
        zero={"stage": 1},
        steps=_ZERO_STEPS,
    ),
    "moe ep4 ep2 zero 2": _deepspeed(
        _SCRIPTS / "train_moe.py",
        f"{_SMALL} --layers 4 --ep 4 2 --experts 4 --residual --noise RSample",
        zero={"stage": 2, "reduce_bucket_size": 20_000},
        config={"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}},
        steps=_ZERO_STEPS,
    ),
    "ulysses sp2": _deepspeed(
        _SCRIPTS / "train_ulysses.py",
        f"{_SMALL} --sp 2",
        zero={"stage": 3, "stage3_param_persistence_threshold": 100},
        config={"sequence_parallel_size": 2},
        accumulate=1,
        min_steps=3,
        steps=_ZERO_STEPS,
        shared_weights=False,
    ),
    "autotp 2": _deepspeed(
        _SCRIPTS / "train_llama.py",
        _SMALL,
        zero={"stage": 1},
        config={"tensor_parallel": {"autotp_size": 2}},
        tp=2,
        steps=_ZERO_STEPS,
    ),
    "ds pp2 dp2": _pipeline(2, zero={"stage": 0}),
    "ds pp2 dp2 zero 1": _pipeline(2, "--tied", zero={"stage": 1}),
    "ds pp2 tp2 dp2": _pipeline(2, "--tensor-parallel 2", zero={"stage": 1}, tp=2, world_size=8),
    "ds pp4 dp2": _pipeline(4, "--tied --with-mask", zero={"stage": 0}, world_size=8),
    "ds pp4 dp2 zero 1": _pipeline(4, "--checkpoint-interval 1", zero={"stage": 1}, world_size=8),
}
"""DeepSpeed's engines. Data is of the script's own making, another one for every data-parallel rank."""


def run_for_real(case: Case, folder: Path) -> Path:
    """Run all ranks as processes that really compute and communicate, watched; returns the run directory."""
    site, logs = folder / "site", folder / "truth"
    for directory in (site, logs):
        directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(_HERE / "truth_logger.py", site / "sitecustomize.py")
    shutil.copy(_HERE / "truth_logger_deepspeed.py", site)
    _launch(
        case,
        folder / "real",
        "--prism-device cpu --prism-ranks all",
        num_processes=case.world_size,
        # Compiled regions compute the same op by op, without eight processes planning them.
        env={"PYTHONPATH": str(site), "TRUTH_LOG": str(logs), "TORCHDYNAMO_DISABLE": "1"},
    )
    return folder / "real"


def read_logs(case: Case, folder: Path) -> dict[int, list[Witnessed]]:
    """What each rank did in each iteration of :func:`run_for_real`."""
    return {rank: read_log(folder / "truth" / f"rank{rank}.jsonl") for rank in range(case.world_size)}


def check_real(case: Case, witnessed: dict[int, list[Witnessed]]) -> None:
    """The real run really computed."""
    check_computed(
        witnessed,
        tp=case.tp,
        pp=case.pp,
        vocab_size=case.vocab_size,
        shared_weights=case.shared_weights,
    )


def compare_with(case: Case, rundir: Path, witnessed: dict[int, list[Witnessed]]) -> list[RankResult]:
    """Compare every rank's last iteration with its program in a run directory."""
    return compare(rundir, witnessed, case.steps)


def emulate(case: Case, folder: Path) -> Path:
    """Emulate the same job with one process; returns the run directory."""
    _launch(case, folder / "emulated", "--prism-device virtual --prism-no-cache", num_processes=1, env={})
    return folder / "emulated"


def _launch(case: Case, out: Path, flags: str, *, num_processes: int, env: dict[str, str]) -> None:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PRISM_", "TORCHELASTIC_", "TRUTH_"))}
    script = case.command
    if case.config is not None:
        config = out.parent / "ds_config.json"
        config.write_text(json.dumps(case.config))
        script += ["--deepspeed_config", str(config)]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            *script, "--prism-emulate", "--prism-world-size", str(case.world_size),
            "--prism-iterations", str(case.iterations), "--prism-out", str(out), *flags.split(),
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
