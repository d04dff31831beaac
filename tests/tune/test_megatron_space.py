"""The space of a Megatron launch: what is in it, how points are written, and its bounds."""

from __future__ import annotations

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integration.tuning import Launch, Point
from prism_plugins.integrations.megatron.tune import MegatronTuner
from prism_plugins.integrations.megatron.tune_knobs import LAYOUT_SWITCHES, LAYOUT_VALUES

ARGV = (
    "pretrain_gpt.py", "--num-layers", "16", "--tensor-model-parallel-size=2", "--sequence-parallel",
    "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", "--global-batch-size", "64",
    "--use-distributed-optimizer", "--lr", "1e-4",
)  # fmt: skip
ARGUMENTS = {
    "num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 512, "vocab_size": 1000,
    "ffn_hidden_size": 4096, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1,
    "global_batch_size": 64, "sequence_parallel": True, "use_distributed_optimizer": True, "bf16": True,
    "accumulate_allreduce_grads_in_fp32": True, "transformer_impl": "local",
    "prism_flags": [*LAYOUT_VALUES, *LAYOUT_SWITCHES, "--num-layers", "--global-batch-size"],
}  # fmt: skip


def space_of(world: int = 16, chosen=None, **changed):
    launch = Launch(
        argv=ARGV,
        arguments={**ARGUMENTS, **changed},
        world_size=world,
        gpus_per_node=8,
        chosen=chosen or {},
    )
    return MegatronTuner().space(launch)


def point_of(space, **values) -> Point:
    own = dict(zip((k.name for k in space.knobs), space.own.values, strict=True))
    return Point(tuple({**own, **values}[k.name] for k in space.knobs))


def legal(space) -> list[Point]:
    return [point for point, reason in space.points() if not reason]


def test_the_own_launch_is_a_legal_point_and_unchanged() -> None:
    space = space_of()
    assert space.own in legal(space)
    assert space.command(space.own) == ARGV
    assert space.changes(space.own) == ()


def test_every_legal_point_keeps_batch_world_and_layers() -> None:
    space = space_of()
    points = legal(space)
    assert len(points) > 200
    for point in points:
        shape = space.shape(point)
        shape.layout.validate()
        named = dict(zip((k.name for k in space.knobs), point.values, strict=True))
        assert shape.layout.num_microbatches * named["micro_batch"] * shape.layout.dp == 64
        assert sum(n for stage in shape.chunks for c in stage for _, n in c.layers) == 16
        assert shape.chunks[0][0].embedding
        assert shape.chunks[-1][-1].loss


def test_a_point_is_written_over_the_own_flags() -> None:
    space = space_of()
    point = point_of(
        space, tp=4, pp=4, vpp=2, micro_batch=2, recompute="full/2", optimizer="distributed+overlap"
    )
    words = space.command(point)
    assert words.count("--tensor-model-parallel-size") == 1
    assert not any(w.startswith("--tensor-model-parallel-size=") for w in words)
    text = " ".join(words)
    for part in (
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 4",
        "--num-layers-per-virtual-pipeline-stage 2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--overlap-grad-reduce --overlap-param-gather",
        "--lr 1e-4",
    ):
        assert part in text
    assert "--sequence-parallel" not in " ".join(space.changes(point))


def test_flags_that_have_to_go_are_named() -> None:
    changes = space_of().changes(point_of(space_of(), sp=False, optimizer="plain"))
    assert "(drop --sequence-parallel)" in changes
    assert "(drop --use-distributed-optimizer)" in changes


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tp": 8, "pp": 4}, "does not divide"),
        ({"tp": 1, "sp": True}, "needs tensor parallelism"),
        ({"pp": 1, "vpp": 2}, "need a pipeline"),
        ({"pp": 4, "vpp": 8}, "cannot be cut"),
        ({"stages": "uneven"}, "cannot be laid"),
    ],
)
def test_illegal_points_say_why(values: dict, reason: str) -> None:
    space = space_of()
    wanted = point_of(space, **values)
    assert reason in next(why for point, why in space.points() if point == wanted)


def test_uneven_stages_hold_all_layers() -> None:
    space = space_of(world=12, global_batch_size=48)
    point = point_of(space, tp=1, sp=False, pp=6, stages="uneven")
    layers = [sum(n for _, n in stage[0].layers) for stage in space.shape(point).chunks]
    assert layers == [2, 3, 3, 3, 3, 2]


