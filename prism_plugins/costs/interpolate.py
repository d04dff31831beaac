"""Prices an op near measured ones: the cost rule's estimate times how wrong the rule was for the nearest neighbours.

The rule (:mod:`prism_plugins.costs.rules`) knows the shape of the cost: arithmetic with tile and wave quantisation for
GEMMs, ``latency + bytes / bandwidth`` for the rest. What it does not know, the kernel that is chosen and how much of
peak it reaches, varies slowly with size. So ``ratio = measured / rule`` is interpolated between the measured ops of
the same kind (op, dtypes, layout of the operands, vectorised or not), by inverse distance in the logarithms of the
sizes that the family's cost depends on, and ``time = rule * ratio``. Ops of a kind that was not measured take the
neighbours of their family, at a distance. :func:`leave_one_out` says how good that is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from prism_plugins.costs.calibration import FamilyError, Figure
from prism_plugins.costs.families import base_name, family_of
from prism_plugins.costs.roofline import Roofline
from prism_plugins.costs.rules import attention_sizes, gemm_sizes
from prism_plugins.costs.traffic import is_vectorised, largest, operands_read, scalar, traffic
from prism_plugins.program.model import OpSignature

_NEIGHBOURS = 5
_POWER = 2.0
"""Weight of a neighbour: distance ** -power."""
_OTHER_KIND = 2.0
"""Distance (in doublings) between two kinds of one family."""
_FARTHEST = 8.0
"""Neighbours farther than this many doublings tell nothing: the op is then modelled."""
_MIN_DISTANCE = 0.05

_GEMMS = {"gemm", "batched_gemm", "scaled_gemm", "grouped_gemm"}
_ATTENTION = {
    "attention_forward",
    "attention_backward",
    "cudnn_attention_forward",
    "cudnn_attention_backward",
}


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """An interpolated time."""

    ratio: float
    """Measured over rule."""
    compute_share: float
    clock_mhz: float
    burst_clock_mhz: float
    distance: float
    """Of the nearest neighbour, in doublings of size."""


class _Point(msgspec.Struct, frozen=True):
    position: tuple[float, ...]
    kind: tuple
    ratio: float
    figure: Figure


class Interpolation:
    """Neighbours of every family of a calibration."""

    def __init__(self, figures: Sequence[Figure], roofline: Roofline) -> None:
        self._roofline = roofline
        self._points: dict[str, list[_Point]] = {}
        self._positions: dict[str, np.ndarray] = {}
        for figure in figures:
            family = family_of(figure.signature.op)
            if family is None or family == "free":
                continue
            rule_us = roofline.price(figure.signature).duration_ns / 1e3
            if rule_us > 0:
                point = _Point(
                    position_of(figure.signature), kind_of(figure.signature), figure.us / rule_us, figure
                )
                self._points.setdefault(family, []).append(point)
        for family, points in self._points.items():
            self._positions[family] = np.array([p.position for p in points])

    def estimate(self, signature: OpSignature, *, without: Figure | None = None) -> Estimate | None:
        """Interpolate at a signature; None where nothing measured is near. ``without`` leaves one figure out."""
        family = family_of(signature.op)
        points = self._points.get(family or "")
        if not points:
            return None
        kind = kind_of(signature)
        distance = np.abs(self._positions[family or ""] - np.array(position_of(signature))).sum(axis=1)
        distance = distance + np.array([_kind_distance(kind, p.kind) for p in points])
        if without is not None:
            distance[[p.figure is without for p in points]] = np.inf
        order = np.argsort(distance)[:_NEIGHBOURS]
        order = order[distance[order] <= _FARTHEST]
        if not len(order):
            return None
        weights = np.maximum(distance[order], _MIN_DISTANCE) ** -_POWER
        weights /= weights.sum()
        near = [points[i] for i in order.tolist()]
        return Estimate(
            ratio=math.exp(float(weights @ np.log([p.ratio for p in near]))),
            compute_share=float(weights @ np.array([p.figure.compute_share for p in near])),
            clock_mhz=float(weights @ np.array([p.figure.clock_mhz for p in near])),
            burst_clock_mhz=float(weights @ np.array([p.figure.burst_clock_mhz for p in near])),
            distance=float(distance[order[0]]),
        )

    def leave_one_out(self) -> dict[str, FamilyError]:
        """Error of every family when each of its figures is predicted from the others."""
        errors: dict[str, FamilyError] = {}
        for family, points in sorted(self._points.items()):
            mine = []
            for point in points:
                estimate = self.estimate(point.figure.signature, without=point.figure)
                if estimate is not None:
                    mine.append(abs(estimate.ratio / point.ratio - 1))
            if mine:
                errors[family] = FamilyError(
                    count=len(mine),
                    median=round(statistics.median(mine), 4),
                    p95=round(float(np.percentile(mine, 95)), 4),
                )
        return errors


def position_of(s: OpSignature) -> tuple[float, ...]:
    """Where an op lies: log2 of the sizes its family's cost depends on (always four numbers)."""
    family = family_of(s.op)
    if family in _GEMMS and (sizes := gemm_sizes(s)) is not None:
        return tuple(math.log2(max(1, n)) for n in sizes)
    if family in _ATTENTION and (shape := attention_sizes(s)) is not None:
        batch_heads, queries, keys, width = shape
        return (
            math.log2(max(1, batch_heads)), math.log2(max(1, queries)), math.log2(max(1, keys)), math.log2(max(1, width))
        )  # fmt: skip
    big = largest(s)
    row = big.shape[-1] if big is not None and big.shape else 1
    if family in ("foreach", "fused_optimizer", "multi_tensor"):
        row = max(1, len(s.inputs))
    # The row matters less than the bytes: kernels differ by it, but not in proportion.
    return (math.log2(1 + traffic(s)), 0.3 * math.log2(max(1, row)), 0.0, 0.0)


def kind_of(s: OpSignature) -> tuple:
    """What must be equal for two ops to run the same kind of kernel, most important first."""
    family = family_of(s.op)
    dtypes = tuple(t.dtype for t in s.inputs[:3])
    if family in _GEMMS:
        return (base_name(s.op), dtypes[-1:], _layout(s))
    if family in _ATTENTION:
        return (base_name(s.op), dtypes[:1], bool(scalar(s, "is_causal")))
    operands = operands_read(s)
    return (base_name(s.op), dtypes, is_vectorised((*operands, *s.outputs)), _reduced(s))


def _layout(s: OpSignature) -> tuple[bool, ...]:
    """Which operands are transposed: the inner stride is not 1."""
    return tuple(len(t.shape) >= 2 and bool(t.strides) and t.strides[-1] != 1 for t in s.inputs[-2:])


def _reduced(s: OpSignature) -> object:
    """Whether a reduction or concatenation runs along the last dimension."""
    dim = scalar(s, "dim")
    if isinstance(dim, tuple):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int) or not s.inputs:
        return None
    return dim == -1 or dim == len(s.inputs[0].shape) - 1


def _kind_distance(a: tuple, b: tuple) -> float:
    return sum(_OTHER_KIND for x, y in zip(a, b, strict=False) if x != y)
