"""Slices of small Megatron jobs: what they do is what the dry-run schedule and the computed shards say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_plugins.program.model import EventKind
from prism_plugins.program.slices import OptimizerShard
from tests.e2e.megatron_jobs import (
    CORE_SCRIPT,
    CORE_SIZES,
    MEGATRON_LM,
    TRAINING_SIZES,
    SliceResult,
    run_slice,
)

pytestmark = pytest.mark.e2e

needs_megatron_lm = pytest.mark.skipif(
    not (MEGATRON_LM / "pretrain_gpt.py").exists(), reason="MEGATRON_LM names no Megatron-LM checkout"
)

CORE_CASES = {
    # name: (arguments, world size, rank, its stage)
    "dp": ("--num-layers 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1", 2, 1, 0),
    "tp": ("--num-layers 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1", 2, 1, 0),
    "pp-first": ("--num-layers 3 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 3", 3, 0, 0),
    "pp-middle": ("--num-layers 3 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 3", 3, 1, 1),
    "pp-last": ("--num-layers 3 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 3", 3, 2, 2),
    "vpp": (
        "--num-layers 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
        " --virtual-pipeline-model-parallel-size 2",
        2,
        1,
        1,
    ),
    "distributed-optimizer": (
        "--num-layers 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
        " --use-distributed-optimizer",
        4,
        2,
        1,
    ),
    "recompute": (
        "--num-layers 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --recompute",
        4,
        0,
        0,
    ),
}

TRAINING_CASES = {
    # name: (arguments, world size, rank, its stage)
    "sp": ("--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel", 2, 0, 0),
    "uneven": (
        "--num-layers 5 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1",
        3,
        1,
        1,
    ),
    "vpp-overlap": (
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
        " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        4,
        0,
        0,
    ),
    "experts": (
        "--num-layers 2 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
        " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss"
        " --moe-aux-loss-coeff 1e-2 --use-distributed-optimizer",
        2,
        0,
        0,
    ),
    "experts-allgather": (
        "--num-layers 2 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
        " --moe-token-dispatcher-type allgather --moe-router-load-balancing-type aux_loss",
        2,
        0,
        0,
    ),
}


def assert_phases_follow_the_schedule(result: SliceResult, stage: int) -> None:
    """Everything the scheduler did, in its order; then the optimizer."""
    phases = result.phases()
    optimizer = [i for i, phase in enumerate(phases) if phase.kind == "optimizer"]
    assert optimizer == [len(phases) - 1]
    assert phases[:-1] == result.facts.stages[stage].schedule


def assert_ran(result: SliceResult) -> None:
    assert result.report.status == "ok", f"{result.report.message}\n{result.output}"
    assert result.report.steady
    assert result.report.num_ops > 0
    tagged = {allocation.category for allocation in result.program.initial}
    assert {"parameters", "gradients", "optimizer_state"} <= tagged


@pytest.mark.parametrize("name", CORE_CASES)
def test_plain_core_script(tmp_path: Path, name: str):
    arguments, world_size, rank, stage = CORE_CASES[name]
    result = run_slice(
        tmp_path,
        CORE_SCRIPT,
        f"{CORE_SIZES} {arguments} --global-batch-size 8",
        rank=rank,
        world_size=world_size,
    )
    assert_ran(result)
    assert_phases_follow_the_schedule(result, stage)
    if rank == world_size - 1:
        assert all("elapsed time per iteration" in line for line in result.report.log_lines)
        assert len(result.report.log_lines) >= len(result.report.iteration_hashes)


@needs_megatron_lm
@pytest.mark.parametrize("name", TRAINING_CASES)
def test_unmodified_pretrain_gpt(tmp_path: Path, name: str):
    arguments, world_size, rank, stage = TRAINING_CASES[name]
    script, arguments = MEGATRON_LM / "pretrain_gpt.py", f"{TRAINING_SIZES} {arguments} --global-batch-size 8"
    journals: tuple[Path, ...] = ()
    if rank:
        # Rank 0 tells the others whether there is anything to train on.
        assert_ran(run_slice(tmp_path, script, arguments, rank=0, world_size=world_size))
        journals = (tmp_path / "0" / "journal.json",)
    result = run_slice(tmp_path, script, arguments, rank=rank, world_size=world_size, journals=journals)
    assert_ran(result)
    assert_phases_follow_the_schedule(result, stage)
    assert result.facts.model_flops_per_iteration > 0
    assert result.facts.tokens_per_iteration == 8 * 64
    if "experts" in name:
        assert any("experts are equally loaded" in text for text in result.report.assumptions)


@needs_megatron_lm
def test_what_a_real_job_switches_on_does_not_disturb(tmp_path: Path):
    """Checkpoints, evaluation, writers, fine timers and detectors neither fail nor leave anything behind."""
    extras = (
        f"--num-layers 2 --save {tmp_path}/ckpt --load {tmp_path}/ckpt --save-interval 1 --eval-interval 1"
        f" --tensorboard-dir {tmp_path}/tb --log-timers-to-tensorboard --log-memory-to-tensorboard"
        " --timing-log-level 2 --log-params-norm --log-num-zeros-in-grad --log-straggler --log-progress"
        " --check-for-spiky-loss --manual-gc --global-batch-size 2"
    )
    script = MEGATRON_LM / "pretrain_gpt.py"
    arguments = TRAINING_SIZES.replace("--eval-interval 1000", "")
    result = run_slice(tmp_path / "slices", script, f"{arguments} {extras}", rank=0, world_size=1)
    assert_ran(result)
    said = " ".join(result.report.assumptions)
    for word in ("checkpoints are not written", "evaluation is skipped", "nothing is written to TensorBoard"):
        assert word in said
    assert not (tmp_path / "tb").exists()
    assert not list(tmp_path.glob("ckpt/*/*"))


DUMP_SHARDS = """
import json, os, runpy, sys
from megatron.core.optimizer import distrib_optimizer

