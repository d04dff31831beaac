"""What a GPT on Transformer Engine records, in kinds and counts, against what its configuration says.

L layers, M micro-batches. A layer has four linear layers (qkv, projection, fc1, fc2), each with three GEMMs (forward, data
gradient, weight gradient), two norms, one attention. The output layer is Megatron's own: two GEMMs of torch and Apex's
weight gradient.
"""

from __future__ import annotations

import collections

import pytest

from prism_plugins.costs.families import family_of

pytestmark = pytest.mark.xdist_group("te-programs")  # one process builds all models

L, M = 2, 2
TP = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
EP = {"expert_model_parallel_size": 2}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "add_bias_linear": False,
}
LOCAL_EXPERTS = 2
CASES = {
    "plain": {"optimizer": True},
    "rmsnorm": {"config": {"normalization": "RMSNorm"}},
    "tp": {"parallel": TP},
    "sequence parallel": {"parallel": TP, "config": SP},
    "overlap": {"parallel": TP, "config": {**SP, "tp_comm_overlap": True}},
    "overlap without bulk": {
        "parallel": TP,
        "config": {
            **SP,
            "tp_comm_overlap": True,
            "tp_comm_bulk_dgrad": False,
            "tp_comm_bulk_wgrad": False,
        },
    },
    "overlap in bulk only": {
        "parallel": TP,
        "config": {**SP, "tp_comm_overlap": True, "tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False},
    },
    "unfused": {"config": {"attention_backend": "unfused"}},
    "flash": {"config": {"attention_backend": "flash"}},
    "rope": {"config": {"apply_rope_fusion": True}},
    "qk norm": {"config": {"qk_layernorm": True}},
    "full recompute": {
        "config": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "selective recompute": {"config": {"recompute_granularity": "selective"}},
    "cross entropy": {
        "parallel": TP,
        "config": {**SP, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    },
    "cp p2p": {"parallel": {"context_parallel_size": 2}, "config": {"cp_comm_type": "p2p"}},
    "cp a2a": {"parallel": {"context_parallel_size": 2}, "config": {"cp_comm_type": "a2a"}},
    "cp all_gather": {"parallel": {"context_parallel_size": 2}, "config": {"cp_comm_type": "all_gather"}},
    "cp a2a+p2p": {
        "parallel": {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
        "config": {"cp_comm_type": "a2a+p2p"},
    },
    "moe": {"moe": True, "parallel": EP, "config": EXPERTS},
    "moe fused": {
        "moe": True,
        "parallel": EP,
        "config": {**EXPERTS, "moe_permute_fusion": True, "moe_router_fusion": True},
    },
    "moe sinkhorn": {
        "moe": True,
        "parallel": EP,
        "config": {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    },
    "moe dropped": {"moe": True, "parallel": EP, "config": {**EXPERTS, "moe_expert_capacity_factor": 0.5}},
    "moe to capacity": {
        "moe": True,
        "parallel": EP,
        "config": {**EXPERTS, "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    },
    "moe padded": {
        "moe": True,
        "parallel": EP,
        "config": {
            **EXPERTS,
            "num_moe_experts": 6,
            "moe_router_padding_for_quantization": True,
            "fp8": "hybrid",
            "fp8_recipe": "tensorwise",
        },
    },
    "fp8 delayed": {"parallel": TP, "config": {**SP, "fp8": "hybrid", "fp8_recipe": "delayed"}},
    "fp8 current": {"parallel": TP, "config": {**SP, "fp8": "hybrid", "fp8_recipe": "tensorwise"}},
    "fp8 block": {"parallel": TP, "config": {**SP, "fp8": "e4m3", "fp8_recipe": "blockwise"}},
}


@pytest.fixture(scope="module")
def recorded(run_models):
    return run_models(
        {name: {"num_microbatches": M, "num_layers": L, **case} for name, case in CASES.items()}
    )


@pytest.fixture
def counts(recorded):
    """Counts of a case: ops, calls; zero for what there is none of."""

    def of(name):
        assert "error" not in recorded[name], recorded[name]["error"]
        result = recorded[name]
        return (
            lambda op: result["ops"].get(op, 0),
            lambda kind: result["comms"].get(kind, 0),
        )

    return of


def check_layers(op, *, forwards=1, gemm="te::gemm", norm="layernorm", linears=4, norms=2, routers=0):
    """The GEMMs, norms and the output layer of all layers; ``forwards``: of each layer, with recomputation. A router is
    one linear layer of torch's."""
    assert op(gemm) == L * M * linears * (forwards + 2)
    assert op(f"te::{norm}_fwd") == M * (norms * L * forwards + 1)
    assert op(f"te::{norm}_bwd") == M * (norms * L + 1)
    assert op("aten::mm") == M * (2 + 3 * L * routers)
    assert op("apex::wgrad_gemm_accum") == M


def check_attention(op, *, forwards=1, backwards=1, name="te::fused_attn"):
    assert op(f"{name}_fwd" if "flash" not in name else f"{name}::fwd") == L * M * forwards
    assert op(f"{name}_bwd" if "flash" not in name else f"{name}::bwd") == L * M * backwards


def test_a_plain_model(counts):
    op, comm = counts("plain")
    check_layers(op)
    check_attention(op)
    # With and without weight decay; one norm, one clipping.
    assert [op(f"te::multi_tensor_{x}") for x in ("adam", "l2norm", "scale")] == [2, 1, 1]
    assert op("te::quantize") == 0
    assert comm("all_gather") == comm("reduce_scatter") == comm("send") == 0


def test_gemm_shapes_are_those_of_the_layers(recorded):
    shapes = recorded["plain"]["shapes"]
    tokens, hidden = 512, 512
    expected: dict[str, int] = {}
    for inner, outer in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)):
        for m, n, k in ((tokens, outer, inner), (tokens, inner, outer), (outer, inner, tokens)):
            key = f"{m}x{n}x{k} bfloat16"
            expected[key] = expected.get(key, 0) + L * M
    key = f"1024x{hidden}x{tokens} bfloat16"  # the vocabulary's weight gradient
    expected[key] = expected.get(key, 0) + M
    assert shapes == expected


def test_rms_norm(counts):
    op, _ = counts("rmsnorm")
    check_layers(op, norm="rmsnorm")
    assert op("te::layernorm_fwd") == 0


def test_tensor_parallelism_sums_activations(counts):
    op, comm = counts("tp")
    check_layers(op)
    sequence_op, sequence_comm = counts("sequence parallel")
    check_layers(sequence_op)
    assert comm("all_gather") == 0
    # Forward: before qkv and fc1. Backward: the output's gradient before projection and fc2, the input again for the
    # weight gradients of qkv and fc1. Once more each for the output layer, and for the embedding's gradient.
    assert sequence_comm("all_gather") == M * (6 * L + 3)
    # Forward: after projection and fc2, after the embedding; backward: the gradients of qkv's, fc1's and the output
    # layer's inputs.
    assert sequence_comm("reduce_scatter") == M * (4 * L + 2)
    # Without sequence parallelism each pair is an all_reduce; the embedding's backward has none.
    assert comm("all_reduce") - sequence_comm("all_reduce") == M * (4 * L + 2)


def test_overlapped_communication_is_on_the_group(counts, recorded):
    op, comm = counts("overlap")
    check_layers(op)
    assert recorded["overlap"]["ops"] != recorded["sequence parallel"]["ops"]
    # What a userbuffer gathers is copied into it: inputs of qkv and fc1 in both passes, gradients of projection and fc2.
    assert op("te::userbuffers_copy") == 6 * L * M
    assert counts("sequence parallel")[0]("te::userbuffers_copy") == 0
    # The same collectives on the same group, now beside GEMMs.
    for kind in ("all_gather", "reduce_scatter"):
        assert comm(kind) == counts("sequence parallel")[1](kind)


@pytest.mark.parametrize(
    ("case", "copies"),
    [
        # Inputs of qkv and fc1 forward, gradients of projection and fc2 backward.
        ("overlap without bulk", 4),
        # Inputs of qkv and fc1, gathered again beside the GEMM of the data gradient.
        ("overlap in bulk only", 2),
    ],
)
def test_kinds_of_overlapped_communication(counts, case, copies):
    op, comm = counts(case)
    check_layers(op)
    assert op("te::userbuffers_copy") == copies * L * M
    for kind in ("all_gather", "reduce_scatter"):
        assert comm(kind) == counts("sequence parallel")[1](kind)


def test_unfused_attention_is_two_products_and_a_softmax(counts):
    op, _ = counts("unfused")
    check_layers(op)
    check_attention(op, forwards=0, backwards=0)
    softmax = "te::scaled_masked_softmax"
    assert op(f"{softmax}_forward") == op(f"{softmax}_backward") == L * M
    assert op("aten::bmm") + op("aten::baddbmm") == L * M * 6


def test_flash_attention(counts):
    op, _ = counts("flash")
    check_layers(op)
    check_attention(op, name="flash_attn")
    check_attention(op, forwards=0, backwards=0)


def test_fused_rotary_embedding(counts):
    op, _ = counts("rope")
    check_layers(op)
    assert op("te::fused_rope_forward") == op("te::fused_rope_backward") == 2 * L * M
    assert counts("plain")[0]("aten::cat") > op("aten::cat")


def test_norms_of_queries_and_keys(counts):
    op, _ = counts("qk norm")
    check_layers(op, norms=4)


def test_full_recomputation_runs_forward_twice(counts):
    op, _ = counts("full recompute")
    check_layers(op, forwards=2)
    check_attention(op, forwards=2)


def test_selective_recomputation_runs_attention_twice(counts):
    op, _ = counts("selective recompute")
    check_layers(op)
    check_attention(op, forwards=2)


def test_fused_cross_entropy(counts):
    op, comm = counts("cross entropy")
    check_layers(op)
    assert [op(f"triton::{x}_kernel") for x in ("online_softmax", "cross_entropy", "element_mul")] == [M] * 3
    assert comm("all_gather") == counts("sequence parallel")[1]("all_gather") + M
    assert op("aten::exp.out") == 0


def test_context_parallelism_around_a_ring(counts):
    op, comm = counts("cp p2p")
    check_layers(op)
    check_attention(op, forwards=2, backwards=2)
    # Forward: keys and values once around; backward: keys and values, and their gradients once more.
    assert comm("send") == comm("recv") == L * M * 3


def test_context_parallelism_by_heads(counts):
    op, comm = counts("cp a2a")
    check_layers(op)
    check_attention(op)
    # q, k, v and the output, each way.
    assert comm("all_to_all") == L * M * 8


def test_context_parallelism_by_gathering(counts):
    op, comm = counts("cp all_gather")
    check_layers(op)
    check_attention(op, forwards=2, backwards=2)
    # Keys and values, forward and again backward; their gradients are scattered.
    assert comm("all_gather") == L * M * 4
    assert comm("reduce_scatter") == L * M * 2


def test_context_parallelism_by_heads_and_around_a_ring(counts):
    op, comm = counts("cp a2a+p2p")
    check_layers(op)
    check_attention(op, forwards=2, backwards=2)
    assert comm("send") == comm("recv") == L * M * 3
    assert comm("all_to_all") >= L * M * 8


def test_experts(counts):
    op, comm = counts("moe")
    check_layers(op, linears=2, routers=1)  # qkv and projection; the norm before the experts stands alone
    check_attention(op)
    # Two linear layers of three GEMMs, all local experts in one call.
    assert op("te::grouped_gemm") == L * M * 6
    # Tokens and probabilities there, tokens back; the same for their gradients.
    assert comm("all_to_all") == L * M * 6


def test_fused_routing_and_permutation(counts):
    op, comm = counts("moe fused")
    check_layers(op, linears=2, routers=1)
    assert op("te::grouped_gemm") == L * M * 6
    assert (
        op("te::fused_topk_with_score_function_fwd") == op("te::fused_topk_with_score_function_bwd") == L * M
    )
    # Permutation forward and the gradient of the un-permutation; likewise the other way.
    assert op("triton::permute_kernel") == op("triton::unpermute_kernel") == L * M * 2
    assert comm("all_to_all") == L * M * 6
    assert counts("moe")[0]("triton::permute_kernel") == 0


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        # Each of 2 expert-parallel ranks routes 512 tokens, to `topk` of 4 experts.
        ("moe", 2 * 512 * 2 // 4),
        ("moe sinkhorn", 2 * 512 // 4),
        ("moe dropped", 2 * 512 * 2 // 4 // 2),
        ("moe to capacity", 2 * 512 * 2 // 4 * 3 // 2),
        ("moe padded", 2 * 176),  # 1024 assignments over 6 experts, from 170 or 171 to a multiple of 16
    ],
)
def test_tokens_that_an_expert_works_on(counts, recorded, case, tokens):
    op, comm = counts(case)
    assert op("te::grouped_gemm") + op("te::fp8_grouped_gemm") == L * M * 6
    assert comm("all_to_all") == L * M * 6
    assert (
        sum(n for shape, n in recorded[case]["shapes"].items() if shape.startswith(f"{tokens}x2048x512 "))
        >= L * M
    )


def test_sinkhorn_repeats_as_it_would_for_normal_logits(counts):
    op, _ = counts("moe sinkhorn")
    # A round compares its error with the tolerance once.
    rounds = op("aten::gt.Scalar") / (L * M)
    assert 3 <= rounds <= 6


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_runs_every_linear_layer_in_fp8(counts, recipe):
    op, _ = counts(f"fp8 {recipe}")
    check_layers(op, gemm="te::fp8_gemm")
    check_attention(op)
    assert op("te::gemm") == 0
    # Each linear layer quantizes its input and the gradient of its output every micro-batch, its weight in the first.
    # With delayed scaling the norm writes FP8 itself, and a gradient is quantized together with its bias's.
    inputs, gradients, weights = 4 * L * M, 4 * L * M, 4 * L
    # Other recipes keep the projection's input as it was (Megatron's set_save_original_input) and quantize it again.
    by_norm, again = (2 * L * M, 0) if recipe == "delayed" else (0, L * M)
    assert op("te::quantize") + op("te::bgrad_quantize") == inputs + gradients + weights - by_norm + again


def test_delayed_scaling_shares_the_largest_values_once_a_pass(counts):
    op, _ = counts("fp8 delayed")
    assert op("te::amax_and_scale_update") == 2 * M or op("te::amax_and_scale_update") == 1 + M
    assert op("te::compute_amax") == 0


def test_current_scaling_finds_the_largest_values_first(counts):
    op, comm = counts("fp8 current")
    assert op("te::compute_scale_from_amax") == op("te::quantize")
    # The norms before qkv and fc1 find it themselves.
    assert op("te::compute_amax") == op("te::quantize") - 2 * L * M
    # Where a tensor is split over the group, all must agree: the inputs of qkv and fc1, the gradients of projection and
    # fc2.
    assert comm("all_reduce") - counts("sequence parallel")[1]("all_reduce") == 4 * L * M


def test_blocks_of_32_on_blackwell(run_models):
    case = {"parallel": TP, "config": {**SP, "fp8": "e4m3", "fp8_recipe": "mxfp8"}}
    case |= {"num_microbatches": M, "num_layers": L}
    result = run_models({"mxfp8": case}, cluster="dgx-b200")["mxfp8"]
    assert "error" not in result, result["error"]
    op = collections.Counter(result["ops"])
    check_layers(lambda name: op[name], gemm="te::fp8_gemm")
    check_attention(lambda name: op[name])
    # Scales are found block by block in the kernel that quantizes: nothing is searched or shared before.
    assert op["te::compute_amax"] == op["te::compute_scale_from_amax"] == op["te::amax_and_scale_update"] == 0
    # Inputs, gradients and (once) weights of four linear layers, and the projection's input again.
    assert op["te::quantize"] + op["te::bgrad_quantize"] == 8 * L * M + 4 * L + L * M


def test_every_recorded_op_has_a_cost_rule(recorded):
    ops = {op for name in CASES for op in recorded[name]["ops"]}
    assert len([op for op in ops if op.startswith(("te::", "triton::", "flash_attn::"))]) > 30
    assert [op for op in sorted(ops - {"prism::fused"}) if family_of(op) is None] == []


def test_the_assumptions_are_told(recorded):
    said = " ".join(recorded["assumptions"])
    for words in (
        "runs on virtual kernels",
        "flash-attn 2.7.4",
        "Apex's fused weight gradient",
        "cuDNN's fused kernels",
        "runs unfused",
    ):
        assert words in said
