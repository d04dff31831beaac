"""The collective model against measured and published NCCL tables, and laws it obeys.

``scripts/check_collectives.py`` prints the error of every point.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from pathlib import Path

import msgspec
import pytest

from prism_plugins.costs.cluster import Fabric, load_cluster
from prism_plugins.costs.collectives import CollectiveModel
from prism_plugins.costs.model import build_cost_model
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.costs.nccl.topology import Links
from prism_plugins.costs.nccl.tuner import Tuner
from prism_plugins.errors import PrismError
from prism_plugins.program.model import CommSignature

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_collectives.py"
SPEC = importlib.util.spec_from_file_location("check_collectives", SCRIPT)
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)

MODELS = {
    gpu: build_cost_model(load_cluster(f"dgx-{gpu.lower()}")) for gpu in ("A100", "H100", "H200", "B200")
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def microseconds(kind: str, nbytes: int, ranks: tuple[int, ...], gpu: str = "H100") -> float:
    return MODELS[gpu].price_comm(check.call(kind, nbytes, len(ranks)), ranks, ranks[0]).duration_ns / 1e3


def choice(kind: str, nbytes: int, size: int, cluster: str = "dgx-h200", **environ: str) -> str:
    links = Links(load_cluster(cluster))
    return Tuner(links, parse_settings(environ)).choose(kind, nbytes, links.place(tuple(range(size)))).name


@pytest.fixture(scope="module")
def points():
    return list(check.points())


# Measured medians of |error| by source, a little above what the model reaches. XLA's reductions on Hopper are 15-27 %
# slower than nccl-tests' and our own on the same links, and its B200 table knows no NVLS (docs/collectives.md).
LIMITS = {
    "h200x2": 0.07, "dgxc-h100-8-ar": 0.06, "mleng-h200-8-ar": 0.03, "mleng-a100-8-ar": 0.14, "mleng-h200-nvls": 0.05,
    "gcp-a3mega": 0.07, "mlperf50-google-a3ultra-h200-64": 0.12, "mlperf50-google-a3ultra-h200-8": 0.02,
    "xla-sm_90-all_reduce-2": 0.21, "xla-sm_90-all_reduce-4": 0.12, "xla-sm_90-all_reduce-8": 0.19,
    "xla-sm_90-reduce_scatter-2": 0.28, "xla-sm_90": 0.15, "xla-sm_100-all_reduce-8": 0.36, "xla-sm_100-all_to_all-2": 0.31,
    "xla-sm_100": 0.18, "simai-nic_ratio": 0.12, "simai-ata_ratio": 0.07, "nvidia": 0.11, "nebius": 0.22,
    "coreweave": 0.23, "nccl-2169": 0.1, "nccl-tests-119": 0.23, "nccl-tests-283": 0.1,
}  # fmt: skip


def test_medians_by_source(points) -> None:
    for source, (error, _, _) in check.medians(points).items():
        limit = next(limit for prefix, limit in LIMITS.items() if source.startswith(prefix))
        assert error < limit, source


def test_the_median_over_points_is_below_nine_percent_and_over_sources_below_seven(points) -> None:
    assert check.overall(points) < 0.09
    assert statistics.median(m[0] for m in check.medians(points).values()) < 0.075


def test_nvls_begins_at_five_gpus_on_hopper_and_not_on_ampere() -> None:
    names = [choice("all_reduce", 8 << 30, n) for n in range(2, 9)]
    assert names == ["Ring/Simple"] * 3 + ["NVLS/Simple"] * 4
    assert choice("all_reduce", 8 << 30, 8, "dgx-a100") == "Ring/Simple"
    assert choice("all_reduce", 8 << 30, 8, NCCL_NVLS_ENABLE="0") == "Ring/Simple"


def test_protocols_follow_the_size() -> None:
    names = [choice("all_gather", nbytes, 8) for nbytes in (1 << 10, 1 << 20, 1 << 28)]
    assert names == ["Ring/LL", "Ring/LL", "Ring/Simple"]
    assert choice("all_reduce", 1 << 10, 1024) == "Tree/LL"
    assert choice("all_gather", 1 << 10, 8, NCCL_PROTO="^LL") == "NVLS/Simple"
    assert choice("all_reduce", 1 << 10, 8, NCCL_ALGO="ring;allreduce:tree") == "Tree/LL"


def test_a_restriction_that_leaves_nothing_is_said() -> None:
    costs = build_cost_model(load_cluster("dgx-h100"), nccl=parse_settings({"NCCL_ALGO": "Tree"}))
    costs.price_comm(check.call("all_gather", 1 << 20, 8), tuple(range(8)), 0)
    assert any("leave no way to do all_gather" in line for line in costs.assumptions())
    assert any("NCCL_ALGO=Tree" in line for line in costs.assumptions())


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"NCCL_ALGO": "Rign"}, "NCCL_ALGO=Rign: unknown 'Rign'; known are Tree, Ring"),
        ({"NCCL_ALGO": "ring;tree"}, "all entries except the first need a collective"),
        ({"NCCL_PROTO": "alltoall:LL"}, "unknown collective 'alltoall'"),
        ({"NCCL_ALGO": "CollNetDirect"}, "CollNetDirect is not modelled"),
        ({"NCCL_MAX_NCHANNELS": "lots"}, "NCCL_MAX_NCHANNELS=lots: an integer is needed"),
        ({"NCCL_MAX_NCHANNELS": "-3"}, "must lie between 0 and 64"),
    ],
)
def test_variables_that_nccl_would_refuse_name_themselves(environ: dict[str, str], says: str) -> None:
    with pytest.raises(PrismError, match=says):
        parse_settings(environ)


def test_few_channels_are_slow() -> None:
    few = CollectiveModel(load_cluster("dgx-h100"), parse_settings({"NCCL_MAX_NCHANNELS": "2"}))
    comm = check.call("all_gather", 1 << 30, 8)
    slow = few.price(comm, tuple(range(8)), 0).duration_ns / 1e3
    assert slow > 4 * microseconds("all_gather", 1 << 30, tuple(range(8)))


def test_groups_of_two_have_less_bus_bandwidth_than_groups_of_eight() -> None:
    for kind in ("all_gather", "reduce_scatter"):
        bus = [(n - 1) / n / microseconds(kind, 1 << 30, tuple(range(n))) for n in (2, 8)]
        assert 0.7 < bus[0] / bus[1] < 0.88
    bus = [2 * (n - 1) / n / microseconds("all_reduce", 1 << 30, tuple(range(n))) for n in (2, 8)]
    assert 0.6 < bus[0] / bus[1] < 0.75


def test_uneven_splits_cost_what_the_busiest_direction_carries() -> None:
    ranks = tuple(range(16))
    even = MODELS["H100"].price_comm(check.call("all_to_all", 1 << 28, 16), ranks, 0).duration_ns
    width = (1 << 28) // 4 // 16

    def uneven(splits: tuple[int, ...], rank: int = 0) -> float:
        comm = CommSignature(
            kind="all_to_all", group=0, dtype="float32", in_numel=sum(splits), out_numel=16 * width,
            send_splits=splits, recv_splits=(width,) * 16,
        )  # fmt: skip
        return MODELS["H100"].price_comm(comm, ranks, rank).duration_ns

    assert uneven((width,) * 16) == pytest.approx(even)
    assert uneven((width,) * 15 + (9 * width,)) > 1.3 * even
    assert uneven((9 * width,) + (width,) * 15) == pytest.approx(even)  # what stays with itself


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less_time(kind: str) -> None:
    for ranks in (tuple(range(2)), tuple(range(8)), tuple(range(64)), tuple(range(0, 1024, 8))):
        times = [microseconds(kind, 4 << i, ranks) for i in range(5, 32)]
        # NCCL estimates without the ramp of Simple: where it changes protocol, twice the bytes may be a little faster.
        assert all(b > 0.85 * a for a, b in itertools.pairwise(times))
        assert times[-1] > 100 * times[0]


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
    cluster = msgspec.structs.replace(load_cluster("dgx-h100"), fabric=Fabric(oversubscription=2.0))
    slow = build_cost_model(cluster)
    inside, across = (0, 1), (0, 8)
    comm = check.call("all_gather", 1 << 30, 2)
    assert (
        slow.price_comm(comm, inside, 0).duration_ns == MODELS["H100"].price_comm(comm, inside, 0).duration_ns
    )
    assert (
        slow.price_comm(comm, across, 0).duration_ns
        > 1.9 * MODELS["H100"].price_comm(comm, across, 0).duration_ns
    )


def test_a_group_of_one_costs_a_launch_and_an_unknown_kind_is_marked() -> None:
    assert microseconds("all_reduce", 1 << 30, (3,)) < 10
    price = MODELS["H100"].price_comm(check.call("all_frobnicate", 1 << 20, 2), (0, 1), 0)
    assert price.provenance == "unpriced"
    assert price.duration_ns > 10_000


def test_every_kind_has_a_price() -> None:
    for kind in (*KINDS, "reduce", "gather", "scatter", "send", "recv", "barrier"):
        price = MODELS["H100"].price_comm(check.call(kind, 1 << 20, 2), (0, 1), 0)
        assert price.provenance == "modelled", kind
        assert price.duration_ns > 1000
