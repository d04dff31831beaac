"""Prices an op near measured ones: the cost rule's estimate times how wrong the rule was for the nearest neighbours.

The rule (:mod:`prism_plugins.costs.rules`) knows the shape of the cost: arithmetic with tile and wave quantisation for
GEMMs, ``latency + bytes / bandwidth`` for the rest. What it does not know, the kernel that is chosen and how much of
peak it reaches, varies slowly with size. So ``log(measured / rule)`` is interpolated between the measured ops of one
family, and ``time = rule * ratio``:

* GEMMs: first a linear trend in what their efficiency depends on (logarithms of the sizes, how far the waves fill the
  GPU, the layout of the operands), by ridge regression; then the neighbours' residuals.
* Attention: first what its thread blocks waste (:mod:`prism_plugins.costs.attention_tiles`), then a trend in the width of
  the heads and the causal mask, then the neighbours' residuals.
* All families: inverse-distance weights of the nearest neighbours, in the logarithms of the sizes that matter, with a
  distance between kinds (op, dtypes, access pattern of the operands).

Where nothing measured is near, there is no estimate and the rule alone prices the op. :func:`leave_one_out` says how
good all this is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from prism_plugins.costs.attention_tiles import (
    CUDNN,
    EFFICIENT_BACKWARD,
    EFFICIENT_FORWARD,
    FLASH_BACKWARD,
    FLASH_FORWARD,
    log_waste,
)
from prism_plugins.costs.calibration import NEAR, FamilyError, Figure
from prism_plugins.costs.families import base_name, family_of
from prism_plugins.costs.roofline import Roofline
from prism_plugins.costs.rules import attention_sizes, gemm_sizes
from prism_plugins.costs.traffic import is_dense, largest, operands_read, scalar, traffic
from prism_plugins.program.model import DTYPE_BYTES, OpSignature, TensorSpec

_NEIGHBOURS = 5
_POWER = 2.0
"""Weight of a neighbour: distance ** -power."""
_FARTHEST = 6.0
"""Neighbours farther than this many doublings of size tell nothing."""
_MIN_DISTANCE = 0.05
_RIDGE = 0.1
_SHRINK = 0.3
"""A trend's residuals count in full only beside their measured op: weight of no residual at all."""

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


class _Group(msgspec.Struct):
    """The measured ops of one family (and number format) as arrays over them."""

    points: list[_Point]
    positions: np.ndarray
    log_ratios: np.ndarray
    known: np.ndarray
    """What of the logarithms needs no fitting."""
    features: np.ndarray | None
    """Shape (num_points, num_features); None for families without a trend."""
    trend: np.ndarray | None


