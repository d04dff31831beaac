"""Integration of the fake framework, found by entry point like any other."""

import os

from prism_plugins.errors import PrismError
from prism_plugins.program.model import Phase
from prism_plugins.program.slices import JobFacts, StageInfo
from prism_plugins.world.layout import Layout

SCHEDULE = (Phase(kind="forward", microbatch=0), Phase(kind="optimizer"))


class FakeIntegration:
    name = "fake"

    def install(self, context):
        context.on_import("fake_framework", lambda module: hook(module, context))

    def rewrite_log(self, lines, prediction):
        return [f"{line} | predicted {prediction.iteration_time_ms:.3f} ms" for line in lines]


def hook(module, context):
    def setup(tp, pp):
        world = context.spec.world_size
        if world % (tp * pp):
            raise PrismError(f"the world size {world} is not divisible by tp {tp} x pp {pp}")
        context.set_facts(
            JobFacts(
                framework="fake",
                layout=Layout(world_size=world, tp=tp, pp=pp, dp=world // tp // pp),
                stages=tuple(StageInfo(fingerprint=f"stage {i}", schedule=SCHEDULE) for i in range(pp)),
                tokens_per_iteration=8 * world,
                model_flops_per_iteration=1e9,
            )
        )
        return original_setup(tp, pp)

    def train_step(*args):
        context.begin_iteration()
        loss = original_step(*args)
        context.end_iteration()
        return loss

    def forward(*args):
        context.begin_phase(SCHEDULE[0])
        return original_forward(*args)

    def step(*args):
        context.begin_phase(SCHEDULE[1])
        return original_optimizer(*args)

    def log(iteration, loss):
        original_log(iteration, loss)
        if context.spec.rank == context.spec.world_size - 1:
            context.log_line(f" iteration {iteration}")

    original_setup = context.patch(module, "setup", setup, why="layout")
    original_step = context.patch(module, "train_step", train_step, why="iterations")
    original_forward = context.patch(module, "forward", forward, why="phase")
    original_optimizer = context.patch(module, "step", step, why="phase")
    original_log = context.patch(module, "log", log, why="log")
    assert "PRISM_SLICE" in os.environ
