import msgspec
import numpy as np
import pytest

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.compare import compare_programs
from prism_plugins.program.infer import infer_job, program_of
from prism_plugins.program.model import EVENT_DTYPE, EventKind
from prism_plugins.program.shards import is_readable
from prism_plugins.program.store import load_program, save_program
from prism_plugins.world.classes import plan_representatives
from tests.program.job_model import SmallJob


def infer(job, extra=()):
    ranks = [r.rank for r in plan_representatives(job.facts)] + list(extra)
    return infer_job(job.facts, {r: job.reports[r] for r in ranks}, {r: job.programs[r] for r in ranks})


def slicing_more(job):
    """Infer as the conductor does: slice what cannot be derived and try again."""
    extra = []
    for _ in range(10):
        try:
            return infer(job, extra), extra
        except CannotDeriveError as error:
            more = [rank for rank in error.ranks if rank not in extra]
        if not more:
            break
        extra += more
    pytest.fail(f"not derived with {extra}")


@pytest.mark.parametrize(
    "kind",
    [{}, {"num_chunks": 2}, {"num_chunks": 2, "overlap": True}],
    ids=["1f1b", "interleaved", "overlapped"],
)
def test_all_ranks_from_three(kind):
    job = SmallJob(pp=5, dp=3, num_microbatches=10, **kind)
    inferred = infer(job)
    assert [c.name for c in inferred.classes] == [f"stage {s}" for s in range(5)]
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None, rank
    assert [c.exemplar.source for c in inferred.classes] == [
        "sliced",
        "sliced",
        "derived",
        "derived",
        "inferred",
    ]


def test_classes_and_variants_partition_the_world():
    job = SmallJob(pp=4, dp=4, num_microbatches=8)
    inferred = infer(job)
    ranks = sorted(int(r) for c in inferred.classes for r in c.ranks)
    assert ranks == list(range(16))
    for cls in inferred.classes:
        assert cls.exemplar.rank == cls.ranks[0]
        assert set(cls.variant_of) < set(cls.ranks.tolist())
        assert set(cls.variant_of.values()) == set(cls.variants)
        for key, variant in cls.variants.items():
            assert variant.rank == key
            assert cls.variant_of[key] == key


def test_ranks_with_one_fragment_use_the_loops_of_another_slice():
    job = SmallJob(pp=2, dp=12, num_microbatches=4, num_layers=3)
    assert not all(is_readable((shard,), True) for shard in job.shards[0])
    inferred, extra = slicing_more(job)
    assert len(extra) <= 2
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None, rank


@pytest.mark.parametrize(("dp", "num_layers"), [(16, 8), (32, 5)])
def test_one_more_slice_on_each_side_of_tensor_parallelism_serves_all_shards(dp, num_layers):
    """First tensor-parallel ranks count every fragment in the norm: their slices do not show over which list a loop runs."""
    job = SmallJob(pp=1, dp=dp, tp=2, num_microbatches=4, num_layers=num_layers)
    inferred, extra = slicing_more(job)
    assert len({rank % 2 for rank in extra}) == len(extra) <= 2
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None, rank


def test_what_cannot_be_derived_names_the_rank_to_slice():
    job = SmallJob(pp=5, dp=2, num_microbatches=10)
    broken = job.programs[2]
    broken.phases[3] = msgspec.structs.replace(broken.phases[3], kind="something else")
    with pytest.raises(CannotDeriveError, match="stage 2 from stage 1") as raised:
        infer(job)
    assert set(raised.value.ranks) == {4, 6}


def test_a_sliced_rank_replaces_a_derivation():
    job = SmallJob(pp=5, dp=2, num_microbatches=10)
    inferred = infer(job, extra=[4])
    assert inferred.classes[2].representative == 4
    assert inferred.classes[2].exemplar.source == "sliced"
    assert inferred.classes[3].exemplar.source == "derived"


def test_programs_from_disk_give_the_same_job(tmp_path):
    job = SmallJob(pp=3, dp=2, num_microbatches=6)
    for rank, program in job.programs.items():
        save_program(program, tmp_path / f"{rank}.npz")
        job.programs[rank] = load_program(tmp_path / f"{rank}.npz")
    inferred = infer(job)
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None


def test_a_job_of_one_rank():
    job = SmallJob(pp=1, dp=1, num_microbatches=2)
    inferred = infer(job)
    assert len(inferred.classes) == 1
    assert program_of(inferred, 0) is job.programs[0]


@pytest.mark.parametrize("printing", [(0,), (11,), (0, 11)])
def test_a_rank_that_reads_back_between_iterations_stands_for_itself(printing):
    job = SmallJob(pp=4, dp=3, num_microbatches=8)
    for rank in printing:
        wait = np.zeros(1, dtype=EVENT_DTYPE)
        wait["kind"] = EventKind.STREAM_SYNC
        program = job.programs[rank]
        program.events = np.concatenate([program.events, wait])
    inferred, extra = slicing_more(job)
    assert sorted(extra) == sorted({0: 1, 11: 9}[rank] for rank in printing)
    for rank, real in job.programs.items():
        assert compare_programs(program_of(inferred, rank), real) is None, rank
