"""Scripts as DeepSpeed's users write them, by DeepSpeed's launcher, torchrun and without one."""

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.launches import TORCHRUN

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).parents[2] / "scripts" / "deepspeed"
W64 = ("--prism-emulate", "--prism-world-size", "64")
LLAMA = "--layers 2 --hidden 64 --heads 2 --seq 32 --vocab 128 --steps 8"
TRAINER = (
    "--num_layers 2 --hidden_size 64 --intermediate_size 128 --num_heads 2 --vocab_size 128 --seq_length 32"
    " --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing true --bf16"
    " --max_steps 20 --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_steps 2 --save_total_limit 1"
    " --report_to tensorboard --output_dir out"
)
CONFIG = json.loads((SCRIPTS / "configs/zero2.json").read_text())


def configure(place, **changes):
    (place.path / "ds.json").write_text(json.dumps(CONFIG | changes))


def test_the_deepspeed_launcher_end_to_end(place):
    """ZeRO-2 with the flag on DeepSpeed's own launcher; the log at target scale; a misspelt key is found.

    Two ranks keep it cheap."""
    configure(place, gradient_acumulation_steps=4, log_level="info")
    done = place.run(
        SCRIPTS / "train_llama.py",
        *LLAMA.split(),
        *("--deepspeed_config", "ds.json"),
        launcher=[str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "1"],
        flags=("--prism-emulate", "--prism-world-size", "2"),
    )
    prediction = place.prediction()
    assert (prediction["framework"], prediction["layout"]["dp"]) == ("deepspeed", 2)
    assert "--local_rank=0" in done.stdout, (
        "the launcher passes it, and DeepSpeed compares it with LOCAL_RANK"
    )
    assert place.slices() == [0, 1]
    found = {(f["kind"], f["severity"]): f["message"] for f in prediction["findings"]}
    assert "did you mean 'gradient_accumulation_steps'?" in found["config", "warning"]
    assert "fit into one bucket" in found["overlap", "warning"]

    log = (place.out / "predicted.log").read_text()
    timers = prediction["timers_ms"]
    assert f"fwd_microstep: {timers['fwd_microstep'][0]:.2f} | " in log
    assert f"| step: {timers['step'][0]:.2f}" in log
    rate = 2 / prediction["iteration_time_ms"] * 1e3
    assert f"CurrSamplesPerSec={rate:.3f}" in log
    spent = sum(timers["fwd"]) + sum(timers["bwd"]) + sum(timers["step"])
    assert 0.5 * prediction["iteration_time_ms"] < spent <= prediction["iteration_time_ms"]


def test_trainer_evaluates_and_saves_in_between(place):
    """Hugging Face's Trainer fills in what is "auto"; it must neither write a checkpoint nor delete one."""
    old = place.path / "out" / "checkpoint-1"
    old.mkdir(parents=True)
    (old / "precious").write_text("")
    place.out = place.path / "run"
    place.run(
        SCRIPTS / "train_trainer.py",
        *("--deepspeed", SCRIPTS / "configs/zero3_auto.json"),
        *TRAINER.split(),
        launcher=[*TORCHRUN, "1"],
        flags=W64,
    )
    prediction = place.prediction()
    assert prediction["num_microbatches"] == 2
    assert [f["kind"] for f in prediction["findings"] if f["kind"] == "unsteady"] == []
    assert [p.name for p in (place.path / "out").rglob("*")] == ["checkpoint-1", "precious"]
    text = "\n".join(prediction["assumptions"])
    assert "checkpoints are not written" in text
    assert "nothing is written to TensorBoard" in text
    log = (place.out / "predicted.log").read_text()
    assert "{'loss': '" in log
    assert "*', 'grad_norm': '" in log
    assert "'eval_runtime': 'not predicted'" in log


def test_batch_sizes_that_do_not_fit_the_world(place):
    """Without a launcher: DeepSpeed must not look for MPI."""
    configure(place, train_batch_size=100)
    done = place.run(
        SCRIPTS / "train_llama.py", *LLAMA.split(), "--deepspeed_config", "ds.json", flags=W64, check=False
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("prism: error")]
    assert errors == [
        "prism: error: the batch sizes do not fit (train_batch_size 100, train_micro_batch_size_per_gpu 1, "
        "gradient_accumulation_steps 1): a step takes micro-batch 1 x accumulation 1 x 64 data-parallel ranks = 64; "
        "set train_batch_size to 64"
    ]


def test_a_script_that_never_initializes_deepspeed(place):
    (place.path / "no.py").write_text("import deepspeed\ndeepspeed.init_distributed()\nprint('bye')\n")
    done = place.run("no.py", flags=W64, check=False)
    assert done.returncode == 1
    assert "deepspeed was imported, but deepspeed.initialize not called; its output: " in done.stderr


def test_a_local_rank_that_contradicts_the_launcher(place):
    done = place.run("train.py", "--local_rank", "3", launcher=[*TORCHRUN, "1"], flags=W64, check=False)
    assert done.returncode != 0
    assert (
        "--local_rank 3 on the command line contradicts the launcher, which set LOCAL_RANK=0" in done.stderr
    )
    assert not place.out.exists()
