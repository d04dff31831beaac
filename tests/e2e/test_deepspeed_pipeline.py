"""A DeepSpeed pipeline of any size from a handful of slices."""

import json
from pathlib import Path

import pytest

from tests.e2e.launches import TORCHRUN

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[2] / "scripts" / "deepspeed" / "train_gpt_pipeline.py"
SIZES = "--layers 8 --hidden 64 --heads 4 --seq 32 --vocab 256"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
}


def told_by(place, ranks_per_stage):
    """Rank → (tensors it was told to receive, tensors it announced), of every slice."""
    told = {}
    for path in place.out.glob("slices/*/report.json"):
        report = json.loads(path.read_text())
        stage = report["facts"]["stages"][report["rank"] // ranks_per_stage]
        told[report["rank"]] = stage["receives"], stage["sends"]
    return told


def test_middle_stages_are_derived_and_evaluation_is_no_training(place):
    """PP4 x DP16, tied embedding, stages exchange (activations, mask), an evaluation after every second step."""
    pytest.importorskip("deepspeed")
    (place.path / "ds.json").write_text(json.dumps(CONFIG))
    place.run(
        SCRIPT,
        *SIZES.split(),
        *("--stages", 4, "--tied", "--with-mask", "--eval-every", 2, "--deepspeed_config", "ds.json"),
        launcher=[*TORCHRUN, "1"],
        flags=("--prism-emulate", "--prism-world-size", "64", "--prism-audit", "1"),
    )
    prediction = place.prediction()
    assert prediction["layout"] == {"tp": 1, "pp": 4, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 16}
    # Rank 1 beside rank 0, which reads the loss back to print it.
    assert place.info()["slices"] == [0, 1, 16, 63]
    (audited,) = prediction["audit"]["ranks"]
    assert audited // 16 == 2, "the derived stage is audited first"
    assert prediction["audit"]["matched"] == 1
    assert prediction["tflops_per_gpu"] > 0
    assert "no journal" not in str(prediction["assumptions"])
    told = told_by(place, 16)
    tensors = "float32[1x32x64], int64[1x32]"
    assert told[0] == told[1] == ("", tensors)
    assert told[16] == told[audited] == (tensors, tensors)
    assert told[63] == (tensors, "")
    reports = [json.loads(path.read_text()) for path in place.out.glob("slices/*/report.json")]
    assert all(r["steady"] for r in reports)


@pytest.mark.slow
def test_equal_layers_that_are_sent_other_shapes_are_sliced(place):
    """PP4 x DP2. The last stage, first told the shape that stage 1 sends, is sliced again behind stage 2."""
    pytest.importorskip("deepspeed")
    (place.path / "ds.json").write_text(json.dumps(CONFIG))
    done = place.run(
        Path(__file__).with_name("deepspeed_scripts") / "train_shapes.py",
        *("--deepspeed_config", "ds.json"),
        launcher=[*TORCHRUN, "1"],
    )
    assert done.stderr.count("slice rank 7 started") == 2
    told = told_by(place, 2)
    assert told[2] == ("float32[1x64x32]", "float32[1x32x32]")
    assert told[4] == ("float32[1x32x32]", "float32[1x16x32]")
    assert told[7] == ("float32[1x16x32]", "")
