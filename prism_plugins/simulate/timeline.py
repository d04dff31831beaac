"""What the simulation returns."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.prediction import Breakdown


class OpTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted times of one rank's events, aligned with the rows of its program's ``events``; ns from the start
    of the iteration. Rows that take no device time have start == end."""

    host_ns: np.ndarray
    """When the host issues the event, shape (num_events,), float64."""
    start_ns: np.ndarray
    """When the device comes to it. For a COMM: when the collective's kernel starts on this rank (it may wait there
    for the other members). A kernel may wait for kernels of other streams."""
    end_ns: np.ndarray
    transfer_start_ns: np.ndarray
    """When that wait ends: the last member arrived and data moves, or the kernel runs. Equals start_ns elsewhere."""
    lane: np.ndarray
    """int32: stream number for compute; for COMM ``COMM_LANE + group index``."""


COMM_LANE = 1 << 16
"""Lanes from here on are communicators."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted timeline of the whole job over one steady iteration."""

    iteration_time_ns: float
    class_time_ns: tuple[float, ...]
    """Per class: when its slowest rank finishes."""
    slowest_class: int
    slowest_rank: int
    breakdown: tuple[Breakdown, ...]
    """Per class (its slowest rank)."""
    unpriced: dict[str, int]
    """Op name → occurrences over the exemplars of all classes."""
    seconds: float
    """Wall time of the simulation itself."""
    slowdown_ns: float = 0.0
    """By how much kernels last longer for the collectives beside them and wait for other streams' kernels, on the cell
    where it is most."""
    crowding_ns: float = 0.0
    """The same of transfers for others on their link."""
