"""Program, times and device spans of ranks, each made once."""

from __future__ import annotations

from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.spans import DeviceSpans, device_spans
from prism_plugins.program.model import Program
from prism_plugins.simulate.timeline import OpTimes


class RankSpans:
    """Keeps what was made: tens of MB a rank of a large job, for as long as a report is written."""

    def __init__(self, view: JobView) -> None:
        self.view = view
        self._made: dict[int, tuple[Program, OpTimes, DeviceSpans]] = {}

    def of(self, rank: int) -> tuple[Program, OpTimes, DeviceSpans]:
        """Of one rank."""
        if rank not in self._made:
            program, times = self.view.timed_program(rank)
            self._made[rank] = program, times, device_spans(program, times)
        return self._made[rank]
