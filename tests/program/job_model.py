"""Programs of all ranks of a small job: a pipeline of stages and a distributed optimizer; tensor parallelism only decides what a rank counts
in the gradient norm."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.program.model import EventKind, GroupInfo, Program
from prism_plugins.program.slices import JobFacts, OptimizerShard, SliceReport, StageInfo
from prism_plugins.world.layout import Layout
from tests.program.optimizer_model import cut_into_shards, step_program
from tests.program.pipeline_model import make_program, schedule_of

LAYER = [(8192, True, 0, False), (4096, True, 0, False), (64, False, 1, False), (64, False, 1, False)]


class SmallJob:
    """What the slices of all ranks would give."""

    def __init__(
        self, *, pp: int, dp: int, num_microbatches: int, num_layers: int = 4, tp: int = 1, **kind
    ) -> None:
        self.layout = Layout(world_size=pp * dp * tp, tp=tp, pp=pp, dp=dp, num_microbatches=num_microbatches)
        self.shards = [
            cut_into_shards(
                [(1024 * (stage == 0), True, 0, False)] * (stage == 0) + LAYER * num_layers,
                num_ranks=dp,
                num_groups=2,
            )
            for stage in range(pp)
        ]
        self.programs: dict[int, Program] = {}
        self.reports: dict[int, SliceReport] = {}
        schedules = []
        for stage in range(pp):
            stage_program = make_program(
                stage=stage, num_stages=pp, num_microbatches=num_microbatches, **kind
            )
            schedules.append(schedule_of(stage_program))
        stages = tuple(
            StageInfo(fingerprint="layers" if 0 < s < pp - 1 else f"stage {s}", schedule=schedules[s])
            for s in range(pp)
        )
        for rank in range(pp * dp * tp):
            stage, index, tp_rank = rank // tp // dp, rank // tp % dp, rank % tp
            pipeline = make_program(
                stage=stage,
                num_stages=pp,
                num_microbatches=num_microbatches,
                first_id=5000 + 11 * rank,
                **kind,
            )
            pipeline.groups = [
                GroupInfo(
                    ranks=tuple((index + dp * s) * tp + tp_rank for s in range(pp)),
                    name="pp",
                    desc="PIPELINE",
                )
            ]
            step = step_program(
                (self.shards[stage][index],), rank=rank, tp_first=tp_rank == 0, num_ranks=pp * dp * tp
            )
            self.programs[rank] = _one_after_the_other(rank, pipeline, step)
            self.reports[rank] = SliceReport(
                rank=rank, status="ok", facts=self._facts(stages, self.shards[stage])
            )
        self.facts = self.reports[0].facts

    def _facts(self, stages: tuple[StageInfo, ...], shards: tuple[OptimizerShard, ...]) -> JobFacts:
        return JobFacts(framework="test", layout=self.layout, stages=stages, shards=shards)


def _one_after_the_other(rank: int, first: Program, second: Program) -> Program:
    tail = second.events.copy()
    for kinds, offset in (
        ((EventKind.KERNEL,), len(first.signatures)),
        ((EventKind.COMM,), len(first.comms)),
        ((EventKind.PHASE_BEGIN, EventKind.PHASE_END), len(first.phases)),
    ):
        tail["ref"][np.isin(tail["kind"], kinds)] += offset
    return Program(
        rank=rank,
        events=np.concatenate([first.events, tail]),
        signatures=[*first.signatures, *second.signatures],
        comms=[
            *first.comms,
            *(msgspec.structs.replace(c, group=c.group + len(first.groups)) for c in second.comms),
        ],
        groups=[*first.groups, *second.groups],
        phases=[*first.phases, *second.phases],
        initial=second.initial,
    )
