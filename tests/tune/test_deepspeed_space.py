"""The space of a DeepSpeed launch: how configurations are found, written and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integration.tuning import Launch, Point, Scouted
from prism_plugins.integrations.deepspeed.ds_config import changed, differences, find_config
from prism_plugins.integrations.deepspeed.tune import DeepSpeedSpace, DeepSpeedTuner
from prism_plugins.program.slices import JobFacts
from prism_plugins.tune.result import describe
from prism_plugins.world.layout import Layout

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e7},
}


def space_of(tmp_path: Path, config: dict | None = None, *, world: int = 16, chosen=None, **changes: Any):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config or CONFIG))
    argv = ("train.py", "--deepspeed_config", str(path), *changes.pop("words", ()))
    arguments = {"deepspeed_config": str(path), "prism_flags": ["--deepspeed_config"], **changes}
    launch = Launch(
        argv=argv,
        arguments=arguments,
        world_size=world,
        gpus_per_node=8,
        chosen=chosen or {},
        directory=tmp_path / "out",
    )
    return DeepSpeedTuner().space(launch)


def point_of(space: DeepSpeedSpace, **values: Any) -> Point:
    own = dict(zip((k.name for k in space.knobs), space.own.values, strict=True))
    return Point(tuple({**own, **values}[k.name] for k in space.knobs))


def written(space: DeepSpeedSpace, point: Point) -> dict:
    return json.loads(find_config(space.command(point))[1].read_text())


def test_every_legal_point_keeps_the_batch_and_is_read_back(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    points = [p for p, reason in space.points() if not reason]
    assert space.own in points
    assert space.command(space.own)[2] == str(tmp_path / "ds.json")
    assert len(points) > 40
    for point in points:
        config = written(space, point)
        batch = config["train_micro_batch_size_per_gpu"] * config.get("gradient_accumulation_steps", 4)
        assert batch * 16 == config["train_batch_size"] == 64
        assert space.shape(point).num_microbatches * config["train_micro_batch_size_per_gpu"] == 4


def test_a_point_is_written_over_the_own_configuration(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    point = point_of(space, zero=3, micro_batch=2, offload="optimizer+parameters", bucket=200_000_000)
    config = written(space, point)
    assert config["optimizer"] == {"type": "AdamW"}
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (3, 200_000_000, True)
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    told = space.changes(point)
    assert "(zero_optimization.stage = 3)" in told
    assert "(gradient_accumulation_steps = 2)" in told
    assert space.command(point) == space.command(point)
    assert describe(dict(zip((k.name for k in space.knobs), point.values, strict=True))).startswith(
        "ZeRO-3 mb2"
    )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"offload": "optimizer+parameters"}, "ZeRO-3 only"),
        ({"zero": 0, "offload": "optimizer"}, "offload needs ZeRO"),
        ({"micro_batch": 8}, "not a multiple"),
        ({"zero": 0, "overlap": False}, "does nothing"),
    ],
)
def test_illegal_points_say_why(values: dict, reason: str, tmp_path: Path) -> None:
    space = space_of(tmp_path)
    wanted = point_of(space, **values)
    assert reason in next(why for point, why in space.points() if point == wanted)


def test_probes_have_few_micro_batches_and_the_tokens_they_should(tmp_path: Path) -> None:
    space = space_of(tmp_path, {**CONFIG, "train_batch_size": 160})
    space.learn(scouted(tokens=2 * 16 * 100, samples=2 * 16))
    assert space.tokens_per_iteration == 160 * 100
    few, more = space.probes(space.own)
    assert (few.size, more.size, few.key) == (2, 3, more.key)
    assert (few.tokens, more.tokens) == (3200, 4800)
    assert json.loads(find_config(more.command)[1].read_text())["train_batch_size"] == 48


def scouted(*, tokens: int, samples: int, dp: int = 16, flops: float = 1e12) -> Scouted:
    layout = Layout(world_size=16, tp=1, cp=1, pp=1, dp=dp, ep=1, etp=1, vpp=1, num_microbatches=2)
    facts = JobFacts(
        framework="deepspeed",
        layout=layout,
        tokens_per_iteration=tokens,
        samples_per_iteration=samples,
        model_flops_per_iteration=6e9 * tokens,
    )
    return Scouted(facts=facts, flops=flops)


def test_bounds_follow_the_stage_and_the_work_does_not(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    space.learn(scouted(tokens=3200, samples=32))
    by_stage = [space.limits(point_of(space, zero=z)) for z in (1, 2, 3)]
    assert by_stage[0].memory_bytes == by_stage[1].memory_bytes == 1e9 * (2 + 12 / 16)
    assert by_stage[2].memory_bytes == 1e9 * 14 / 16
    assert {limit.flops for limit in by_stage} == {4e12}
    assert space.limits(point_of(space, micro_batch=2)).flops == 4e12
    assert space.limits(point_of(space, zero=1, offload="optimizer")).memory_bytes == 2e9


def test_a_launch_that_is_not_what_its_configuration_says_is_refused(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    with pytest.raises(PrismError, match="does not understand"):
        space.learn(scouted(tokens=3200, samples=32, dp=8))


def test_values_that_hugging_face_fills_in_are_its_own_arguments(tmp_path: Path) -> None:
    flags = ["--deepspeed_config", "--per_device_train_batch_size", "--gradient_accumulation_steps"]
    auto = {**CONFIG, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    space = space_of(
        tmp_path,
        auto,
        prism_flags=flags,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        words=("--per_device_train_batch_size", "2"),
    )
    words = space.command(point_of(space, micro_batch=4))
    assert words[-4:] == ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    assert words.count("--per_device_train_batch_size") == 1


def test_the_configuration_is_found_wherever_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    other = tmp_path / "model.json"
    other.write_text("{}")
    assert find_config(("t.py", "--model", str(other), f"--deepspeed={path}")) == (3, path)
    with pytest.raises(PrismError, match="found none"):
        find_config(("t.py", str(other)))


def test_changes_are_told_by_key() -> None:
    new = changed(CONFIG, {"zero_optimization.stage": 1, "zero_optimization.overlap_comm": None, "a.b": True})
    assert CONFIG["zero_optimization"]["stage"] == 2
    assert differences(CONFIG, new) == [
        'a = {"b": true}',
        "(drop zero_optimization.overlap_comm)",
        "zero_optimization.stage = 1",
    ]
