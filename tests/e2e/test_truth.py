"""The emulated program of every rank is what that rank really does.

Each job runs with a process per rank that really computes and communicates, and a logger that knows nothing of prism
writes down what each asks of torch.distributed in which step of the schedule. The same job is emulated from a few
slices. For every rank, sliced or inferred, steps and calls have to be equal, in the same order.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.e2e.truth_compare import (
    Call,
    RankResult,
    Step,
    Witnessed,
    first_difference,
    num_equal,
    read_log,
)
from tests.e2e.truth_jobs import (
    CASES,
    DEEPSPEED_CASES,
    Case,
    check_real,
    compare_with,
    emulate,
    read_logs,
    run_for_real,
)

ALWAYS = (*CASES, "zero 3", "ds pp2 dp2 zero 1")
JOBS = CASES | DEEPSPEED_CASES


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("truth")
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in JOBS]
)
def test_programs_of_all_ranks_are_what_they_really_do(tmp_path: Path, name: str):
    case = JOBS[name]
    if case.config is not None and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    real = run_for_real(case, tmp_path)
    witnessed = read_logs(case, tmp_path)
    check_real(case, witnessed)
    assert_all_equal(compare_with(case, real, witnessed), case)
    reports = [json.loads(path.read_text()) for path in real.glob("slices/*/report.json")]
    assert len(reports) == case.world_size
    assert [r["synthesized_reads"] for r in reports] == [0] * case.world_size, reports[0]["assumptions"]

    emulated = emulate(case, tmp_path)
    results = compare_with(case, emulated, witnessed)
    assert_all_equal(results, case)
    assert case.may_slice_all or sum(r.source == "sliced" for r in results) < case.world_size
    assert_prism_ops_says_so(emulated, witnessed, rank=results[-2].rank)


def assert_all_equal(results: list[RankResult], case: Case) -> None:
    assert len(results) == case.world_size
    assert all(r.num_calls >= case.min_calls for r in results)
    assert all(r.num_steps >= case.min_steps or not case.steps for r in results)
    assert [f"rank {r.rank} ({r.source}): {r.difference}" for r in results if r.difference] == []


def assert_prism_ops_says_so(rundir: Path, witnessed: dict[int, list[Witnessed]], *, rank: int) -> None:
    command = [sys.executable, "-m", "prism_plugins.cli", "ops", str(rundir), "--rank", str(rank)]
    done = subprocess.run([*command, "--comm", "--json"], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    seen = [item for item in witnessed[rank][-1].sequence if isinstance(item, Call)]
    assert [(r["name"], tuple(r["group_ranks"]), r["bytes"], r["dtype"], r["peer"]) for r in rows] == [
        (c.kind, c.ranks, max(c.in_bytes, c.out_bytes), c.dtype, c.peer) for c in seen
    ]


# --- the comparison itself can fail ---

REDUCE = Call(kind="all_reduce", ranks=(0, 1), dtype="float32", in_bytes=8, out_bytes=8, op="SUM")
SEND = Call(kind="send", ranks=(0, 2), dtype="bfloat16", in_bytes=4, out_bytes=0, peer=2)
FORWARD = Step(kind="forward", microbatch=0)
SEQUENCE = (FORWARD, REDUCE, Step(), SEND)


@pytest.mark.parametrize(
    "other",
    [
        (FORWARD, Step(), REDUCE, SEND),
        (FORWARD, REDUCE, Step()),
        (*SEQUENCE, SEND),
        (msgspec.structs.replace(FORWARD, microbatch=1), *SEQUENCE[1:]),
        *(
            (FORWARD, msgspec.structs.replace(REDUCE, **change), Step(), SEND)
            for change in (
                {"kind": "reduce"},
                {"ranks": (0, 2)},
                {"dtype": "int32"},
                {"in_bytes": 4},
                {"op": "MAX"},
            )
        ),
        (*SEQUENCE[:3], msgspec.structs.replace(SEND, peer=0)),
    ],
)
def test_any_difference_is_named(other):
    at = num_equal(SEQUENCE, other)
    text = first_difference(SEQUENCE, other)
    for items in (SEQUENCE, other):
        assert str(items[at] if at < len(items) else "nothing more") in text
    assert first_difference(SEQUENCE, SEQUENCE) == ""


def test_an_iteration_that_was_cut_off_does_not_count(tmp_path):
    call = {"kind": "send", "ranks": [0, 2], "dtype": "bfloat16", "in_bytes": 4, "out_bytes": 0}
    before = ["comm", {**call, "peer": 2, "op": "", "splits": []}]
    whole = [
        ["iteration"],
        ["begin", "forward", 0, -1],
        ["end"],
        before,
        ["losses", []],
        ["parameters", 2.0],
        ["grad_norm", 1.0],
    ]
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [before, *whole, ["iteration"], before]))
    (iteration,) = read_log(path)
    assert iteration.sequence == (FORWARD, Step(), SEND)
