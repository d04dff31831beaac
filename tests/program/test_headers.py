"""Stages that announce what they send: who cannot be derived, and who was misinformed."""

import pytest

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.headers import check_headers
from prism_plugins.program.slices import JobFacts, SliceReport, StageInfo
from prism_plugins.world.layout import Layout
from tests.program.schedules import one_f_one_b

LAYOUT = Layout(world_size=8, pp=4, dp=2)


def facts(*fingerprints, receives="", sends="", stage=0):
    stages = [
        StageInfo(fingerprint=f, schedule=one_f_one_b(stage=i, num_stages=4, num_microbatches=8))
        for i, f in enumerate(fingerprints)
    ]
    stages[stage] = StageInfo(
        fingerprint=fingerprints[stage], schedule=stages[stage].schedule, receives=receives, sends=sends
    )
    return JobFacts(framework="test", layout=LAYOUT, stages=tuple(stages), stage_headers=True)


def reports(told, fingerprints="fmml"):
    """``told``: rank → (received, sent)."""
    return {
        rank: SliceReport(
            rank=rank,
            status="ok",
            facts=facts(*fingerprints, receives=received, sends=sent, stage=rank // 2),
        )
        for rank, (received, sent) in told.items()
    }


def test_equal_tensors_everywhere():
    check_headers(facts(*"fmml"), reports({0: ("", "a"), 2: ("a", "a"), 7: ("a", "")}))
    check_headers(facts(*"fmnl"), reports({0: ("", "a"), 2: ("a", "b"), 4: ("b", "c"), 7: ("c", "")}))


def test_equal_layers_that_receive_other_tensors_are_sliced():
    told = {0: ("", "a"), 2: ("a", "b"), 7: ("b", "")}
    with pytest.raises(CannotDeriveError, match="stage 2 is sent b, its slice received a") as caught:
        check_headers(facts(*"fmml"), reports(told))
    assert (caught.value.ranks, caught.value.again) == ((4,), ())


def test_a_slice_that_read_another_header_is_repeated():
    told = {0: ("", "a"), 2: ("a", "b"), 4: ("b", "c"), 7: ("b", "")}
    with pytest.raises(CannotDeriveError, match="stage 3 is sent c, its slice received b") as caught:
        check_headers(facts(*"fmml"), reports(told))
    assert (caught.value.ranks, caught.value.again) == ((), (7,))
