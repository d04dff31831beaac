"""The local rank on a command line: the launcher's becomes the slice's."""

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.local_rank import check_local_rank, with_local_rank


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("t.py", "--local_rank=0", "--lr", "0"), ("t.py", "--local_rank=5", "--lr", "0")),
        (("t.py", "--local_rank", "0"), ("t.py", "--local_rank", "5")),
        (("t.py", "--local-rank=0", "--x"), ("t.py", "--local-rank=5", "--x")),
        (("t.py", "--local_rank=0", "--local_rank", "0"), ("t.py", "--local_rank=5", "--local_rank", "5")),
        (("t.py", "--local_rank=-1"), ("t.py", "--local_rank=-1")),
        (("t.py", "--local_rank"), ("t.py", "--local_rank")),
        (("t.py", "--local_rank=auto"), ("t.py", "--local_rank=auto")),
        (("t.py", "--local_rank_offset", "3"), ("t.py", "--local_rank_offset", "3")),
        (("t.py",), ("t.py",)),
    ],
)
def test_a_slice_gets_its_own(argv, expected):
    assert with_local_rank(argv, 5) == expected


def test_agreement_is_fine():
    check_local_rank(("t.py", "--local_rank=0"), {"LOCAL_RANK": "0"})
    check_local_rank(("t.py", "--local_rank=0"), {})
    check_local_rank(("t.py", "--local_rank=-1"), {"LOCAL_RANK": "1"})
    check_local_rank(("t.py",), {"LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (("t.py", "--local_rank=3"), {"LOCAL_RANK": "0"}, "--local_rank 3 .* LOCAL_RANK=0"),
        (
            ("t.py", "--local_rank=0", "--local-rank", "3"),
            {"LOCAL_RANK": "0"},
            "--local-rank 3 .* LOCAL_RANK=0",
        ),
        (("t.py", "--local_rank=0", "--local_rank=1"), {}, "more than once, as 0 and 1"),
    ],
)
def test_contradictions_are_told(argv, environ, said):
    with pytest.raises(PrismError, match=said):
        check_local_rank(argv, environ)
