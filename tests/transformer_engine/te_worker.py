"""One process that builds small GPT models on Transformer Engine in a slice and prints what each recorded, as JSON.

Usage: te_worker.py CASES.json SLICE_DIR [CLUSTER]; CASES: {name: {"parallel": {…}, "config": {…}, "num_microbatches": N, …}}.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.program.slices import SliceSpec
from prism_plugins.slice import Slice
from prism_plugins.slice_env import slice_environment

SEQUENCE, BATCH, HIDDEN, HEADS, VOCABULARY = 256, 2, 512, 8, 1024


def main() -> None:
    """Run all cases; a case that fails tells its traceback."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    cluster = sys.argv[3] if len(sys.argv) > 3 else "dgx-h100"
    spec = SliceSpec(
        rank=0,
        world_size=8,
        gpus_per_node=8,
        argv=("train.py",),
        gpu=load_cluster(cluster).gpu_facts(),
        slice_dir=sys.argv[2],
    )
    faulthandler.register(signal.SIGUSR1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(slice_environment(spec))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    context = Slice(spec)._prepare()

    import torch

    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    results = {}
    for name, case in cases.items():
        began = time.monotonic()
        try:
            results[name] = run_case(context, **case)
        except BaseException:
            results[name] = {"error": traceback.format_exc()[-3000:]}
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    results["assumptions"] = context.assumptions
    print(json.dumps(results), file=answers, flush=True)
    os._exit(0)


def run_case(
    context,
    *,
    parallel=None,
    config=None,
    num_microbatches=1,
    num_layers=2,
    moe=False,
    environment=None,
    optimizer=False,
):
    """Build a model, train ``num_microbatches`` micro-batches twice, return the counts of the second time."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    for key in [k for k in os.environ if k.startswith("NVTE_") and k != "NVTE_PROJECT_BUILDING"]:
        del os.environ[key]
    os.environ.update(environment or {})
    attention = sys.modules.get(
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    )
    if attention is not None:
        attention._attention_backends["attention_params"] = None
        sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager.reset()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**(parallel or {}))
    model_parallel_cuda_manual_seed(1)
    sizes = parallel or {}
    options = {
        "num_layers": num_layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": sizes.get("tensor_model_parallel_size", 1),
        "context_parallel_size": sizes.get("context_parallel_size", 1),
        "expert_model_parallel_size": sizes.get("expert_model_parallel_size", 1),
        "gradient_accumulation_fusion": True,
        **(config or {}),
    }
    if "attention_backend" in options:
        options["attention_backend"] = AttnBackend[options["attention_backend"]]
    if "normalization" not in options:
        options["normalization"] = "LayerNorm"
    settings = TransformerConfig(**options)
    layers = get_gpt_layer_with_transformer_engine_spec(
        num_experts=settings.num_moe_experts if moe else None,
        moe_grouped_gemm=bool(moe),
        qk_layernorm=settings.qk_layernorm,
    )
    model = GPTModel(
        settings,
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    wrapped = DistributedDataParallel(
        settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
    )
    if options.get("tp_comm_overlap"):
        import transformer_engine.pytorch as te

        te.module.base.destroy_ub()
        te.initialize_ub(
            [SEQUENCE * BATCH, HIDDEN],
            options["tensor_model_parallel_size"],
            use_fp8=False,
            bootstrap_backend="nccl",
        )
    length = SEQUENCE // options["context_parallel_size"]
    tokens = torch.zeros(BATCH, length, dtype=torch.int64, device="cuda")
    positions = torch.arange(length, device="cuda").unsqueeze(0).expand(BATCH, -1)
    step = None
    if optimizer:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        step = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16), [wrapped]
        )
    for _ in range(2):
        context.recorder.start()
        for i in range(num_microbatches):
            if i == 0:
                model.set_is_first_microbatch()
            loss = wrapped(tokens, positions, None, labels=tokens)
            loss.float().mean().backward()
        if step is not None:
            step.step()
        recorded = context.recorder.stop()
    return counts_of(recorded)


def counts_of(recorded):
    """Numbers of ops by name, of communication calls by kind; shapes of GEMMs and of quantized tensors."""
    from prism_plugins.program.model import EventKind

    ops, comms, shapes, casts = (collections.Counter() for _ in range(4))
    for event in recorded.events:
        kind, ref = int(event["kind"]), int(event["ref"])
        if kind == EventKind.KERNEL:
            signature = recorded.signatures[ref]
            ops[signature.op] += 1
            if "gemm" in signature.op:
                m, k = signature.inputs[0].shape
                shapes[f"{m}x{signature.inputs[1].shape[1]}x{k} {signature.inputs[0].dtype}"] += 1
            elif signature.op == "te::quantize":
                size = "x".join(map(str, signature.inputs[0].shape))
                casts[f"{size} {len(signature.outputs)} {signature.outputs[0].dtype}"] += 1
        elif kind == EventKind.COMM:
            comms[recorded.comms[ref].kind] += 1
    return {"ops": dict(ops), "comms": dict(comms), "shapes": dict(shapes), "casts": dict(casts)}


if __name__ == "__main__":
    main()
