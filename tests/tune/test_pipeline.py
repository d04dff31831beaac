"""The pipeline schedules of composed layouts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_plugins.tune import pipeline
from prism_plugins.tune.compose import in_flight_of
from prism_plugins.tune.pipeline import Stages, critical_path, pipeline_ends


def even(pp: int, chunks: int, *, transfer: float = 0.0) -> Stages:
    return Stages(
        forward=((1.0 / chunks,) * chunks,) * pp,
        backward=((2.0 / chunks,) * chunks,) * pp,
        transfer=(transfer,) * pp,
        async_p2p=chunks > 1,
    )


@pytest.mark.parametrize(
    ("pp", "chunks", "m"), [(1, 1, 5), (2, 1, 3), (4, 1, 8), (8, 1, 64), (4, 2, 8), (4, 3, 16), (16, 6, 192)]
)
def test_even_stages_take_what_the_papers_say(pp: int, chunks: int, m: int) -> None:
    """(m + (p - 1) / v) (f + b): Narayanan et al., arXiv 2104.04473, section 2.2."""
    assert max(pipeline_ends(even(pp, chunks), m)) == pytest.approx(3 * (m + (pp - 1) / chunks))


def test_fewer_micro_batches_than_stages() -> None:
    """One micro-batch goes down and up."""
    assert max(pipeline_ends(even(8, 1, transfer=0.5), 1)) == pytest.approx(8 * 3 + 14 * 0.5)


durations = st.floats(min_value=0.1, max_value=3.0)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_long_iterations_are_extended(data: st.DataObject) -> None:
    """Whatever the stages take, what is extended is within 1 % of what is simulated step by step."""
    pp = data.draw(st.integers(2, 5))
    chunks = data.draw(st.integers(1, 3))
    draw = lambda: tuple(data.draw(durations) for _ in range(chunks))  # noqa: E731
    stages = Stages(
        forward=tuple(draw() for _ in range(pp)),
        backward=tuple(draw() for _ in range(pp)),
        transfer=tuple(data.draw(st.floats(0.0, 0.3)) for _ in range(pp)),
        async_p2p=chunks > 1,
    )
    m = pp * data.draw(st.integers(14, 18))
    exact, extended = pipeline._ends(stages, m), pipeline_ends(stages, m)
    assert max(extended) == pytest.approx(max(exact), rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_schedule_beats_its_critical_path(data: st.DataObject) -> None:
    pp, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    forward = tuple((data.draw(durations),) for _ in range(pp))
    backward = tuple((data.draw(durations),) for _ in range(pp))
    stages = Stages(forward=forward, backward=backward, transfer=(0.0,) * pp, async_p2p=False)
    assert max(pipeline_ends(stages, m)) >= critical_path(stages, m) - 1e-9


def test_activations_in_flight() -> None:
    assert [in_flight_of(4, 1, s, 8) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight_of(4, 1, 0, 2) == 2
    assert [in_flight_of(4, 2, s, 8) for s in range(4)] == [11, 9, 7, 5]
