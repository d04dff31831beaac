"""Measured collectives: points of a calibration, and how they correct the model.

At a measured size and group the price is the measurement. Between sizes the ratio of measurement to model is
interpolated (log over log bytes), beyond the smallest and largest it stays; between group sizes it is interpolated over the
log of the size, beyond it stays: the shape in bytes and members is the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "p2p",
)
"""``p2p``: one message between two GPUs."""


class CollectivePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured call."""

    kind: str
    gpus: int
    nodes: int = 1
    nbytes: int
    """Of the full buffer per rank, as nccl-tests counts."""
    us: float
    """From the arrival of the last member, microseconds."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What was called: later measurements of the same replace earlier ones."""
        return (self.kind, self.gpus, self.nodes, self.nbytes)


def merge_points(lists: Iterable[Iterable[CollectivePoint]]) -> list[CollectivePoint]:
    """All points; of two of the same call the later one."""
    return list({point.key: point for points in lists for point in points}.values())


def problem_of(point: CollectivePoint) -> str:
    """What no measurement gives, or nothing."""
    if point.kind not in KINDS:
        return f"the unknown collective {point.kind[:40]!r}"
    if not (2 <= point.gpus < 1 << 24 and 1 <= point.nodes <= point.gpus):
        return f"{point.kind} of {point.gpus} GPUs on {point.nodes} nodes"
    if not (0 < point.nbytes < 1 << 50 and 0 < point.us < 1e9):
        return f"{point.kind} of {point.nbytes} bytes in {point.us} us"
    return ""


class Corrections:
    """Ratios of measured to modelled times."""

    def __init__(
        self, points: Iterable[CollectivePoint], modelled_us: Callable[[str, int, int, int], float]
    ) -> None:
        """``modelled_us(kind, gpus, nodes, nbytes)`` prices a point without corrections."""
        self._curves: dict[tuple[str, bool], dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        rows: dict[tuple[str, bool], dict[int, list[tuple[float, float]]]] = {}
        for p in points:
            ratio = p.us / modelled_us(p.kind, p.gpus, p.nodes, p.nbytes)
            place = rows.setdefault((p.kind, p.nodes > 1), {})
            place.setdefault(p.gpus, []).append((math.log(p.nbytes), math.log(ratio)))
        for kind, by_size in rows.items():
            self._curves[kind] = {
                gpus: tuple(np.array(column) for column in zip(*sorted(pairs), strict=True))
                for gpus, pairs in sorted(by_size.items())
            }

    def factor(self, kind: str, gpus: int, nodes: int, nbytes: float) -> tuple[float, str]:
        """What to multiply the model with, and the provenance: ``measured`` inside the measured sizes of this group,
        ``scaled`` beyond, ``modelled`` (factor 1) where the kind was not measured."""
        curves = self._curves.get((kind, nodes > 1))
        if not curves:
            return 1.0, "modelled"
        at = math.log(max(nbytes, 1.0))
        sizes = list(curves)
        logs = [float(np.interp(at, *curves[n])) for n in sizes]
        value = float(np.interp(math.log(gpus), np.log(sizes), logs))
        inside = gpus in curves and curves[gpus][0][0] - 1e-9 <= at <= curves[gpus][0][-1] + 1e-9
        return math.exp(value), "measured" if inside else "scaled"