original = distrib_optimizer.DistributedOptimizer.__init__
owned = []

def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    groups = self.optimizer.param_groups
    owned.append([[p.numel() for p in group["params"]] for group in groups])
    with open(os.environ["OWNED"], "w") as file:
        json.dump(owned, file)

distrib_optimizer.DistributedOptimizer.__init__ = init
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def owned_by(shards: tuple[OptimizerShard, ...], dense: int, expert: int) -> list[list[list[int]]]:
    """Elements per optimizer and parameter group of the rank with these indices along the two axes."""
    mine = [s for s in shards if s.index == (expert if s.expert else dense)]
    owned = []
    for shard in sorted(mine, key=lambda s: s.optimizer):
        sizes, groups = iter(n for n, _ in shard.fragments), []
        for count in shard.group_sizes:
            groups.append([next(sizes) for _ in range(count)])
        owned.append(groups)
    return owned


SHARD_CASES = {
    "core": (CORE_SCRIPT, f"{CORE_SIZES} --num-layers 2 --tensor-model-parallel-size 1"
             " --pipeline-model-parallel-size 1 --use-distributed-optimizer"),
    "experts": (MEGATRON_LM / "pretrain_gpt.py", f"{TRAINING_SIZES} --num-layers 2 --num-experts 4"
                " --moe-router-topk 2 --expert-model-parallel-size 2 --use-distributed-optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARD_CASES)
def test_computed_shards_are_those_of_megatrons_own_optimizers(tmp_path: Path, name: str):
    """Rank 0 tells what every data-parallel rank owns; each rank, really built, owns just that."""
    script, arguments = SHARD_CASES[name]
    if not script.exists():
        pytest.skip("MEGATRON_LM names no Megatron-LM checkout")
    dump = tmp_path / "dump.py"
    dump.write_text(DUMP_SHARDS)
    shards: tuple[OptimizerShard, ...] = ()
    for rank in range(4):
        owned = tmp_path / f"owned{rank}.json"
        result = run_slice(
            tmp_path,
            dump,
            f"{script} {arguments} --global-batch-size 8",
            rank=rank,
            world_size=4,
            env={"OWNED": str(owned)},
        )
        assert_ran(result)
        shards = shards or result.facts.shards
        # ep varies faster than the experts' data-parallel axis: ranks 0, 2 and 1, 3 share their experts.
        assert json.loads(owned.read_text()) == owned_by(shards, dense=rank, expert=rank // 2)
        kinds = result.program.events["kind"]
        assert (kinds == EventKind.COMM).any()


REFUSED = {
    "context parallelism": (
        "--num-layers 2 --context-parallel-size 2",
        2,
        "Context parallelism is only supported by TEDotProductAttention",
    ),
    "layers": (
        "--num-layers 30 --pipeline-model-parallel-size 4",
        4,
        "30 layers do not divide over 4 pipeline",
    ),
    "world size": (
        "--num-layers 2 --tensor-model-parallel-size 2",
        3,
        "world size 3 is not divisible by tp 2",
    ),
    "batch": ("--num-layers 2 --global-batch-size 7", 2, "global batch size 7 is not divisible by"),
}


@needs_megatron_lm
@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_would_refuse_is_one_line(tmp_path: Path, name: str):
    arguments, world_size, message = REFUSED[name]
    result = run_slice(
        tmp_path,
        MEGATRON_LM / "pretrain_gpt.py",
        f"{TRAINING_SIZES} {arguments}",
        rank=0,
        world_size=world_size,
    )
    assert result.report.status == "user_error", result.output
    assert message in result.report.message
    assert "\n" not in result.report.message


@needs_megatron_lm
def test_gradient_accumulation_fusion_without_apex_says_what_to_do(tmp_path: Path):
    arguments = TRAINING_SIZES.replace("--no-gradient-accumulation-fusion", "")
    result = run_slice(
        tmp_path, MEGATRON_LM / "pretrain_gpt.py", f"{arguments} --num-layers 2", rank=0, world_size=1
    )
    assert result.report.status == "user_error", result.output
    assert (
        "add --prism-apex if the cluster has Apex, else --no-gradient-accumulation-fusion"
        in result.report.message
    )


def test_thirty_layers_of_a_plain_core_script(tmp_path: Path):
    arguments = (
        f"{CORE_SIZES} --num-layers 30 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"
    )
    result = run_slice(tmp_path, CORE_SCRIPT, arguments, rank=0, world_size=4)
    assert result.report.status == "user_error", result.output
    assert "30 layers do not divide over 4 pipeline stages" in result.report.message
