"""The load policy of experts: exact sums, routing that has them, files of every kind."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_plugins.errors import PrismError
from prism_plugins.moe_load import describe_moe_load, expert_choice, expert_counts, parse_moe_load

LOADS = st.one_of(
    st.just("balanced"),
    st.floats(0, 20).map(lambda s: f"zipf:{s:g}"),
    st.lists(st.integers(0, 10**9), min_size=8, max_size=8)
    .filter(any)
    .map(lambda counts: "tokens:" + ",".join(map(str, counts))),
)


@given(load=LOADS, num_tokens=st.integers(1, 300), topk=st.integers(1, 8))
def test_counts_sum_and_the_routing_has_them(load, num_tokens, topk):
    counts = expert_counts(load, num_tokens, 8, topk)
    assert counts.sum() == num_tokens * topk
    assert counts.min() >= 0
    assert counts.max() <= num_tokens
    choice = expert_choice(load, num_tokens, 8, topk)
    assert choice.shape == (num_tokens, topk)
    assert (np.bincount(choice.ravel(), minlength=8) == counts).all()
    assert all(len(set(experts)) == topk for experts in choice.tolist())


def test_balanced_differs_by_one_token_at_most():
    assert expert_counts("balanced", 7, 8, 3).tolist() == [3, 3, 3, 3, 3, 2, 2, 2]
    assert expert_choice("balanced", 3, 4, 2).tolist() == [[0, 1], [2, 3], [0, 1]]


def test_zipf_by_hand():
    # 1 : 1/2 : 1/3 : 1/4 of 1200 tokens is 576, 288, 192, 144.
    assert expert_counts("zipf:1", 1200, 4, 1).tolist() == [576, 288, 192, 144]
    assert expert_counts("zipf:0", 8, 4, 1).tolist() == [2, 2, 2, 2]


def test_no_token_meets_an_expert_twice():
    # 1440, 720, 480 and 360 of 3000 assignments, but an expert can take 1000 tokens: 440 are spread over 1560.
    assert expert_counts("zipf:1", 1000, 4, 3).tolist() == [1000, 923, 615, 462]


def test_a_histogram_is_scaled():
    assert expert_counts("tokens:30,10,0,0", 100, 4, 1).tolist() == [75, 25, 0, 0]
    assert expert_counts("tokens:1,0,0,0", 100, 4, 2).tolist() == [100, 34, 33, 33]
    with pytest.raises(PrismError, match=r"the histogram has 4 experts, a layer of the model has 8"):
        expert_counts("tokens:30,10,0,0", 100, 8, 1)


def test_what_is_assumed_is_said():
    assert "equally loaded" in describe_moe_load("balanced", 8)
    assert "Zipf's law, exponent 1: the busiest of 4 gets 1.92 times the mean" in describe_moe_load(
        "zipf:1", 4
    )


@pytest.mark.parametrize(
    "text",
    [
        "[3, 1, 0, 2]",
        json.dumps({"tokens_per_expert": [3, 1, 0, 2]}),
        "3\n1\n0\n2\n",
        "expert,tokens\n1,1\n0,3\n3,2\n2,0\n",
        "tokens\n3\n1\n\n0\n2",
    ],
)
def test_files(tmp_path, text):
    file = tmp_path / "load.txt"
    file.write_text(text)
    assert parse_moe_load(str(file)) == "tokens:3,1,0,2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 counts"),
        ("[]", "holds 0 counts"),
        ("[0, 0]", "no expert gets a token"),
        ("[1, -1]", "expert 1 must be a number ≥ 0, not -1"),
        ("[1, NaN]", "expert 1 must be a number ≥ 0, not nan"),
        ('[1, "2"]', "expert 1 must be"),
        ("[1, true]", "expert 1 must be"),
        ("[1, [2]]", "expert 1 must be"),
        ("[1, 2", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": 1}', "tokens_per_expert"),
        ("0,1\n0,2\n", "line 2: expert 0 is there twice"),
        ("0,1\n2,2\n", "each of the experts 0 to 1 once"),
        ("0,1\n-1,2\n", "line 2: '-1' is no number of an expert"),
        ("a,b\nc,d\n", "line 2: expected tokens"),
        ("1,2,3\n", "line 1: expected tokens"),
        ("1e400\n", "expert 0 must be"),
        ("1\n" * 70_000, "holds 70000 counts"),
        ("1" * (1 << 21), "is larger than 1 MiB"),
        ("\x00\x01", "holds 0 counts"),
    ],
)
def test_bad_files_are_one_line(tmp_path, text, message):
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        parse_moe_load(str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blanced", "must be balanced, zipf:S"),
        ("zipf:x", "needs a number between 0 and 20"),
        ("zipf:-1", "needs a number between 0 and 20"),
        ("zipf:nan", "needs a number between 0 and 20"),
        ("zipf:", "needs a number between 0 and 20"),
        ("gone.json", "gone.json is missing"),
        ("/", "cannot be read: Is a directory"),
        ("/dev/zero", "cannot be read: Is a device"),
    ],
)
def test_bad_values_are_one_line(text, message):
    with pytest.raises(ValueError, match=message):
        parse_moe_load(text)


def test_binary_files(tmp_path):
    file = tmp_path / "load.npy"
    file.write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read: it is not UTF-8 text"):
        parse_moe_load(str(file))
