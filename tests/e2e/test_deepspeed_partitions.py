"""ZeRO-2 with buckets that are reduced during the backward pass: the programs of ranks that were not sliced are exact."""

import json
from pathlib import Path

import pytest

from tests.e2e.launches import TORCHRUN

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).parents[2] / "scripts" / "deepspeed"
LLAMA = "--layers 2 --hidden 64 --heads 2 --seq 32 --vocab 128 --steps 8"


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["ZeRO-1 fp16", "ZeRO-2 accumulating"]
)
def test_ranks_that_own_other_partitions(place, stage):
    config = json.loads((SCRIPTS / f"configs/zero{stage}.json").read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 40_000
    if stage == 2:
        config["gradient_accumulation_steps"] = 2
    else:
        config |= {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
    (place.path / "ds.json").write_text(json.dumps(config))
    place.run(
        SCRIPTS / "train_llama.py",
        *LLAMA.split(),
        *("--deepspeed_config", "ds.json"),
        launcher=[*TORCHRUN, "1"],
        flags=("--prism-emulate", "--prism-world-size", "10", "--prism-audit", "2"),
    )
    audit = place.prediction()["audit"]
    assert (audit["matched"], len(audit["ranks"]), audit["approximated"]) == (2, 2, [])
    assert len(place.slices()) - 2 <= 4
