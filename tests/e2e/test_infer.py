"""Programs inferred from the planned slices of small Megatron jobs equal the slices of ranks that nothing represents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.infer import infer_job, program_of
from prism_plugins.world.audit import audit_ranks
from prism_plugins.world.classes import plan_representatives
from tests.e2e.megatron_jobs import (
    CORE_SCRIPT,
    CORE_SIZES,
    MEGATRON_LM,
    TRAINING_SIZES,
    SliceResult,
    run_slice,
)

pytestmark = pytest.mark.e2e


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and the ranks to slice only for comparison."""

    arguments: str
    world_size: int
    compared: tuple[int, ...]
    derived: int = 0
    """Classes that have to come from another stage's slice."""
    extra: int = 0
    """Ranks that may have to be sliced because nothing at hand serves them."""


CORE_CASES = {
    "1f1b": Case(
        arguments="--num-layers 5 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 5"
        " --global-batch-size 10",
        world_size=5,
        compared=(2, 3),
        derived=2,
    ),
    "interleaved": Case(
        arguments="--num-layers 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"
        " --virtual-pipeline-model-parallel-size 2 --global-batch-size 8",
        world_size=4,
        compared=(2,),
        derived=1,
    ),
    "distributed optimizer": Case(
        arguments="--num-layers 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"
        " --use-distributed-optimizer --global-batch-size 6",
        world_size=6,
        compared=(2, 3, 4),
        extra=1,
    ),
}

TRAINING_CASES = {
    "tp, sp, pp, dp": Case(
        arguments="--num-layers 8 --tensor-model-parallel-size 2 --sequence-parallel"
        " --pipeline-model-parallel-size 4 --global-batch-size 16",
        world_size=16,
        compared=(2, 8, 9, 11, 13),
        derived=2,
    ),
    "interleaved, overlapped, distributed optimizer, recompute": Case(
        arguments="--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
        " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --global-batch-size 16"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        world_size=8,
        compared=(1, 5),
        extra=3,
    ),
    "experts": Case(
        arguments="--num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel"
        " --pipeline-model-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2"
        " --moe-token-dispatcher-type alltoall --use-distributed-optimizer --global-batch-size 8",
        world_size=8,
        compared=(2, 3, 5, 6),
    ),
    "uneven": Case(
        arguments="--num-layers 7 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1"
        " --global-batch-size 8",
        world_size=4,
        compared=(2,),
        derived=1,
    ),
}


@pytest.mark.parametrize("name", CORE_CASES)
def test_core_script(tmp_path, name):
    check(tmp_path, CORE_SCRIPT, CORE_SIZES, CORE_CASES[name])


@pytest.mark.slow
@pytest.mark.skipif(
    not (MEGATRON_LM / "pretrain_gpt.py").exists(), reason="MEGATRON_LM names no Megatron-LM checkout"
)
@pytest.mark.parametrize("name", TRAINING_CASES)
def test_megatron_training(tmp_path, name):
    check(tmp_path, MEGATRON_LM / "pretrain_gpt.py", TRAINING_SIZES, TRAINING_CASES[name])


def check(folder: Path, script: Path, sizes: str, case: Case) -> None:
    def slice_rank(rank: int, journals: tuple[int, ...] = ()) -> SliceResult:
        result = run_slice(
            folder,
            script,
            f"{sizes} {case.arguments}",
            rank=rank,
            world_size=case.world_size,
            journals=tuple(folder / str(r) / "journal.json" for r in journals),
        )
        assert result.report.status == "ok", result.output
        assert result.report.steady, result.report.iteration_hashes
        return result

    results = {0: slice_rank(0)}
    facts = results[0].facts
    plan = plan_representatives(facts)
    assert not {r.rank for r in plan} & set(case.compared)
    tp_first = [r for r in plan if facts.layout.coords(r.rank)["tp"] == 0]
    others = [r for r in plan if r not in tp_first]
    lead_of_stage = {facts.layout.coords(r.rank)["pp"]: r.rank for r in tp_first}

    def journals_for(rank: int) -> tuple[int, ...]:
        # A stage without a slice of its own is like stage 1.
        return tuple(sorted({0, lead_of_stage.get(facts.layout.coords(rank)["pp"], lead_of_stage.get(1, 0))}))

    compared = [(rank, journals_for(rank)) for rank in case.compared]
    with ThreadPoolExecutor(2) as pool:
        for wave in (
            [(r.rank, r.depends_on) for r in tp_first if r.rank],
            [(r.rank, r.depends_on) for r in others] + compared,
        ):
            for (rank, _), result in zip(wave, pool.map(lambda item: slice_rank(*item), wave), strict=True):
                results[rank] = result

    used = {r.rank for r in plan}
    more: tuple[int, ...] = ()
    for _ in range(case.extra + 1):
        for rank in more:
            if rank not in results:
                results[rank] = slice_rank(rank, journals_for(rank))
        used |= set(more)
        try:
            job = infer_job(
                facts,
                {rank: results[rank].report for rank in used},
                {rank: results[rank].program for rank in used},
            )
            break
        except CannotDeriveError as error:
            more, reason = error.ranks, str(error)
    else:
        pytest.fail(f"ranks {more} cannot be derived: {reason}")
    assert sum(c.exemplar.source == "derived" for c in job.classes) == case.derived
    audits = audit_ranks(job, {rank: results[rank].program for rank in case.compared if rank not in used})
    assert [a.message for a in audits if not a.matched] == []
    for rank in range(case.world_size):
        assert program_of(job, rank).rank == rank
