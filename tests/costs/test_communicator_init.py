"""How long communicators take to open: the figures it is made of, and what is not known."""

from __future__ import annotations

import pytest

from prism_plugins.costs.communicator_init import communicator_seconds, communicator_start
from prism_plugins.program.memory_device import CommunicatorUse


def group(num_ranks, **use):
    return CommunicatorUse(ranks=tuple(range(num_ranks)), **({"collective": True} | use))


def start(*uses):
    return communicator_start(uses, num_bytes=7, ranks="0-3")


def test_measured_sizes_and_what_lies_between():
    assert communicator_seconds(2) == 0.195
    assert communicator_seconds(8) == 0.24
    assert communicator_seconds(98304) == 265.0
    assert communicator_seconds(8192) == pytest.approx(0.24 + 8184 * (265 - 0.24) / 98296)
    sizes = [communicator_seconds(n) for n in (2, 4, 8, 64, 1024, 65536)]
    assert sizes == sorted(sizes)


def test_nothing_is_invented_outside_of_them():
    assert communicator_seconds(1) is None
    assert communicator_seconds(200_000) is None
    alone = start(group(1))
    assert (alone.count, alone.init_seconds, alone.not_priced) == (1, 0.0, 1)


def test_the_two_gpus_that_were_measured():
    """0.8 s for the first communicator; one more 0.2 s; its batched messages 0.2 s; an unbatched pair 0.14 s."""
    assert start(group(2)).init_seconds == pytest.approx(0.8, abs=0.01)
    assert start(group(2), group(2)).init_seconds - start(group(2)).init_seconds == pytest.approx(0.195)
    messages = start(group(2), group(2, near_peers=1)).init_seconds - start(group(2), group(2)).init_seconds
    assert messages == pytest.approx(0.2)
    pairs = start(group(2), group(2, collective=False, pairs=1))
    assert pairs.count == 2
    assert pairs.init_seconds - start(group(2)).init_seconds == pytest.approx(0.14)


def test_a_rank_opens_one_after_another():
    both = start(group(64), group(1024), group(1))
    expected = 0.6 + communicator_seconds(64) + communicator_seconds(1024)
    assert both.init_seconds == pytest.approx(expected)
    assert (both.count, both.not_priced, both.memory_bytes, both.ranks) == (3, 1, 7, "0-3")
