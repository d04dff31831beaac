"""Train a GPT with megatron-core on mock data: a plain script as a user writes it, for real GPUs.

    torchrun --nproc-per-node 8 --nnodes 8 scripts/train_gpt_megatron.py \
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --global-batch-size 16

Needs megatron-core only (neither Transformer Engine nor Apex); with --num-experts, Transformer Engine too.
"""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("model (defaults: 7B)")
    model.add_argument("--num-layers", type=int, default=32)
    model.add_argument("--hidden-size", type=int, default=4096)
    model.add_argument("--ffn-hidden-size", type=int, default=11008)
    model.add_argument("--num-attention-heads", type=int, default=32)
    model.add_argument("--seq-length", type=int, default=4096)
    model.add_argument("--vocab-size", type=int, default=50304)
    model.add_argument("--num-experts", type=int, default=None, help="experts a layer; none: a dense model")
    model.add_argument("--moe-router-topk", type=int, default=2)
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tensor-model-parallel-size", type=int, default=8)
    layout.add_argument("--pipeline-model-parallel-size", type=int, default=4)
    layout.add_argument(
        "--virtual-pipeline-model-parallel-size",
        type=int,
        default=None,
        help="model chunks per pipeline rank",
    )
    layout.add_argument("--expert-model-parallel-size", type=int, default=1)
    layout.add_argument("--use-distributed-optimizer", action="store_true")
    layout.add_argument("--recompute", action="store_true", help="recompute every layer in backward")
    train = parser.add_argument_group("training")
    train.add_argument("--micro-batch-size", type=int, default=1)
    train.add_argument("--global-batch-size", type=int, default=16)
    train.add_argument("--train-iters", type=int, default=20)
    train.add_argument("--lr", type=float, default=3e-4)
    train.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def initialize(args: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    init_num_microbatches_calculator(
        rank=torch.distributed.get_rank(),
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def build_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        # Megatron trains experts with tensor parallelism only together with sequence parallelism.
        sequence_parallel=args.num_experts is not None and args.tensor_model_parallel_size > 1,
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=args.ffn_hidden_size if args.num_experts else None,
        moe_router_topk=args.moe_router_topk,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=1e-2,
        overlap_p2p_comm=args.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=args.virtual_pipeline_model_parallel_size is None,
        recompute_granularity="full" if args.recompute else None,
        recompute_method="uniform" if args.recompute else None,
        recompute_num_layers=1 if args.recompute else None,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )


def known(function: Callable, **kwargs: Any) -> dict[str, Any]:
    """Those of the arguments that the installed megatron-core has; older ones do without."""
    return {name: value for name, value in kwargs.items() if name in inspect.signature(function).parameters}


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    """The model chunks of this pipeline rank, in bf16, each wrapped for data parallelism."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.use_distributed_optimizer,
    )
    chunks = []
    for chunk in range(args.virtual_pipeline_model_parallel_size or 1):
        vp_stage = chunk if args.virtual_pipeline_model_parallel_size else None
        place = known(parallel_state.is_pipeline_first_stage, ignore_virtual=False, vp_stage=vp_stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=args.num_experts, normalization=config.normalization
            ),
            vocab_size=args.vocab_size,
            max_sequence_length=args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            **known(GPTModel, vp_stage=vp_stage),
        )
        wrapped = DistributedDataParallel(
            config, ddp_config, Float16Module(config, model.cuda()), disable_bucketing=chunk > 0
        )
        chunks.append(wrapped)
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def mock_batches(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of random tokens; labels are the tokens shifted by one."""
    generator = torch.Generator().manual_seed(args.seed + parallel_state.get_data_parallel_rank())
    positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1).cuda()
    while True:
        text = torch.randint(
            args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=generator
        )
        yield {
            "tokens": text[:, :-1].contiguous().cuda(non_blocking=True),
            "labels": text[:, 1:].contiguous().cuda(non_blocking=True),
            "positions": positions,
        }


def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    # A copy: the scheduler divides the loss by the number of micro-batches in place.
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module):
    batch = next(batches)
    output = model(batch["tokens"], batch["positions"], attention_mask=None, labels=batch["labels"])
    return output, loss_function


def train(args: argparse.Namespace) -> None:
    config = build_config(args)
    model = build_model(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            weight_decay=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=args.use_distributed_optimizer,
            **known(OptimizerConfig, overlap_param_gather=args.use_distributed_optimizer),
        ),
        model,
    )
    config.grad_scale_func = optimizer.scale_loss
    batches = [mock_batches(args) for _ in model]
    run_iteration = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=batches if len(model) > 1 else batches[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )

    began = time.perf_counter()
    for iteration in range(1, args.train_iters + 1):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_iteration(forward_only=False)
        _, grad_norm, _ = optimizer.step()
        if parallel_state.is_pipeline_last_stage():
            loss = torch.stack([loss["lm loss"] for loss in losses]).mean()
            torch.distributed.all_reduce(
                loss, op=torch.distributed.ReduceOp.AVG, group=parallel_state.get_data_parallel_group()
            )
        torch.cuda.synchronize()
        now = time.perf_counter()
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            print(
                f"iteration {iteration:8d}/{args.train_iters:8d} |"
                f" elapsed time per iteration (ms): {(now - began) * 1e3:.1f} |"
                f" global batch size: {args.global_batch_size:5d} |"
                f" lm loss: {loss.item():.6E} |"
                f" grad norm: {grad_norm:.3f} |",
                flush=True,
            )
        began = now


def main() -> None:
    args = parse_args()
    initialize(args)
    train(args)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
