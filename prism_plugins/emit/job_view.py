"""The simulated job as the outputs look at it: the program and the times of any rank."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.emit.kineto import TraceContext
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import Program
from prism_plugins.program.slices import GpuFacts
from prism_plugins.simulate.expand import CallStarts
from prism_plugins.simulate.timeline import OpTimes, Timeline


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """What inference, costs and simulation gave, and questions about single ranks."""

    job: JobPrograms
    costs: CostModel
    timeline: Timeline | None
    """None when the job would not run; then there are no times to show."""
    gpu: GpuFacts
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks of the target world."""
        return self.job.layout.world_size

    def timed_program(self, rank: int) -> tuple[Program, OpTimes]:
        """The program of a rank and the predicted times of its events."""
        from prism_plugins.simulate.engine import op_times

        return self.program(rank), op_times(self.job, self.costs, self.timeline, rank)

    def program(self, rank: int) -> Program:
        """The program of a rank, represented or inferred."""
        from prism_plugins.program.infer import program_of

        return program_of(self.job, rank)

    def call_starts(self, rank: int) -> CallStarts:
        """When a rank comes to each of its calls. The view needs a timeline."""
        from prism_plugins.simulate.engine import call_starts_of

        return call_starts_of(self.job, self.costs, self.timeline, rank)

    def cell_of_rank(self) -> np.ndarray:
        """Which ranks have the same times: a number for each rank, shape (world_size,). The view needs a timeline."""
        from prism_plugins.simulate.engine import cell_of_rank

        return cell_of_rank(self.job, self.costs, self.timeline)

    def trace_context(self) -> TraceContext:
        """What every trace says about the job."""
        return TraceContext(
            world_size=self.world_size,
            iteration_time_ns=self.timeline.iteration_time_ns,
            gpus_per_node=self.gpus_per_node,
            gpu=self.gpu,
            cost_model=self.costs.name,
            price_op=self.costs.price_op,
        )

    def ranks_to_trace(self, *, max_events: int) -> tuple[list[int], int]:
        """One rank per class, the slowest, the first and the last class before the others, as many as fit into
        ``max_events`` rows but at least one; and how many classes were left out. Nothing when the job would not run."""
        if self.timeline is None:
            return [], 0
        slowest = self.timeline.slowest_class
        order = list(dict.fromkeys((slowest, 0, len(self.job.classes) - 1, *range(len(self.job.classes)))))
        ranks: list[int] = []
        rows = 0
        for i in order:
            symmetric = self.job.classes[i]
            rows += len(symmetric.exemplar.events)
            if ranks and rows > max_events:
                continue
            ranks.append(self.timeline.slowest_rank if i == slowest else int(symmetric.ranks[0]))
        return ranks, len(order) - len(ranks)
