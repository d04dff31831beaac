"""Experts, sequence and tensor parallelism of DeepSpeed in a slice."""

import json
from collections import Counter
from pathlib import Path

import pytest

from prism_plugins.integrations.deepspeed.autotp import SAME_BATCH
from prism_plugins.moe_load import expert_counts
from prism_plugins.program.model import EventKind
from tests.e2e.megatron_jobs import SliceResult, run_slice

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).parents[2] / "scripts" / "deepspeed"
EXPERT_LIST = Path(__file__).parent / "deepspeed_scripts" / "train_expert_list.py"
SIZES = "--layers 2 --hidden 64 --heads 4 --seq 64 --vocab 256"


def run(folder: Path, script: Path, arguments: str = "", *, config: dict, **options) -> SliceResult:
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
    } | config
    (folder / "ds.json").write_text(json.dumps(whole))
    words = f"{arguments} --deepspeed_config {folder / 'ds.json'}"
    return run_slice(folder, script, words, **{"rank": 0, "world_size": 64} | options)


def calls(result: SliceResult) -> Counter:
    """(kind, size of the group, elements sent) of the collectives of the recorded iteration."""
    program = result.program
    comms = [program.comms[e["ref"]] for e in program.events if e["kind"] == EventKind.COMM]
    return Counter((c.kind, len(program.groups[c.group].ranks), c.in_numel) for c in comms)


def test_capacity_without_dropping_follows_the_busiest_expert(tmp_path):
    result = run(
        tmp_path,
        SCRIPTS / "train_moe.py",
        f"{SIZES} --ep 8 --experts 16 --topk 2 --no-drop",
        config={"zero_optimization": {"stage": 1}},
        moe_load="zipf:1",
    )
    assert result.report.status == "ok", result.output
    layout = result.facts.layout
    assert (layout.ep, layout.dp) == (8, 64)
    capacity = int(expert_counts("zipf:1", 2 * 64, 16, 2).max())
    # There and back, in the forward and in the backward pass.
    assert calls(result)["all_to_all", 8, 16 * capacity * 64] == 4
    assert any("Zipf's law, exponent 1" in line for line in result.report.assumptions)
    assert result.facts.tokens_per_iteration == 2 * 64 * 64
    assert result.facts.model_flops_per_iteration > 0


def test_a_histogram_of_another_model_is_one_line(tmp_path):
    result = run(
        tmp_path,
        SCRIPTS / "train_moe.py",
        f"{SIZES} --experts 16",
        config={"zero_optimization": {"stage": 1}},
        moe_load="tokens:1,2,3",
    )
    assert result.report.status == "user_error"
    assert result.report.message == (
        "--prism-moe-load: the histogram has 3 experts, a layer of the model has 16"
    )


def test_experts_gathered_as_tokens_come_are_found_before_they_hang(tmp_path):
    result = run(tmp_path, EXPERT_LIST, config={"zero_optimization": {"stage": 3}})
    assert result.report.status == "ok", result.output
    (finding,) = result.report.findings
    assert (finding.kind, finding.severity) == ("hang", "error")
    assert "blocks.0 (SparseMoeBlock)" in finding.message


@pytest.mark.slow
def test_deepspeeds_layers_under_zero3_are_refused_in_one_line(tmp_path):
    result = run(
        tmp_path, SCRIPTS / "train_moe.py", SIZES, config={"zero_optimization": {"stage": 3}}, world_size=8
    )
    assert result.report.status == "user_error"
    assert "MoE is not supported with ZeRO Stage 3" in result.report.message


@pytest.mark.slow
def test_a_leaf_module_gathers_alike(tmp_path):
    result = run(tmp_path, EXPERT_LIST, "--leaf", config={"zero_optimization": {"stage": 3}})
    assert result.report.status == "ok", result.output
    assert result.report.findings == ()
    assert result.report.steady


def test_sequence_parallel_ranks_share_a_sequence(tmp_path):
    result = run(
        tmp_path,
        SCRIPTS / "train_ulysses.py",
        f"{SIZES} --sp 4",
        config={"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4},
    )
    assert result.report.status == "ok", result.output
    assert (result.facts.layout.cp, result.facts.layout.dp) == (4, 16)
    # Queries, keys, values and the result of two layers, forward and backward.
    assert sum(n for (kind, size, _), n in calls(result).items() if (kind, size) == ("all_to_all", 4)) == 16
    assert result.facts.tokens_per_iteration == 2 * 64 * 16


@pytest.mark.slow
def test_a_tensor_parallel_peer_takes_its_batch_for_the_first_ones(tmp_path):
    pytest.importorskip("transformers")
    result = run(
        tmp_path,
        SCRIPTS / "train_llama.py",
        SIZES,
        config={"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}},
        rank=6,
    )
    assert result.report.status == "ok", result.output
    assert (result.facts.layout.tp, result.facts.layout.dp) == (4, 16)
    assert SAME_BATCH in result.report.assumptions
    assert result.facts.tokens_per_iteration == 2 * 64 * 16
