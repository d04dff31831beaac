"""Programs told in the tables and numbers of another one."""

import msgspec
import numpy as np

from prism_plugins.program.compare import compare_programs
from prism_plugins.program.model import EVENT_DTYPE, CommSignature, EventKind, GroupInfo, Program
from prism_plugins.program.rebase import rebased

RANKS = (0, 1)


def two_communicators(calls: list[int], comms: list[int]) -> Program:
    """A rank that calls the same all_reduce on two communicators of the same ranks; ``calls`` are groups, ``comms`` the groups of the
    table's entries in order."""
    table = [
        CommSignature(kind="all_reduce", group=group, dtype="float32", in_numel=1, out_numel=1)
        for group in comms
    ]
    rows = [(EventKind.COMM, 0, 0, comms.index(group), 10 + i) for i, group in enumerate(calls)]
    return Program(
        rank=0,
        events=np.array(rows, dtype=EVENT_DTYPE),
        signatures=[],
        comms=table,
        groups=[GroupInfo(ranks=RANKS, name=name, desc="undefined") for name in ("10", "1")],
        phases=[],
        initial=[],
    )


def groups_called(program: Program) -> list[int]:
    return [program.comms[ref].group for ref in program.events["ref"].tolist()]


def test_calls_stay_on_their_communicator_where_another_has_the_same_ranks() -> None:
    """DeepSpeed's experts are reduced over a group of their own, which may have the ranks of the dense one."""
    onto = two_communicators([0, 0, 1], comms=[0, 1])
    other = two_communicators([0, 0, 1], comms=[1, 0])
    assert groups_called(rebased(other, onto)) == [0, 0, 1]


def test_a_call_on_another_communicator_of_the_same_ranks_is_a_difference() -> None:
    left = two_communicators([0, 0, 1], comms=[0, 1])
    right = two_communicators([0, 1, 1], comms=[0, 1])
    assert compare_programs(left, msgspec.structs.replace(left)) is None
    assert compare_programs(left, right) is not None
