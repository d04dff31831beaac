"""The collective model against measured and published NCCL tables, and laws it obeys.

Run this file as a script to print the error of every point.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model
from prism_plugins.program.model import CommSignature

DATA = Path(__file__).parent / "data"
MODELS = {gpu: build_cost_model(load_cluster(f"dgx-{gpu.lower()}")) for gpu in ("A100", "H100", "H200")}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def call(kind: str, nbytes: int, size: int = 2) -> CommSignature:
    """A call whose full buffer per rank has ``nbytes``."""
    n = nbytes // 4
    sizes = {
        "all_gather": {"in_numel": n // size, "out_numel": n},
        "reduce_scatter": {"in_numel": n, "out_numel": n // size},
        "send": {"in_numel": n},
        "recv": {"out_numel": n},
    }.get(kind, {"in_numel": n, "out_numel": n})
    return CommSignature(kind=kind, group=0, dtype="float32", **sizes)


def microseconds(kind: str, nbytes: int, ranks: tuple[int, ...], gpu: str = "H100") -> float:
    return MODELS[gpu].price_comm(call(kind, nbytes, len(ranks)), ranks, ranks[0]).duration_ns / 1e3


def points() -> list[tuple[str, str, int, int, float, float]]:
    """(case, kind, members, bytes, measured us, priced us)."""
    out = []
    for row in json.loads((DATA / "nccl_h200x2.json").read_text())["rows"]:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"):
            priced = microseconds("send" if kind == "p2p" else kind, row["bytes"], (0, 1), "H200")
            out.append(("h200x2", kind, 2, row["bytes"], row[kind][1], priced))
    for case in json.loads((DATA / "collectives_published.json").read_text())["cases"]:
        gpu, size = case["gpu"][:4], case["num_gpus"]
        for nbytes, measured in case["rows"]:
            priced = microseconds(case["collective"], nbytes, tuple(range(size)), gpu)
            out.append((case["id"], case["collective"], size, nbytes, measured, priced))
    return out


LARGE = 64 << 20


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"])
def test_two_h200s_large_messages_within_ten_percent(kind: str) -> None:
    mine = [(m, p) for case, k, _, b, m, p in points() if case == "h200x2" and k == kind and b >= LARGE]
    assert len(mine) == 3
    for measured, priced in mine:
        assert priced == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize(
    ("case", "limit"), [("dgxc-h100-8-ar", 0.12), ("mleng-h200-8-ar", 0.12), ("mleng-a100-8-ar", 0.2)]
)
def test_published_all_reduce_of_whole_nodes(case: str, limit: float) -> None:
    mine = [(m, p) for c, *_, b, m, p in points() if c == case and b >= LARGE]
    for measured, priced in mine:
        assert priced == pytest.approx(measured, rel=limit)


def test_nccl_tests_latency_of_an_h100_node_within_a_third() -> None:
    mine = [(m, p) for c, *_, b, m, p in points() if c == "dgxc-h100-8-ar" and 1024 <= b < LARGE]
    for measured, priced in mine:
        assert priced == pytest.approx(measured, rel=0.34)


def test_sixty_four_h200s_over_eight_nodes() -> None:
    measured, priced = next((m, p) for c, *_, m, p in points() if c == "mlperf50-google-a3ultra-h200-64-ar")
    assert priced == pytest.approx(measured, rel=0.12)


def test_large_messages_over_all_tables_have_a_small_median_error() -> None:
    errors = [abs(p / m - 1) for *_, b, m, p in points() if b >= LARGE]
    assert statistics.median(errors) < 0.06


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less_time(kind: str) -> None:
    for ranks in (tuple(range(2)), tuple(range(8)), tuple(range(64)), tuple(range(0, 1024, 8))):
        times = [microseconds(kind, 4 << i, ranks) for i in range(5, 32)]
        assert times == sorted(times)


@pytest.mark.parametrize("kind", [*KINDS, "send"])
def test_leaving_the_node_never_helps(kind: str) -> None:
    for nbytes in (1 << 12, 1 << 20, 1 << 28):
        assert microseconds(kind, nbytes, (0, 8)) > microseconds(kind, nbytes, (0, 1))


def test_sibling_groups_share_the_rails_and_members_pool_theirs() -> None:
    one_per_node = microseconds("all_reduce", 1 << 30, tuple(range(0, 64, 8)))
    whole_nodes = microseconds("all_reduce", 1 << 30, tuple(range(64)))
    assert one_per_node == pytest.approx(2 * 7 / 8 * (1 << 30) / (50e9 * 0.92) * 1e6, rel=0.05)
    assert whole_nodes < one_per_node / 5


def test_oversubscription_slows_the_network_only() -> None:
    import msgspec

    from prism_plugins.costs.cluster import Fabric

    cluster = msgspec.structs.replace(load_cluster("dgx-h100"), fabric=Fabric(oversubscription=2.0))
    slow = build_cost_model(cluster)
    inside, across = (0, 1), (0, 8)
    comm = call("all_gather", 1 << 30)
    assert (
        slow.price_comm(comm, inside, 0).duration_ns == MODELS["H100"].price_comm(comm, inside, 0).duration_ns
    )
    assert (
        slow.price_comm(comm, across, 0).duration_ns
        > 1.9 * MODELS["H100"].price_comm(comm, across, 0).duration_ns
    )


def test_a_group_of_one_costs_a_launch_and_an_unknown_kind_is_marked() -> None:
    assert microseconds("all_reduce", 1 << 30, (3,)) < 10
    price = MODELS["H100"].price_comm(call("all_frobnicate", 1 << 20), (0, 1), 0)
    assert price.provenance == "unpriced"
    assert price.duration_ns > 10_000


def test_every_kind_has_a_price() -> None:
    for kind in (*KINDS, "reduce", "gather", "scatter", "send", "recv", "barrier"):
        price = MODELS["H100"].price_comm(call(kind, 1 << 20), (0, 1), 0)
        assert price.provenance == "modelled", kind
        assert price.duration_ns > 1000


def main() -> None:
    for case, kind, size, nbytes, measured, priced in points():
        print(
            f"{case:36} {kind:14} n={size:<3} {nbytes / 2**20:10.3f} MiB {measured:10.1f} {priced:10.1f} us {priced / measured - 1:+6.0%}"
        )
    errors = [abs(p / m - 1) for *_, b, m, p in points() if b >= LARGE]
    print(f"median error from 64 MiB up: {statistics.median(errors):.1%} over {len(errors)} points")


if __name__ == "__main__":
    main()