def test_choices_narrow_and_wrong_ones_are_explained() -> None:
    space = space_of(chosen={"tp": ("2", "4"), "sp": ("true",)})
    assert {dict(zip((k.name for k in space.knobs), p.values, strict=True))["tp"] for p in legal(space)} == {
        2,
        4,
    }
    with pytest.raises(PrismError, match="tp cannot be 3"):
        space_of(chosen={"tp": ("3",)})
    with pytest.raises(PrismError, match="no knob tensor"):
        space_of(chosen={"tensor": ("3",)})


def test_a_script_without_layout_flags_is_refused() -> None:
    with pytest.raises(PrismError, match="--global-batch-size"):
        space_of(prism_flags=["--tensor-model-parallel-size", "--num-layers"])


def test_probes_are_shared_by_layouts_that_differ_in_the_pipeline_only() -> None:
    space = space_of()
    assert space.probes(point_of(space, pp=4)) == space.probes(point_of(space, pp=2, vpp=2))
    assert space.probes(point_of(space, pp=4)) != space.probes(point_of(space, tp=4))


def test_more_parallelism_lowers_the_bounds() -> None:
    space = space_of()
    few, many = (space.limits(point_of(space, pp=pp)) for pp in (1, 4))
    assert many.memory_bytes < few.memory_bytes
    full = space.limits(point_of(space, recompute="full"))
    none = space.limits(point_of(space, recompute="none"))
    assert full.memory_bytes < none.memory_bytes
    assert full.flops > none.flops


def test_bounds_count_collectives_that_nothing_hides() -> None:
    """With sequence parallelism four in forward and two in backward of a layer, without it two in forward."""
    space = space_of()
    overlap = "distributed+overlap"
    with_sp, without = (space.limits(point_of(space, sp=sp, optimizer=overlap)) for sp in (True, False))
    assert with_sp.link_bytes == 3 * without.link_bytes
    layers, microbatches, elements = 8, 16, 512 * 1024
    assert without.link_bytes == (layers * microbatches + layers) * 2 * elements * 2 / 2
    hidden = space_of(tp_comm_overlap=True)
    assert hidden.limits(point_of(hidden, optimizer=overlap)).link_bytes == 0.0


def test_bounds_count_gradients_where_no_flag_overlaps_them() -> None:
    space = space_of()
    far, overlapped = (
        space.limits(point_of(space, tp=8, pp=1, optimizer=optimizer))
        for optimizer in ("distributed", "distributed+overlap")
    )
    params = 16 * 12 * 1024**2 / 8 + 2 * 1024 * 1000 / 8
    assert far.nic_bytes == pytest.approx(params * 6 / 2)
    assert overlapped.nic_bytes == 0.0
    node = space_of(world=8)
    near, hidden = (
        node.limits(point_of(node, pp=2, optimizer=optimizer)) for optimizer in ("plain", "plain+overlap")
    )
    assert near.nic_bytes == 0.0
    params = 8 * 12 * 1024**2 / 2 + 1024 * 1000 / 2
    assert near.link_bytes - hidden.link_bytes == pytest.approx(params * 4 / 2)


def test_experts_are_bounded_by_their_own_groups() -> None:
    experts = {"num_experts": 8, "expert_tensor_parallel_size": 1, "moe_router_topk": 2}
    flags = [*ARGUMENTS["prism_flags"], "--expert-model-parallel-size"]
    space = space_of(prism_flags=flags, **experts)
    point = point_of(space, tp=2, pp=1, ep=8)
    shape = space.shape(point)
    assert (shape.layout.dp, shape.layout.edp) == (8, 2)
    dense, expert = 4 * 1024**2 / 2, 2 * 1024 * 4096 * 8 / 8
    assert shape.expert_share == pytest.approx(expert / (dense + expert))
    ends = 2 * 1024 * 1000 / 2
    states = (16 * dense + ends) * (6 + 12 / 8) + 16 * expert * (6 + 12 / 2)
    assert states <= space.limits(point).memory_bytes <= 1.2 * states
    wanted = point_of(space, tp=2, sp=False, pp=1, ep=8)
    assert "need sequence parallelism" in next(why for p, why in space.points() if p == wanted)


def test_experts_may_be_split_otherwise_than_the_rest() -> None:
    flags = [*ARGUMENTS["prism_flags"]]
    space = space_of(prism_flags=flags, num_experts=8, moe_router_topk=2)
    assert dict(zip((k.name for k in space.knobs), space.own.values, strict=True))["etp"] == 2
    point = point_of(space, tp=4, pp=1, ep=4, etp=1)
    assert "--expert-tensor-parallel-size 1" in space.changes(point)
    assert space.shape(point).layout.etp == 1
    assert not space.probe_world % (8 * 8)
    wide = point_of(space, tp=4, pp=1, ep=8, etp=4)
    assert "cannot be spread" in next(why for p, why in space.points() if p == wide)
    flags.remove("--expert-tensor-parallel-size")
    bound = space_of(prism_flags=flags, num_experts=8, moe_router_topk=2)
    follows = [p for p in legal(bound)]
    assert follows
    assert all(bound.shape(p).layout.etp == bound.shape(p).layout.tp for p in follows)


