"""At which clocks a power-capped GPU runs a program.

The board draws ``static + dynamic``. Op ``i`` was measured in a replayed mix at clock ``f_i``, its dynamic power there
is ``d_i`` and scales with ``clock ** exponent``. In a program with other proportions of ops the limiter settles at
other clocks. All of them are taken to move by one factor ``s``, an op's no further than its clock in a burst (peak
current limits GEMMs far below the maximum clock); ``s`` is where the time-weighted power of the program's busy time
is that which the same model gives the replayed mix most like it (least difference of time shares by family), for
that mix ran at the limit; a program that was replayed itself has ``s = 1``::

    sum_i n_i t_i(s f_i) (static + d_i s ** exponent) = mix_w * sum_i n_i t_i(s f_i)

``d_i`` comes from running the op alone until its power was steady; ops of which that was not measured take the mean
of their family. The exponent is that of a circuit whose voltage follows its clock: power ~ C V^2 f ~ f^3. Between a mix of
53 % GEMMs and one of 45 % on one H200 it gives clocks 3.8 % apart; GEMMs ran 3.5 % apart.

Limits: one factor for the whole iteration; memory power scales like the rest; waits are left out, because the limiter
acts within milliseconds (on two H200s a pipeline stage with bubbles ran its steps no faster than one without).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from prism_plugins.costs.calibration import Figure, MixState, PowerModel
from prism_plugins.costs.families import family_of

EXPONENT = 3.0
_SCALES = (0.88, 1.12)
"""Range of the factor: about that of the clocks at which mixes were measured."""
_DEFAULT_DYNAMIC = 0.6
"""Of cap minus static, for families without any measurement."""

WeightedMix = Sequence[tuple[Figure, float]]
"""Figures and how often each occurs."""


def power_model(
    figures: Iterable[Figure],
    *,
    cap_w: float,
    static_w: float,
    max_clock_mhz: float,
    mixes: Mapping[str, WeightedMix],
) -> PowerModel:
    """The power model of measured figures and of the mixes, by name, in which they were measured."""
    families: dict[str, list[tuple[float, float]]] = {}
    for f in figures:
        if f.power_w > static_w and f.power_clock_mhz > 0 and f.clock_mhz > 0:
            dynamic = (f.power_w - static_w) * (f.clock_mhz / f.power_clock_mhz) ** EXPONENT
            families.setdefault(power_family(f.signature.op), []).append((dynamic, f.clock_mhz))
    means = {name: np.mean(values, axis=0) for name, values in sorted(families.items())}
    model = PowerModel(
        cap_w=cap_w,
        static_w=static_w,
        exponent=EXPONENT,
        max_clock_mhz=max_clock_mhz,
        family_w={name: round(float(mean[0]), 1) for name, mean in means.items()},
        family_clock_mhz={name: round(float(mean[1]), 1) for name, mean in means.items()},
    )
    states = tuple(_state_of(model, name, mix) for name, mix in mixes.items() if mix)
    return msgspec.structs.replace(model, mixes=states)


def nearest_mix(model: PowerModel, shares: Mapping[str, float]) -> MixState | None:
    """The replayed mix whose time shares by family differ least."""

    def difference(mix: MixState) -> float:
        return sum(
            abs(mix.shares.get(f, 0.0) - shares.get(f, 0.0)) for f in mix.shares.keys() | shares.keys()
        )

    return min(model.mixes, key=difference, default=None)


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


def _state_of(model: PowerModel, name: str, mix: WeightedMix) -> MixState:
    us = np.array([f.us * n for f, n in mix])
    dynamic = np.array([dynamic_w(model, f) for f, _ in mix])
    clocks = np.array([f.clock_mhz for f, _ in mix])
    return MixState(
        name=name,
        clock_mhz=round(float((us * clocks).sum() / us.sum()), 1),
        model_w=round(model.static_w + float((us * dynamic).sum() / us.sum()), 1),
        shares=time_shares((f.signature.op for f, _ in mix), us),
    )


def time_shares(ops: Iterable[str], us: np.ndarray) -> dict[str, float]:
    """Share of time by family."""
    shares: dict[str, float] = {}
    for op, one in zip(ops, us.tolist(), strict=True):
        shares[power_family(op)] = shares.get(power_family(op), 0.0) + one / float(us.sum())
    return {name: round(share, 4) for name, share in shares.items() if share >= 5e-4}


def solve_scale(
    model: PowerModel,
    *,
    ops: Sequence[str],
    us: np.ndarray,
    compute_share: np.ndarray,
    dynamic: np.ndarray,
    headroom: np.ndarray,
) -> float:
    """The factor ``s`` of a program. Of every op, shape (num_ops,): name, total time as measured, the share of it that
    scales with the clock, dynamic power as measured (W), burst clock over measured clock."""
    mix = nearest_mix(model, time_shares(ops, us)) if len(us) else None
    if mix is None:
        return 1.0

    def surplus(scale: float) -> float:
        own = np.minimum(scale, headroom)
        times = us * (compute_share / own + 1 - compute_share)
        energy = float((times * (model.static_w + dynamic * own**model.exponent)).sum())
        return energy - mix.model_w * float(times.sum())

    low, high = _SCALES
    if surplus(high) <= 0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if surplus(middle) > 0 else (middle, high)
    return low
