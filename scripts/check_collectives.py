"""Compare the collective model with every measured point in tests/costs/data, and print the medians.

    python scripts/check_collectives.py            medians by source, then over all
    python scripts/check_collectives.py --all      every point as well
    python scripts/check_collectives.py --leave-one-out    fit the constants without one publisher, predict that one; all in turn

Framework-timed tables (XLA, torch events, our own) hold 15-50 us of launch per call, which the model prices as host
time; of those only points from 1 MiB up count. Tables by nccl-tests count in full. SimAI's table and the tables of
peaks carry bus bandwidths instead of times.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.collectives import CollectiveModel, bus_factor
from prism_plugins.costs.nccl.settings import parse_settings
from prism_plugins.program.model import CommSignature

DATA = Path(__file__).parents[1] / "tests" / "costs" / "data"
FROM_BYTES = 1 << 20
"""Framework-timed points below this are launch latency."""
GPUS = {
    "GB200": "gb200-nvl72",
    "A100": "dgx-a100",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
}
CLUSTERS = {"gcp-a3mega-h100-16-ar": "gcp-a3-mega"}
NICS = {"nccl-tests-119-a100-24-ar": 4}
"""NICs of a node where they are not the preset's."""
LEFT_OUT = {
    "mleng-4node-ar": "hardware not stated",
    "nccl-tests-319-bad-example": "one NIC used by mistake",
    "simai-nvlink_ratio": "hardware of the multi-node columns not stated",
}