class Interpolation:
    """Neighbours of every family of a calibration."""

    def __init__(self, figures: Sequence[Figure], roofline: Roofline) -> None:
        self._num_sms = roofline.gpu.num_sms
        points: dict[tuple, list[_Point]] = {}
        for figure in figures:
            s = figure.signature
            if family_of(s.op) in (None, "free"):
                continue
            rule_us = roofline.price(s).duration_ns / 1e3
            if rule_us > 0:
                point = _Point(position_of(s), kind_of(s), figure.us / rule_us, figure)
                points.setdefault(_group_of(s), []).append(point)
        self._groups = {key: self._make_group(members) for key, members in points.items()}

    def _make_group(self, members: list[_Point]) -> _Group:
        rows = [features_of(p.figure.signature, self._num_sms) for p in members]
        features = np.array(rows) if all(row is not None for row in rows) else None
        log_ratios = np.log([p.ratio for p in members])
        known = np.array([known_log_ratio(p.figure.signature, self._num_sms) for p in members])
        return _Group(
            points=members,
            positions=np.array([p.position for p in members]),
            log_ratios=log_ratios,
            known=known,
            features=features,
            trend=None if features is None else _fit(features, log_ratios - known),
        )

    def estimate(self, signature: OpSignature, *, without: Figure | None = None) -> Estimate | None:
        """Interpolate at a signature; None where nothing measured is near. ``without`` leaves one figure out."""
        group = self._groups.get(_group_of(signature))
        if group is None:
            return None
        kind = kind_of(signature)
        distance = np.abs(group.positions - np.array(position_of(signature))).sum(axis=1)
        distance = distance + np.array([_kind_distance(kind, p.kind) for p in group.points])
        left = np.array([p.figure is not without for p in group.points])
        distance[~left] = np.inf
        order = np.argsort(distance)[:_NEIGHBOURS]
        order = order[distance[order] <= _FARTHEST]
        if not len(order):
            return None
        weights = np.maximum(distance[order], _MIN_DISTANCE) ** -_POWER
        own = features_of(signature, self._num_sms)
        if group.features is None or own is None or group.trend is None:
            weights /= weights.sum()
            log_ratio = float(weights @ group.log_ratios[order])
        else:
            unknown = group.log_ratios - group.known
            trend = group.trend if without is None else _fit(group.features[left], unknown[left])
            residuals = unknown[order] - group.features[order] @ trend
            log_ratio = known_log_ratio(signature, self._num_sms) + float(own @ trend)
            log_ratio += float(weights @ residuals) / (float(weights.sum()) + _SHRINK)
            weights /= weights.sum()
        near = [group.points[i].figure for i in order.tolist()]
        return Estimate(
            ratio=math.exp(log_ratio),
            compute_share=float(weights @ np.array([f.compute_share for f in near])),
            clock_mhz=float(weights @ np.array([f.clock_mhz for f in near])),
            burst_clock_mhz=float(weights @ np.array([f.burst_clock_mhz for f in near])),
            distance=float(distance[order[0]]),
        )

    def leave_one_out(self) -> dict[str, FamilyError]:
        """Error of every family when each of its figures is predicted from the others."""
        found: dict[str, list[tuple[float, float]]] = {}
        for group in self._groups.values():
            for point in group.points:
                s = point.figure.signature
                estimate = self.estimate(s, without=point.figure)
                if estimate is not None:
                    error = abs(estimate.ratio / point.ratio - 1)
                    found.setdefault(family_of(s.op) or "", []).append((error, estimate.distance))
        return {family: _family_error(*np.array(found[family]).T) for family in sorted(found)}


def _family_error(errors: np.ndarray, distances: np.ndarray) -> FamilyError:
    near = errors[distances <= NEAR]
    return FamilyError(
        count=len(errors),
        median=round(float(np.median(errors)), 4),
        p95=round(float(np.percentile(errors, 95)), 4),
        num_near=len(near),
        near_p95=round(float(np.percentile(near, 95)), 4) if len(near) else 0.0,
    )


