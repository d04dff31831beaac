"""Compact rank lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_plugins.emit.ranks import format_ranks, join_ranks, shorten_ranks
from prism_plugins.options import parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1, 2, 3], "0-3"),
        ([8, 0, 1, 9, 12], "0-1,8-9,12"),
        (np.arange(8192), "0-8191"),
    ],
)
def test_runs(ranks, text):
    assert format_ranks(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_the_options_read_what_is_printed(ranks):
    assert parse_ranks(format_ranks(ranks), world_size=201) == tuple(sorted(ranks))


def test_lists_as_one():
    assert join_ranks(["8-15", "0,3", "1-2,9"]) == "0-3,8-15"


def test_long_lists_keep_the_count():
    strided = [rank for rank in range(1024) if rank % 8]
    assert format_ranks(strided, max_runs=2) == "1-7,9-15,… (896 ranks)"
    assert shorten_ranks(format_ranks(strided), max_runs=2) == "1-7,9-15,… (896 ranks)"
    assert shorten_ranks("0-7,64") == "0-7,64"
