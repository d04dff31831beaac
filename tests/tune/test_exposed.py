"""Data-parallel communication beside compute, against schedules worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_plugins.tune.exposed import NOTHING, Buckets, after_backward, before_forward, beside


def test_one_bucket_is_exposed_and_many_are_hidden_but_the_last() -> None:
    assert beside(Buckets(10.0), 100.0) == 10.0
    assert beside(Buckets(10.0, 5), 100.0) == 2.0
    assert beside(Buckets(100.0, 10), 50.0) == pytest.approx(55.0)


def test_hidden_buckets_hold_sms() -> None:
    assert beside(Buckets(10.0, 5, 0.25), 100.0) == pytest.approx(2.0 + 8.0 / 4)


def test_a_stage_of_one_chunk_waits_for_its_only_bucket() -> None:
    assert after_backward([Buckets(30.0)], [5.0], 8) == 30.0


def test_later_chunks_are_reduced_while_earlier_ones_go_on() -> None:
    """Chunk 1 is ready 4 x 5 ms before the end: its 12 ms are hidden, the 12 of chunk 0 are not."""
    assert after_backward([Buckets(12.0), Buckets(12.0)], [5.0, 5.0], 4) == 12.0
    assert after_backward([Buckets(30.0), Buckets(30.0)], [5.0, 5.0], 4) == 40.0


@given(
    ms=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=5),
    step=st.floats(0.1, 20.0),
    pp=st.integers(1, 8),
)
def test_reduction_outlasts_backward_by_no_more_than_all_of_it(ms: list[float], step: float, pp: int) -> None:
    late = after_backward([Buckets(m) for m in ms], [step] * len(ms), pp)
    assert ms[0] - 1e-9 <= late <= sum(ms) + 1e-9


def test_stages_gather_one_after_the_other_or_all_at_once() -> None:
    gathered, forward, arrives = [Buckets(10.0)] * 3, [4.0] * 3, [0.0, 4.0, 8.0]
    assert before_forward(gathered, forward, arrives, from_start=False) == 30.0
    assert before_forward(gathered, forward, arrives, from_start=True) == 10.0
    assert before_forward([NOTHING] * 3, forward, arrives, from_start=False) == 0.0
