"""Calls that do not meet, and orders that can hang: what is found, and that sound jobs give no finding."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import Builder, TableCosts, collective, message, one_class_per_rank, random_programs

from prism_plugins.checks.calls import calls_of_job
from prism_plugins.checks.matching import matching_findings
from prism_plugins.checks.ordering import ordering_findings
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import CommSignature
from prism_plugins.program.prediction import Finding
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout

WORLD = (0, 1, 2, 3)


def four() -> tuple[list[Builder], list[int]]:
    builders = [Builder(r) for r in WORLD]
    return builders, [b.group(WORLD, "DATA") for b in builders]


def found(builders: list[Builder]) -> list[Finding]:
    return matching_findings(calls_of_job(one_class_per_rank({b.rank: b.program() for b in builders})))


def at(signature: CommSignature, site: str) -> CommSignature:
    return msgspec.structs.replace(signature, site=site)


def test_a_call_left_out_names_both_sides_and_their_lines() -> None:
    builders, groups = four()
    for b, g in zip(builders, groups, strict=True):
        b.begin("backward", microbatch=3)
        b.comm(at(collective(g, 10), "train.py:7"))
        if b.rank != 2:
            b.comm(at(collective(g, 20), "train.py:8"))
        b.comm(at(collective(g, 30), "train.py:9"))
        b.end()
    (finding,) = found(builders)
    assert (finding.kind, finding.severity, finding.ranks) == ("missing_call", "error", "0-3")
    assert finding.phase == "backward micro-batch 3"
    assert "call 1: ranks 0-1,3 call all_reduce of 20 float32 at train.py:8" in finding.message
    assert (
        "ranks 2 do not, whose next call there is all_reduce of 30 float32 at train.py:9" in finding.message
    )


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (dict(kind="all_gather"), "all_gather of 20 float32"),
        (dict(in_numel=21, out_numel=21), "all_reduce of 21 float32"),
        (dict(dtype="bfloat16"), "all_reduce of 20 bfloat16"),
        (dict(reduce_op="MAX"), "(MAX)"),
        (dict(kind="broadcast", peer=1), "broadcast of 20 float32 from member 1"),
    ],
)
def test_a_call_that_differs(other: dict, text: str) -> None:
    builders, groups = four()
    for b, g in zip(builders, groups, strict=True):
        b.comm(collective(g, 10))
        call = collective(g, 20)
        b.comm(msgspec.structs.replace(call, **other) if b.rank == 3 else call)
    (finding,) = found(builders)
    assert finding.kind == "mismatch"
    assert "call 1: ranks 0-2 call all_reduce of 20 float32" in finding.message
    assert text in finding.message.split("ranks 3 call ")[1]


def test_the_same_calls_in_another_order() -> None:
    builders, groups = four()
    for b, g in zip(builders, groups, strict=True):
        for n in (20, 10) if b.rank == 1 else (10, 20):
            b.comm(collective(g, n))
    (finding,) = found(builders)
    assert finding.kind == "order"
    assert "in another order" in finding.message


def test_a_member_that_never_calls() -> None:
    builders, groups = four()
    for b, g in zip(builders[:3], groups, strict=False):
        b.comm(collective(g))
    builders[3].kernel(5.0)
    (finding,) = found(builders)
    assert finding.kind == "missing_call"
    assert finding.message.startswith("ranks 3 make no call on group DATA")


def test_a_message_without_receive_and_one_of_another_size() -> None:
    builders, groups = four()
    builders[0].comm(message("send", groups[0], 1, 50))
    builders[1].comm(message("recv", groups[1], 0, 60))
    builders[2].comm(message("send", groups[2], 3, 70), is_async=True)
    builders[3].kernel(1.0)
    kinds = {f.kind: f for f in found(builders)}
    assert set(kinds) == {"message_size", "unmatched_message"}
    assert "send of 50 float32" in kinds["message_size"].message
    assert "meets recv of 60 float32" in kinds["message_size"].message
    assert "ranks 3 have no receive for it" in kinds["unmatched_message"].message


def exchange(b: Builder, group: int, send: list[int], recv: list[int]) -> None:
    """As torch records it: no splits where all shares are equal."""
    b.comm(
        CommSignature(
            kind="all_to_all", group=group, dtype="float32", in_numel=sum(send), out_numel=sum(recv),
            send_splits=tuple(send) if len(set(send)) > 1 else (), recv_splits=tuple(recv) if len(set(recv)) > 1 else (),
        )
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [False, True])
def test_shares_of_an_all_to_all(wrong: bool) -> None:
    """Uneven between two ranks, even between the others; one expects a share from the wrong rank."""
    builders, groups = four()
    for b, g in zip(builders, groups, strict=True):
        send = [9 if (b.rank, peer) == (0, 1) else 8 for peer in WORLD]
        recv = [9 if (b.rank, peer) == (1, 0) else 8 for peer in WORLD]
        if wrong and b.rank == 1:
            recv[0], recv[2] = recv[2], recv[0]
        exchange(b, g, send, recv)
    job = one_class_per_rank({b.rank: b.program() for b in builders})
    assert Simulation(job, TableCosts()).timeline.iteration_time_ns > 0
    findings = found(builders)
    if not wrong:
        assert findings == []
        return
    (finding,) = findings
    assert finding.kind == "message_size"
    assert "rank 0 gives rank 1 9 elements" in finding.message
    assert "which expects 8 of it" in finding.message


def test_even_all_to_alls_of_different_sizes() -> None:
    builders, groups = four()
    for b, g in zip(builders, groups, strict=True):
        exchange(b, g, [8 + (b.rank == 2)] * 4, [8 + (b.rank == 2)] * 4)
    (finding,) = found(builders)
    assert "rank 0 gives rank 2 8 elements" in finding.message


def test_communicators_in_different_order_are_a_warning() -> None:
    builders, groups = four()
    second = [b.group(WORLD, "OTHER") for b in builders]
    for b, g, h in zip(builders, groups, second, strict=True):
        for group in (h, g) if b.rank == 0 else (g, h):
            b.comm(at(collective(group), "train.py:3"), is_async=True)
    job = calls_of_job(one_class_per_rank({b.rank: b.program() for b in builders}))
    assert matching_findings(job) == []
    (finding,) = ordering_findings(job)
    assert (finding.kind, finding.severity) == ("order", "warning")
    assert "on DATA" in finding.message
    assert "on OTHER" in finding.message
    assert "train.py:3" in finding.message


@pytest.mark.parametrize("seed", range(10))
def test_sound_jobs_have_no_finding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    job = calls_of_job(one_class_per_rank(random_programs(rng, num_ranks=5, num_actions=200)))
    assert matching_findings(job) == []
    assert ordering_findings(job) == []


def test_ranks_of_a_class_are_one_side() -> None:
    """A branch on one rank of a class of many: the others are told as one list."""
    layout = Layout(world_size=64, dp=64)
    everybody = tuple(range(64))

    def program(calls: int, rank: int):
        b = Builder(rank)
        g = b.group(everybody, "DATA")
        for _ in range(calls):
            b.comm(collective(g))
        return b.program()

    cls = RankClass(
        name="all", ranks=np.arange(64), representative=0, exemplar=program(3, 0),
        variants={7: program(2, 7)}, variant_of={7: 7},
    )  # fmt: skip
    (finding,) = matching_findings(calls_of_job(JobPrograms(layout=layout, classes=(cls,))))
    assert finding.kind == "missing_call"
    assert "ranks 0-6,8-63 call" in finding.message
    assert "ranks 7 do not" in finding.message