class Point(NamedTuple):
    """One measured call."""

    source: str
    kind: str
    gpus: int
    nbytes: int
    measured_us: float
    priced_us: float
    rule: str
    counts: bool
    """Whether launch latency does not dominate it."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.priced_us / self.measured_us - 1


@functools.cache
def model(
    cluster: str, algorithm: str = "", protocol: str = "", nvls: bool = True, nics: int = 0
) -> CollectiveModel:
    environ = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol, "NCCL_NVLS_ENABLE": "2" if nvls else "0"}
    described = load_cluster(cluster)
    if nics:
        described = msgspec.structs.replace(
            described, node=msgspec.structs.replace(described.node, num_nics=nics)
        )
    return CollectiveModel(described, parse_settings(environ))


def call(kind: str, nbytes: int, size: int) -> CommSignature:
    """A float32 call whose full buffer per rank has ``nbytes``."""
    n = max(1, nbytes // 4)
    sizes = {
        "all_gather": {"in_numel": n // size, "out_numel": n},
        "reduce_scatter": {"in_numel": n, "out_numel": n // size},
        "send": {"in_numel": n},
    }.get(kind, {"in_numel": n, "out_numel": n})
    return CommSignature(kind=kind, group=0, dtype="float32", **sizes)


def price(costs: CollectiveModel, kind: str, nbytes: int, size: int) -> tuple[float, str]:
    """Microseconds and rule."""
    found = costs.price(call(kind, nbytes, size), tuple(range(size)), 0)
    return found.duration_ns / 1e3, found.rule


def points() -> Iterator[Point]:
    """All points that can be priced."""
    for row in json.loads((DATA / "nccl_h200x2.json").read_text())["rows"]:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"):
            us, rule = price(model("dgx-h200"), "send" if kind == "p2p" else kind, row["bytes"], 2)
            # Below 16 MiB this busy host could not issue calls as fast as they ran.
            yield Point("h200x2", kind, 2, row["bytes"], row[kind][1], us, rule, row["bytes"] >= 16 << 20)
    for case in json.loads((DATA / "collectives_published.json").read_text())["cases"]:
        if case["id"] not in LEFT_OUT:
            yield from _case(case)


def _case(case: dict) -> Iterator[Point]:
    source, kind = case["id"], case.get("collective", "")
    gpu = next((c for name, c in GPUS.items() if case.get("gpu", "").startswith(name)), "dgx-h100")
    cluster = CLUSTERS.get(source, gpu)
    nccl_tests = "nccl-tests" in case.get("tool", "nccl-tests" if source.startswith("mlperf") else "")
    for nbytes, measured in case.get("rows", ()):
        us, rule = price(model(cluster, nics=NICS.get(source, 0)), kind, nbytes, case["num_gpus"])
        yield Point(
            source, kind, case["num_gpus"], nbytes, measured, us, rule, nccl_tests or nbytes >= FROM_BYTES
        )
    for size, algorithm, with_nvls, without in case.get("busbw_by_gpus", ()):
        for nvls, bandwidth in ((True, with_nvls), (False, without)):
            us, rule = price(model(cluster, nvls=nvls), kind, case["bytes"], size)
            measured = case["bytes"] * bus_factor(kind, size) / bandwidth / 1e3
            label = f"{source} {'NVLS' if nvls and algorithm == 'NVLS' else 'ring'}"
            yield Point(label, kind, size, case["bytes"], measured, us, rule, True)
    for nbytes, *row in case.get("efficiency", ()):
        for nodes, efficiency in zip(case["nodes"], row, strict=True):
            if efficiency and nodes > 1:
                ring = source == "simai-nic_ratio"  # measured as rings of the Simple protocol
                costs = model("dgx-h100", "Ring", "Simple") if ring else model("dgx-h100")
                kind, rate, n = ("all_reduce", 400.0, 8 * nodes) if ring else ("all_to_all", 50.0, 8 * nodes)
                us, rule = price(costs, kind, nbytes, n)
                measured = nbytes * bus_factor(kind, n) / (efficiency * rate) / 1e3
                yield Point(source, kind, n, nbytes, measured, us, rule, True)
    for what, bandwidth in case.get("rows_GBps", ()):
        yield from _peak(source, what, bandwidth)


def _peak(source: str, what: str, bandwidth: float) -> Iterator[Point]:
    """A peak bus bandwidth, taken as that of 8 GiB (slides give no size)."""
    setups = {
        "H100 NVLink4 8 GPU ring": ("dgx-h100", "all_reduce", 8, False),
        "H100 NVLink4 SHARP 8 GPU": ("dgx-h100", "all_reduce", 8, True),
        "A100 NVLink3 8 GPU": ("dgx-a100", "all_reduce", 8, True),
        "DGX A100 multi-node 8x200Gb": ("dgx-a100", "all_reduce", 64, True),
        "DGX H100 multi-node 8x400Gb": ("dgx-h100", "all_reduce", 64, True),
        "H100 NVLink4 8 GPUs": ("dgx-h100", "all_to_all", 8, True),
        "A100 NVLink3 8 GPUs": ("dgx-a100", "all_to_all", 8, True),
        "B200 NVLink5 8 GPUs": ("dgx-b200", "all_to_all", 8, True),
        "DGX H100 8x400Gb, 32 GPUs": ("dgx-h100", "all_to_all", 32, True),
        "DGX A100 8x200Gb, 32 GPUs": ("dgx-a100", "all_to_all", 32, True),
    }
    if what in setups:
        cluster, kind, n, nvls = setups[what]
        nbytes = 8 << 30
        us, rule = price(model(cluster, nvls=nvls), kind, nbytes, n)
        yield Point(
            f"{source} {what}",
            kind,
            n,
            nbytes,
            nbytes * bus_factor(kind, n) / bandwidth / 1e3,
            us,
            rule,
            True,
        )


def medians(found: list[Point]) -> dict[str, tuple[float, float, int]]:
    """Source → median of absolute errors, median of signed errors, number of points; of those that count."""
    by_source: dict[str, list[float]] = {}
    for p in found:
        if p.counts:
            by_source.setdefault(p.source, []).append(p.error)
    return {
        source: (statistics.median(map(abs, errors)), statistics.median(errors), len(errors))
        for source, errors in by_source.items()
    }


def overall(found: list[Point]) -> float:
    """Median absolute error of the points that count."""
    return statistics.median(abs(p.error) for p in found if p.counts)


GRID = {
    "ramp": (10.0, 12.0, 14.0, 17.0, 20.0),
    "flag_ramp": (0.0, 4.0, 7.0, 10.0),
    "stall": (0.5, 0.7, 0.9, 1.1),
    "all_to_all_ramp": (15.0, 22.0, 28.0, 36.0, 45.0),
    "p2p_ramp": (2.0, 2.5, 4.0),
    "channel": (13.0, 14.5, 15.5, 17.0, 20.0),
    "peers": (0.0, 1 / 6, 1 / 3),
}
"""Values tried for each fitted constant."""


def publisher(source: str) -> str:
    """Tables of one publisher and GPU generation are left out together."""
    return "-".join(source.split("-")[: 2 if source.startswith("xla") else 1])


def points_with(constants: dict[str, float]) -> list[Point]:
    """All points priced with other constants."""
    from prism_plugins.costs import collectives
    from prism_plugins.costs.nccl import tuner

    tuner.RAMP_US, tuner.FLAG_RAMP_US = constants["ramp"], constants["flag_ramp"]
    tuner.STALL_US_PER_MB = constants["stall"]
    collectives.ALL_TO_ALL_RAMP_US = constants["all_to_all_ramp"]
    collectives.P2P_RAMP_US = constants["p2p_ramp"]
    collectives.P2P_CHANNEL_BW, collectives.P2P_PEERS_EXPONENT = constants["channel"], constants["peers"]
    return list(points())


def fit(without: str) -> dict[str, float]:
    """Constants that suit all publishers but one: coordinate search over the grid, twice around."""

    def badness(constants: dict[str, float]) -> float:
        rest = [p for p in points_with(constants) if publisher(p.source) != without]
        return statistics.mean(m[0] for m in medians(rest).values()) + overall(rest)

    best = {name: values[len(values) // 2] for name, values in GRID.items()}
    least = badness(best)
    for _ in range(2):
        for name, values in GRID.items():
            for value in values:
                tried = badness(best | {name: value})
                if tried < least:
                    best, least = best | {name: value}, tried
    return best


def leave_one_out() -> None:
    """Print the median error of each publisher when the constants were fitted on the others, and over all points."""
    errors: list[float] = []
    for name in sorted({publisher(p.source) for p in points()}):
        constants = fit(name)
        mine = [abs(p.error) for p in points_with(constants) if publisher(p.source) == name and p.counts]
        errors += mine
        chosen = ", ".join(f"{key} {value:.3g}" for key, value in constants.items())
        print(
            f"{name:14} {len(mine):4} points, median |error| {statistics.median(mine):6.1%} with {chosen}",
            flush=True,
        )
    print(f"leave-one-out median |error| over {len(errors)} points: {statistics.median(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="print every point")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="fit without each publisher and predict it"
    )
    arguments = parser.parse_args()
    if arguments.leave_one_out:
        leave_one_out()
        return
    found = list(points())
    if arguments.all:
        for p in found:
            print(
                f"{p.source:44} {p.kind:14} n={p.gpus:<5} {p.nbytes / 2**20:10.3f} MiB {p.measured_us:11.1f} "
                f"{p.priced_us:11.1f} us {p.error:+7.1%}{' ' if p.counts else '-'} {p.rule}"
            )
    for source, (absolute, signed, count) in medians(found).items():
        print(f"{source:60} median |error| {absolute:6.1%}, median error {signed:+6.1%}, {count} points")
    for source, why in LEFT_OUT.items():
        print(f"{source:60} left out: {why}")
    sources = statistics.median(m[0] for m in medians(found).values())
    print(
        f"median |error| over {sum(p.counts for p in found)} points: {overall(found):.1%}; over sources: {sources:.1%}"
    )


if __name__ == "__main__":
    main()