def _fit(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ridge regression; the first feature is the constant and not penalised."""
    penalty = _RIDGE * np.eye(features.shape[1])
    penalty[0, 0] = 1e-6
    return np.linalg.solve(features.T @ features + penalty, features.T @ values)


def _group_of(s: OpSignature) -> tuple:
    """Ops of different groups say nothing about each other."""
    family = family_of(s.op)
    if family in _GEMMS:
        dtype = s.inputs[-1].dtype if s.inputs else ""
        # Tensor cores are as fast on both, and cuBLAS picks the same kernels.
        return (family, "bfloat16" if dtype == "float16" else dtype, _is_aligned(s))
    if family in _ATTENTION:
        return (family, "efficient" in s.op)
    return (family,)


def _is_aligned(s: OpSignature) -> bool:
    """Whether all rows begin at multiples of 16 bytes, without which cuBLAS takes slow kernels."""
    return all(t.shape[-1] * DTYPE_BYTES.get(t.dtype, 4) % 16 == 0 for t in s.inputs[-2:] if t.shape)


def features_of(s: OpSignature, num_sms: int) -> np.ndarray | None:
    """What the efficiency of a GEMM or of attention depends on, centred on usual sizes; None for other ops."""
    family = family_of(s.op)
    if family in _GEMMS and (sizes := gemm_sizes(s)) is not None and min(sizes) > 0:
        batch, m, n, k = sizes
        waves = batch * math.ceil(m / 128) * math.ceil(n / 256) / num_sms
        small = min(0.0, math.log2(2.0 * batch * m * n * k) - 36)
        return np.array(
            [
                1.0, math.log2(m) - 11, math.log2(n) - 12, math.log2(k) - 12, min(0.0, math.log2(waves)),
                waves / math.ceil(waves), small, small * small / 8, *map(float, _layout(s)),
            ]
        )  # fmt: skip
    if family in _ATTENTION and (sizes := attention_sizes(s)) is not None and min(sizes) > 0:
        return np.array([1.0, float(sizes[3] <= 64), float(bool(scalar(s, "is_causal")))])
    return None


def known_log_ratio(s: OpSignature, num_sms: int) -> float:
    """What attention's thread blocks waste; 0 for other ops."""
    family = family_of(s.op)
    if family not in _ATTENTION or (sizes := attention_sizes(s)) is None or min(sizes) <= 0:
        return 0.0
    backward = family.endswith("backward")
    if family.startswith("cudnn"):
        tiles = CUDNN
    elif "efficient" in s.op:
        tiles = EFFICIENT_BACKWARD if backward else EFFICIENT_FORWARD
    else:
        tiles = FLASH_BACKWARD if backward else FLASH_FORWARD
    heads, queries, keys, _ = sizes
    causal = bool(scalar(s, "is_causal"))
    return log_waste(
        tiles, heads=heads, queries=queries, keys=keys, causal=causal, backward=backward, num_sms=num_sms
    )


def position_of(s: OpSignature) -> tuple[float, ...]:
    """Where an op lies: log2 of the sizes its family's cost depends on (always four numbers)."""
    family = family_of(s.op)
    sizes = None
    if family in _GEMMS:
        sizes = gemm_sizes(s)
    elif family in _ATTENTION:
        sizes = attention_sizes(s)
    if sizes is not None:
        a, b, c, d = (math.log2(max(1, n)) for n in sizes)
        return (a, b, c, d)
    big = largest(s)
    row = big.shape[-1] if big is not None and big.shape else 1
    weight = 0.3
    if family in ("foreach", "fused_optimizer", "multi_tensor"):
        row = max(1, len(s.inputs))
    elif family == "cat":
        weight = 3.0
    # The row matters less than the bytes: kernels differ by it, but not in proportion.
    return (math.log2(1 + traffic(s)), weight * math.log2(max(1, row)), 0.0, 0.0)


def kind_of(s: OpSignature) -> tuple[tuple[object, float], ...]:
    """What must be equal for two ops to run the same kind of kernel, each with the distance that a difference makes."""
    family = family_of(s.op)
    name = base_name(s.op)
    if family in _GEMMS:
        return ((name, 1.0), (_layout(s), 1.0), (s.inputs[-1].dtype if s.inputs else "", 0.3))
    if family in _ATTENTION:
        return ((bool(scalar(s, "is_causal")), 2.0),)
    operands = (*operands_read(s), *s.outputs)
    dtypes = tuple(t.dtype for t in s.inputs[:2])
    pointwise = family in ("elementwise", "copy", "dropout", "fill", "foreach")
    patterns = tuple(dict.fromkeys(_pattern(t, operands[-1]) for t in operands)) if operands else ()
    return ((name, 2.0 if pointwise else 3.0), (dtypes, 3.0), (patterns, 4.0), (_reduced(s), 4.0))


def _pattern(t: TensorSpec, target: TensorSpec) -> str:
    """How an operand is walked through: as a block, by rows with gaps, transposed, or repeated."""
    if t.numel <= 1:
        return "scalar"
    if t.shape != target.shape or 0 in t.strides:
        inner = t.shape and target.shape and t.shape[-1] == target.shape[-1]
        return "repeated" if inner else "repeated inside"
    if is_dense(t) and (t.strides or ()) == (target.strides or ()):
        return "block"
    return "rows" if not t.strides or t.strides[-1] == 1 else "transposed"


def _layout(s: OpSignature) -> tuple[bool, bool]:
    """Which operands are transposed: the inner stride is not 1."""
    a, b = (len(t.shape) >= 2 and bool(t.strides) and t.strides[-1] != 1 for t in s.inputs[-2:])
    return a, b


def _reduced(s: OpSignature) -> object:
    """Whether a reduction or concatenation runs along the last dimension."""
    dim = scalar(s, "dim")
    if isinstance(dim, tuple):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int) or not s.inputs:
        return None
    return dim == -1 or dim == len(s.inputs[0].shape) - 1


def _kind_distance(a: tuple, b: tuple) -> float:
    return sum(weight for (x, weight), (y, _) in zip(a, b, strict=False) if x != y)
