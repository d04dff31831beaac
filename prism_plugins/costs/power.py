"""At which clocks a power-capped GPU runs a program.

The board draws ``static + dynamic``. Op ``i`` was measured in a replayed mix at clock ``f_i``, its dynamic power there
is ``d_i`` and scales with ``clock ** exponent``. In another program, with other proportions of ops or with bubbles, the
limiter settles at other clocks. All of them are taken to move by one factor ``s``, an op's no further than its clock
in a burst (peak current limits GEMMs far below the maximum clock); ``s`` is where the time-weighted power of the
program is that of the mixes, which ran at the limit::

    sum_i n_i t_i(s f_i) (static + d_i s ** exponent) + idle * static = mix_w * (sum_i n_i t_i(s f_i) + idle)

``d_i`` comes from running the op alone until its power was steady; ops of which that was not measured take the mean
of their family. The exponent is the one with which the replayed mixes agree best on one power.
Limits: one factor for the whole iteration (the limiter averages over some milliseconds), a GPU that waits draws its
static power, memory power scales like the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from prism_plugins.costs.calibration import Figure, PowerModel
from prism_plugins.costs.families import family_of

_EXPONENTS = tuple(round(1.0 + 0.1 * i, 1) for i in range(31))
_SCALES = (0.6, 1.5)
"""Range of the factor."""
_DEFAULT_DYNAMIC = 0.6
"""Of cap minus static, for families without any measurement."""

WeightedMix = Sequence[tuple[Figure, float]]
"""Figures and how often each occurs."""


def fit_power(
    figures: Iterable[Figure],
    *,
    cap_w: float,
    static_w: float,
    max_clock_mhz: float,
    mixes: Sequence[WeightedMix],
) -> PowerModel:
    """The power model of measured figures and of the mixes in which they were measured, in the order of their
    importance: the exponent is fitted on all, ``mix_w`` is that of all together."""
    measured = [f for f in figures if f.power_w > static_w and f.power_clock_mhz > 0 and f.clock_mhz > 0]
    best: tuple[float, PowerModel] | None = None
    for exponent in _EXPONENTS:
        families: dict[str, list[tuple[float, float]]] = {}
        for f in measured:
            dynamic = (f.power_w - static_w) * (f.clock_mhz / f.power_clock_mhz) ** exponent
            families.setdefault(power_family(f.signature.op), []).append((dynamic, f.clock_mhz))
        means = {name: np.mean(values, axis=0) for name, values in sorted(families.items())}
        model = PowerModel(
            cap_w=cap_w,
            static_w=static_w,
            exponent=exponent,
            max_clock_mhz=max_clock_mhz,
            mix_clock_mhz=max_clock_mhz,
            mix_w=cap_w,
            family_w={name: round(float(mean[0]), 1) for name, mean in means.items()},
            family_clock_mhz={name: round(float(mean[1]), 1) for name, mean in means.items()},
        )
        states = np.array([_power_and_clock(model, mix) for mix in mixes if mix] or [(cap_w, max_clock_mhz)])
        model = PowerModel(
            **{
                **{name: getattr(model, name) for name in PowerModel.__struct_fields__},
                "mix_w": round(float(states[:, 0].mean()), 1),
                "mix_clock_mhz": round(float(states[:, 1].mean()), 1),
            }
        )
        disagreement = float(states[:, 0].std() / states[:, 0].mean())
        if best is None or disagreement < best[0]:
            best = (disagreement, model)
    assert best is not None
    return best[1]


def power_family(op: str) -> str:
    """The family whose mean stands for an op."""
    return family_of(op) or "elementwise"


def dynamic_w(model: PowerModel, figure: Figure) -> float:
    """Dynamic power of a measured op at the clock it was measured at, W."""
    if figure.power_w > model.static_w and figure.power_clock_mhz > 0 and figure.clock_mhz > 0:
        return (figure.power_w - model.static_w) * (
            figure.clock_mhz / figure.power_clock_mhz
        ) ** model.exponent
    return family_dynamic_w(model, figure.signature.op, figure.clock_mhz)


def family_dynamic_w(model: PowerModel, op: str, clock_mhz: float) -> float:
    """Dynamic power of an op whose power was not measured, at a clock (0: that of its family), W."""
    family = power_family(op)
    if family not in model.family_w:
        family = "elementwise"
    watts = model.family_w.get(family, _DEFAULT_DYNAMIC * (model.cap_w - model.static_w))
    known = model.family_clock_mhz.get(family, 0.0)
    return watts * (clock_mhz / known) ** model.exponent if clock_mhz and known else watts


def _power_and_clock(model: PowerModel, mix: WeightedMix) -> tuple[float, float]:
    us = np.array([f.us * n for f, n in mix])
    dynamic = np.array([dynamic_w(model, f) for f, _ in mix])
    clocks = np.array([f.clock_mhz for f, _ in mix])
    return model.static_w + float((us * dynamic).sum() / us.sum()), float((us * clocks).sum() / us.sum())


def solve_scale(
    model: PowerModel,
    *,
    us: np.ndarray,
    compute_share: np.ndarray,
    dynamic: np.ndarray,
    headroom: np.ndarray,
    idle_us: float = 0.0,
) -> float:
    """The factor ``s`` of a program. Arrays of shape (num_ops,): total time of each op as measured, the share of it
    that scales with the clock, dynamic power as measured (W), burst clock over measured clock; and the time in which
    the GPU waits."""

    def surplus(scale: float) -> float:
        own = np.minimum(scale, headroom)
        times = us * (compute_share / own + 1 - compute_share)
        energy = float((times * (model.static_w + dynamic * own**model.exponent)).sum())
        return energy + idle_us * model.static_w - model.mix_w * (float(times.sum()) + idle_us)

    low, high = _SCALES
    if not len(us) or surplus(high) <= 0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if surplus(middle) > 0 else (middle, high)
    return low