def test_the_rank_order_is_searched_where_nodes_share_groups() -> None:
    space = space_of()
    point = point_of(space, order="pp-dp")
    assert point in legal(space)
    assert "--use-tp-pp-dp-mapping" in space.changes(point)
    assert space.probes(point) == space.probes(space.own)
    near, far = (space.shape(p).layout for p in (point, space.own))
    assert near.rank_of({"tp": 0, "cp": 0, "ep": 0, "dp": 0, "pp": 1}) == 2
    assert far.rank_of({"tp": 0, "cp": 0, "ep": 0, "dp": 0, "pp": 1}) == 8
    same = point_of(space, tp=8, order="pp-dp")
    assert "the same as" in next(why for p, why in space.points() if p == same)
    mapped = space_of(use_tp_pp_dp_mapping=True)
    assert mapped.shape(mapped.own).layout.order == "tp-cp-ep-pp-dp"


def test_the_other_rank_order_wants_equal_data_parallel_groups() -> None:
    """As Megatron's parallel_state asserts, ``use_tp_pp_dp_mapping`` with a pipeline."""
    space = space_of(num_experts=8, moe_router_topk=2)
    reasons = dict(space.points())
    named = {p: dict(zip((k.name for k in space.knobs), p.values, strict=True)) for p in reasons}
    mapped = {p: n for p, n in named.items() if n["order"] == "pp-dp" and n["pp"] > 1}
    allowed = [n for p, n in mapped.items() if not reasons[p]]
    assert allowed
    assert all(n["ep"] * n["etp"] == n["tp"] * n["cp"] for n in allowed)
    assert any("to be equal" in reasons[p] for p in mapped)


def test_layers_that_the_launch_lays_out_itself() -> None:
    space = space_of(decoder_first_pipeline_num_layers=6)
    layers = [sum(n for _, n in stage[0].layers) for stage in space.shape(space.own).chunks]
    assert layers == [6, 10]
    wider = point_of(space, pp=3)
    assert [sum(n for _, n in c[0].layers) for c in space.shape(wider).chunks] == [6, 5, 5]
    assert "--decoder-first-pipeline-num-layers 6" in " ".join(space.command(wider))
    assert "cannot be laid" in next(why for p, why in space.points() if p == point_of(space, pp=8))


def test_a_number_of_recomputed_layers_is_composed_as_it_is() -> None:
    space = space_of(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    assert space.own in legal(space)
    assert dict(space.shape(space.own).chunks[0][0].layers) == {"full": 3, "none": 5}
    whole = space_of(recompute_granularity="full", recompute_method="block", recompute_num_layers=9)
    assert dict(whole.shape(whole.own).chunks[0][0].layers) == {"full": 8, "none": 0}


def test_bounds_count_the_mask_where_torch_does_it() -> None:
    long = {"seq_length": 8192, "masked_softmax_fusion": True}
    fused, apart = (space_of(**{**long, "masked_softmax_fusion": on}) for on in (True, False))
    scores = 8 * 8192 * 8192 * 2
    layers, microbatches = 8, 16
    more = apart.limits(apart.own).hbm_bytes - fused.limits(fused.own).hbm_bytes
    assert more == (layers * microbatches + layers) * 4 * scores


def test_probes_have_the_optimizer_that_the_launch_cannot_do_without() -> None:
    plain, sharded = (space_of(fp8_param_gather=on) for on in (False, True))
    assert all(
        "--use-distributed-optimizer" not in p.command and not p.sharded for p in plain.probes(plain.own)
    )
    assert all("--use-distributed-optimizer" in p.command and p.sharded for p in sharded.probes(sharded.own))


@pytest.mark.parametrize("flags", [(), ("--no-overlap-p2p-communication",)])
def test_virtual_stages_overlap_their_transfers_unless_the_launch_says_no(flags):
    """Megatron's own argument is False in a launch without virtual stages."""
    launch = Launch(
        argv=(*ARGV, *flags), arguments={**ARGUMENTS, "overlap_p2p_comm": False}, world_size=16, gpus_per_node=8, chosen={}
    )  # fmt: skip
    space = MegatronTuner().space(launch)
    assert space.shape(point_of(space, vpp=2)).async_p2p is not bool(flags)
    assert not space.shape(space.own).async_p2p
