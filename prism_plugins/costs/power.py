"""At which clock a power-capped GPU runs a program.

The board draws ``static + dynamic``; an op's dynamic power scales with ``clock ** exponent``. Over an iteration the
power limiter lets the clock rise until the time-weighted power meets the cap, so the clock of a program is the highest
``f`` with::

    sum_i n_i t_i(f) (static + dynamic_i (f / f_job) ** exponent) + idle * static <= cap * (sum_i n_i t_i(f) + idle)

``dynamic_i`` comes from running the op alone until its power was steady; ops of which that was not measured take the
mean of their family. The exponent is the one that best explains the power of the replayed mixes at their clocks.
Limits: one clock for the whole iteration (the limiter averages over tens of milliseconds), a GPU that waits draws its
static power, and memory power is taken to scale like the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from prism_plugins.costs.calibration import Figure, PowerModel
from prism_plugins.costs.families import family_of

_EXPONENTS = np.arange(1.0, 4.01, 0.1)
_LOWEST_CLOCK = 0.3
"""Of the maximum."""
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
    mixes: Sequence[tuple[WeightedMix, float, float]],
) -> PowerModel:
    """The power model of measured figures; each mix comes with the mean clock (MHz) and power (W) it ran at."""
    measured = [f for f in figures if f.power_w > static_w and f.power_clock_mhz > 0]
    clocks = [clock for _, clock, _ in mixes if clock > 0]
    job_clock = float(np.mean(clocks)) if clocks else max_clock_mhz
    best: tuple[float, PowerModel] | None = None
    for exponent in _EXPONENTS.tolist():
        families: dict[str, list[float]] = {}
        for f in measured:
            dynamic = (f.power_w - static_w) * (job_clock / f.power_clock_mhz) ** exponent
            families.setdefault(power_family(f.signature.op), []).append(dynamic)
        model = PowerModel(
            cap_w=cap_w,
            static_w=static_w,
            exponent=round(exponent, 2),
            max_clock_mhz=max_clock_mhz,
            job_clock_mhz=round(job_clock, 1),
            family_w={name: round(float(np.mean(values)), 1) for name, values in sorted(families.items())},
        )
        error = 0.0
        for mix, clock, watts in mixes:
            if clock > 0 and watts > 0:
                error += (_mix_power(model, mix, clock) / watts - 1) ** 2
        if best is None or error < best[0]:
            best = (error, model)
    assert best is not None
    return best[1]


def power_family(op: str) -> str:
    """The family whose mean stands for an op."""
    return family_of(op) or "elementwise"


def dynamic_w(model: PowerModel, figure: Figure) -> float:
    """Dynamic power of an op at the model's job clock, W."""
    if figure.power_w > model.static_w and figure.power_clock_mhz > 0:
        return (figure.power_w - model.static_w) * (
            model.job_clock_mhz / figure.power_clock_mhz
        ) ** model.exponent
    return family_dynamic_w(model, figure.signature.op)


def family_dynamic_w(model: PowerModel, op: str) -> float:
    """Dynamic power at the job clock of an op that was not measured, W."""
    default = _DEFAULT_DYNAMIC * (model.cap_w - model.static_w)
    return model.family_w.get(power_family(op), model.family_w.get("elementwise", default))


def _mix_power(model: PowerModel, mix: WeightedMix, clock: float) -> float:
    us = np.array([f.us * n for f, n in mix])
    dynamic = np.array([dynamic_w(model, f) for f, _ in mix])
    scale = (clock / model.job_clock_mhz) ** model.exponent
    return model.static_w + float((us * dynamic).sum() / us.sum()) * scale


def solve_clock(
    model: PowerModel,
    *,
    us: np.ndarray,
    compute_share: np.ndarray,
    dynamic: np.ndarray,
    idle_us: float = 0.0,
) -> float:
    """The clock (MHz) of an iteration, shape (num_ops,) each: total time of every op at the job clock, the share of it
    that scales with the clock, dynamic power at the job clock (W); and the time in which the GPU waits."""

    def surplus(clock: float) -> float:
        ratio = model.job_clock_mhz / clock
        times = us * (compute_share * ratio + 1 - compute_share)
        energy = float((times * (model.static_w + dynamic * ratio**-model.exponent)).sum())
        return energy + idle_us * model.static_w - model.cap_w * (float(times.sum()) + idle_us)

    low, high = _LOWEST_CLOCK * model.max_clock_mhz, model.max_clock_mhz
    if not len(us) or surplus(high) <= 0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if surplus(middle) > 0 else (middle, high)
    return low
