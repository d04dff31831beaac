"""Jobs that hang or do not match, and what is said about them."""

from __future__ import annotations

import pytest
from builders import Builder, TableCosts, collective, message, one_class_per_rank

from prism_plugins.simulate.engine import simulate
from prism_plugins.simulate.faults import SimulationFault, compact_ranks


def run(*builders: Builder) -> SimulationFault:
    with pytest.raises(SimulationFault) as caught:
        simulate(one_class_per_rank({b.rank: b.program() for b in builders}), TableCosts())
    return caught.value


def ranks(n: int) -> tuple[list[Builder], list[int]]:
    builders = [Builder(r) for r in range(n)]
    return builders, [b.group(tuple(range(n)), "TP") for b in builders]


def test_a_missing_call_is_a_hang_with_both_sides() -> None:
    (a, b), (ga, gb) = ranks(2)
    for builder, group in ((a, ga), (b, gb)):
        builder.comm(collective(group))
    a.begin("backward", microbatch=3)
    a.comm(collective(ga, 64))
    a.end()
    fault = run(a, b)
    assert fault.kind == "hang"
    assert fault.group == "TP"
    assert fault.sequence == 1
    assert fault.waiting.ranks == (0,)
    assert fault.waiting.phase == "backward micro-batch 3"
    assert fault.other.ranks == (1,)
    assert "no further call" in fault.other.call
    finding = fault.finding()
    assert (finding.kind, finding.severity, finding.ranks) == ("hang", "error", "0-1")
    assert "waits for ranks 1" in finding.message


def test_calls_in_opposite_order_are_a_mismatch_or_a_hang() -> None:
    (a, b), (ga, gb) = ranks(2)
    other = [x.group((0, 1), "DP") for x in (a, b)]
    a.comm(collective(ga))
    a.comm(collective(other[0]))
    b.comm(collective(other[1]))
    b.comm(collective(gb))
    fault = run(a, b)
    assert fault.kind == "hang"
    assert {fault.waiting.ranks, fault.other.ranks} == {(0,), (1,)}
    assert fault.finding().kind == "deadlock"
    assert fault.closed
    assert [party.ranks for party in fault.chain] in ([(0,), (1,)], [(1,), (0,)])
    assert "DP" in fault.message
    assert "TP" in fault.message


def test_a_chain_of_waits_is_followed_to_the_rank_that_left() -> None:
    (a, b, c) = builders = [Builder(r) for r in range(3)]
    left, right = ([x.group(pair, str(pair)) for x in builders] for pair in ((0, 1), (1, 2)))
    b.comm(collective(right[1]))
    c.comm(collective(right[2]))
    b.comm(collective(right[1]))
    b.comm(collective(left[1]))
    a.comm(collective(left[0]))
    fault = run(a, b, c)
    assert not fault.closed
    assert "(1, 2)" in fault.message
    assert fault.other.ranks == (2,)
    assert "no further call" in fault.message


def test_different_kinds_that_meet_are_a_mismatch() -> None:
    (a, b), (ga, gb) = ranks(2)
    a.comm(collective(ga, 64))
    b.comm(collective(gb, 64, kind="all_gather"))
    fault = run(a, b)
    assert fault.kind == "mismatch"
    assert "all_reduce of 64 float32" in fault.message
    assert "all_gather of 64 float32" in fault.message


def test_different_sizes_that_meet_are_a_mismatch() -> None:
    (a, b), (ga, gb) = ranks(2)
    a.comm(message("send", ga, 1, 10))
    b.comm(message("recv", gb, 0, 20))
    fault = run(a, b)
    assert fault.kind == "mismatch"
    assert "40 bytes" in fault.message
    assert "80 bytes" in fault.message


def test_two_unbatched_sends_at_each_other_hang() -> None:
    (a, b), (ga, gb) = ranks(2)
    a.comm(message("send", ga, 1))
    a.comm(message("recv", ga, 1))
    b.comm(message("send", gb, 0))
    b.comm(message("recv", gb, 0))
    assert run(a, b).kind == "hang"


def test_a_host_that_waits_for_ever_is_found() -> None:
    (a, b, c), groups = ranks(3)
    a.comm(collective(groups[0]), is_async=True)
    a.device_sync()
    a.kernel(10)
    b.comm(collective(groups[1]))
    c.kernel(10)
    fault = run(a, b, c)
    assert fault.kind == "hang"
    assert fault.other.ranks == (2,)


def test_ranks_are_listed_compactly() -> None:
    assert compact_ranks((5, 0, 1, 2)) == "0-2,5"
