"""The schedule of every pipeline stage and what it holds, told from DeepSpeed's own classes."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from prism_plugins.errors import PrismError
from prism_plugins.integrations.deepspeed.pipeline import _train_batch, stage_schedules
from prism_plugins.integrations.deepspeed.stages import stage_contents
from prism_plugins.program.schedule import describe
from prism_plugins.program.slices import StageInfo
from prism_plugins.world.classes import captured_stages


class Engine(PipelineEngine):
    """An engine of stage 0 without a model."""

    def __init__(self, stages: int, micro_batches: int) -> None:
        self.num_stages, self.micro_batches, self.stage_id = stages, micro_batches, 0


def schedule_of(stage: int, *, stages: int, micro_batches: int) -> list[str]:
    return [describe(phase) for phase in stage_schedules(Engine(stages, micro_batches))[stage]]


def test_a_stage_runs_deepspeeds_instructions_in_order():
    assert schedule_of(1, stages=2, micro_batches=2) == [
        "recv_forward[0]",
        "load_microbatch[0]",
        "forward[mb 0]",
        "backward[mb 0]",
        "send_backward[0]",
        "recv_forward[1]",
        "load_microbatch[1]",
        "forward[mb 1]",
        "backward[mb 1]",
        "send_backward[1]",
        "reduce_tied_grads",
        "reduce_grads",
        "optimizer",
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 8), (8, 5)])
def test_every_stage_works_on_all_micro_batches_once(stages: int, micro_batches: int):
    for stage, phases in enumerate(stage_schedules(Engine(stages, micro_batches))):
        names = [name for phase in phases for name, _ in phase.parts]
        assert len(set(phases)) == len(phases)
        assert names.count("forward") == names.count("backward") == micro_batches
        assert names.count("recv_forward") == names.count("send_backward") == (micro_batches if stage else 0)
        assert names.count("load_microbatch") == (micro_batches if stage in (0, stages - 1) else 0)


def test_what_deepspeed_cannot_do_itself_is_one_line():
    def train_batch(self):
        raise AssertionError("bwd_microstep timer has already been started")

    session = SimpleNamespace(training_begins=lambda engine: None)
    with pytest.raises(PrismError, match='"wall_clock_breakdown": true, also on real GPUs'):
        _train_batch(session, train_batch, None)(Engine(2, 2))


class Block(nn.Module):
    def __init__(self, size: int, number: int = 0, config: object = None) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(size, size), number


def contents(specs: list, parts: list[int], loss_fn=nn.functional.cross_entropy):
    topology = PipeDataParallelTopology(num_pp=len(parts) - 1, num_dp=1)
    return stage_contents(
        SimpleNamespace(_layer_specs=specs, parts=parts, topology=lambda: topology, loss_fn=loss_fn)
    )


def test_stages_of_equal_layers_have_equal_fingerprints():
    specs = [LayerSpec(nn.Embedding, 9, 4), *[LayerSpec(Block, 4) for _ in range(6)], nn.Linear(4, 9)]
    first, second, third, last = contents(specs, [0, 2, 4, 6, 8]).fingerprints
    assert second == third
    assert second.startswith("2x Block-")
    assert len({first, second, last}) == 3
    assert "loss" in last


def test_more_layers_or_other_arguments_are_another_stage():
    config = SimpleNamespace()
    same = LayerSpec(Block, 4, config=config)
    for other in (
        [LayerSpec(Block, 4, config=config)] * 2,
        [LayerSpec(Block, 5, config=config)],
        [LayerSpec(Block, 4, config=SimpleNamespace())],
        [functools.partial(torch.mul, 2)],
        [lambda x: x * 2],
        [Block(4)],
    ):
        specs = [same, same, *other, same]
        found = contents(specs, [0, 1, 2, 2 + len(other), 3 + len(other)]).fingerprints
        assert found[1] != found[2], other


def test_modules_that_the_script_built_compare_by_structure_and_shapes():
    specs = [nn.Embedding(9, 4), Block(4), Block(4), Block(5), nn.Linear(4, 9)]
    found = contents(specs, [0, 1, 2, 3, 4, 5]).fingerprints
    assert found[1] == found[2] != found[3]


def test_a_layers_number_makes_no_difference_and_is_told():
    specs = [
        LayerSpec(nn.Embedding, 9, 4),
        *[LayerSpec(Block, 4, number=i + 1) for i in range(4)],
        nn.Linear(4, 9),
    ]
    found = contents(specs, [0, 2, 3, 4, 6])
    assert found.fingerprints[1] == found.fingerprints[2]
    assert found.layer_numbers == ("Block.number",)


def test_numbers_that_do_not_count_the_layers_make_a_difference():
    specs = [
        LayerSpec(nn.Embedding, 9, 4),
        *[LayerSpec(Block, 4, number=n) for n in (1, 2, 1, 2)],
        nn.Linear(4, 9),
    ]
    found = contents(specs, [0, 2, 3, 4, 6])
    assert found.fingerprints[1] != found.fingerprints[2]
    assert found.layer_numbers == ()


def test_a_tied_layer_ties_its_stage():
    tied = [TiedLayerSpec("word", nn.Embedding, 9, 4) for _ in range(4)]
    found = contents([*tied, nn.Linear(4, 9)], [0, 1, 2, 3, 5]).fingerprints
    assert len(set(found)) == 4
    assert "word" in found[1]


def test_middle_stages_share_a_slice():
    specs = [LayerSpec(nn.Embedding, 9, 4), *[LayerSpec(Block, 4) for _ in range(6)], nn.Linear(4, 9)]
    found = contents(specs, [0, 1, 2, 3, 4, 5, 6, 7, 8]).fingerprints
    stages = tuple(
        StageInfo(fingerprint=f, schedule=s)
        for f, s in zip(found, stage_schedules(Engine(8, 32)), strict=True)
    )
    assert captured_stages(stages) == [0, 1, 1, 1, 1, 1, 1, 7]
