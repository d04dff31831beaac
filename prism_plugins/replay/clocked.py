"""The recorder of a replay without a GPU: the script runs on the virtual device once more, its clocks at simulated time."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from prism_plugins.capture.recorder import RecordedIteration, Recorder, recorded_events
from prism_plugins.device import library
from prism_plugins.program.model import EventKind
from prism_plugins.program.replay import VIRTUAL_CLOCK, ClockPlan, ReplayResult
from prism_plugins.replay.virtual_clock import VirtualClock
from prism_plugins.rundir import read_json

_SETTLING = 2
"""Iterations that may do other things: optimizer state is made, caches are filled."""


class ClockedRecorder(Recorder):
    """See the module docstring.

    Args:
        plan: what the simulation says of the rank.
        iterations: to run.
    """

    def __init__(self, plan: ClockPlan, *, iterations: int) -> None:
        super().__init__()
        self.clock = VirtualClock(plan, count=lambda: library.call("num_events"), events=recorded_events)
        self._rank = plan.rank
        self._iterations = iterations
        self._times: list[float] = []
        self._strange = 0
        self._ended = 0

    @classmethod
    def of_plan(cls, path: Path, *, iterations: int) -> ClockedRecorder:
        """The recorder for a plan file. Raises FileFormatError for a file that is none."""
        return cls(read_json(path, ClockPlan), iterations=iterations)

    @property
    def has_program(self) -> bool:
        """Whether enough iterations were run."""
        return self._ended >= self._iterations

    def start(self) -> None:
        """An iteration begins."""
        super().start()
        self._times.append(self.clock.begin())

    def stop(self) -> RecordedIteration:
        """An iteration ended."""
        iteration = super().stop()
        as_simulated = self.clock.end(iteration.events)
        self._ended += 1
        if self._ended > _SETTLING and not as_simulated:
            self._strange += 1
        return iteration

    def result(self) -> ReplayResult:
        """What was seen."""
        stats = self.stats()
        return ReplayResult(
            rank=self._rank,
            iteration_ms=tuple((b - a) / 1e6 for a, b in itertools.pairwise(self._times)),
            calls=int(np.count_nonzero(self.clock.kinds == EventKind.COMM)),
            strange=self._strange,
            timer=VIRTUAL_CLOCK,
            peak_allocated_bytes=stats.peak_allocated_bytes,
            peak_requested_bytes=stats.peak_requested_bytes,
            peak_reserved_bytes=stats.peak_reserved_bytes,
        )
