"""Real peers against plain gloo, and mirror semantics against both where all ranks hold equal data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

SIZE = 4
WORKER = Path(__file__).with_name("real_worker.py")

NOT_IN_PLAIN_GLOO = ("AVG", "premul", "all_reduce_bool")
"""Scenarios that gloo refuses or whose values it does not define; checked by hand below."""

NOT_SYMMETRIC = (
    "ring",
    "tagged",
    "anyone",
    "empty",
    "broadcast",
    "scatter",
    "objects",
    "all_to_all_single_uneven",
)
"""Scenarios in which equal data do not make ranks equal: a mirrored peer holds something else."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of four processes."""
    output = tmp_path_factory.mktemp("real")
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(SIZE), str(store.port), str(output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    logs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [w.returncode for w in workers] == [0] * SIZE, "\n".join(logs)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(SIZE)]


def scenarios(results: dict[str, Any], mode: str) -> dict[str, Any]:
    return {name: value for name, value in results[mode].items()}


@pytest.mark.parametrize("mode", ["equal", "distinct"])
def test_real_peers_give_what_gloo_gives(ranks: list[dict[str, Any]], mode: str) -> None:
    num_compared = 0
    for rank, results in enumerate(ranks):
        plain, real = scenarios(results, f"plain {mode}"), scenarios(results, f"real {mode}")
        for name, expected in plain.items():
            if isinstance(expected, str) and expected.startswith("error"):
                assert not str(real[name]).startswith("error"), (name, real[name])
                continue
            if any(part in name for part in NOT_IN_PLAIN_GLOO):
                continue
            assert real[name] == expected, (rank, name)
            num_compared += 1
    assert num_compared > 30 * SIZE


def test_mirror_semantics_give_what_real_peers_give(ranks: list[dict[str, Any]]) -> None:
    num_compared = 0
    for rank, results in enumerate(ranks):
        real, mirrored = scenarios(results, "real equal"), scenarios(results, "mirror equal")
        for name, expected in real.items():
            if name not in NOT_SYMMETRIC:
                assert mirrored[name] == expected, (rank, name)
                num_compared += 1
    assert num_compared > 30 * SIZE


def test_both_record_the_same(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        real, mirrored = results["real record"], results["mirror record"]
        assert len(real) == len(mirrored)
        for one, other in zip(real, mirrored, strict=True):
            if one[1] != "uint8":  # sizes of objects nobody told us
                assert one == other


def test_what_gloo_lacks(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        distinct = results["real distinct"]
        total = torch.stack([(torch.arange(5) % 7 + 1 + s) % 11 for s in range(SIZE)]).float().sum(0)
        assert distinct["all_reduce AVG torch.float32"] == (total / SIZE).tolist()
        assert distinct["all_reduce_premul_sum"] == (total[:4] / 2).tolist()
        assert results["real equal"]["all_reduce AVG torch.bfloat16"] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert results["script store"] == [True, True]


def test_a_partner_that_does_not_come(ranks: list[dict[str, Any]]) -> None:
    for (name, message), members in zip(ranks[0]["timeout"], ("0, 1", "0, 2"), strict=True):
        assert name == "CollectiveTimeoutError"
        assert f"rank(s) {members}" in message
        assert "within 2 s" in message
        assert "\n" not in message
