"""A model of 6 to 7 billion parameters under ZeRO-3, built as most scripts build it (on the CPU, no zero.Init), that prints what
the GPU holds after every step of the way. Knows nothing about the plugin.

    torchrun --nproc-per-node 1 scripts/deepspeed/memory_report.py --model llama --offload \\
        --prism-emulate --prism-world-size 4
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from transformers import GPTJConfig, GPTJForCausalLM, LlamaConfig, LlamaForCausalLM

GIB = 2**30
MODELS = {
    "llama": lambda attn: LlamaForCausalLM(
        LlamaConfig(use_cache=False, attn_implementation=attn)
    ),  # 7B: 4096 x 32 layers, vocabulary 32000
    "gptj": lambda attn: GPTJForCausalLM(GPTJConfig(use_cache=False, attn_implementation=attn)),  # GPT-J-6B
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--offload", action="store_true", help="optimizer and parameters to the CPU")
    parser.add_argument("--small-buckets", action="store_true", help='as "auto" of the Trainer sets them')
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--empty-cache", action="store_true", help="give unused memory back before each step")
    parser.add_argument("--attention", help="e.g. eager; default: as transformers chooses")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    zero = {"stage": 3}
    if args.offload:
        on_cpu = {"device": "cpu", "pin_memory": True}
        zero |= {"offload_optimizer": on_cpu, "offload_param": on_cpu}
    if args.small_buckets:
        hidden = 4096
        zero |= {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": zero,
    }
    deepspeed.init_distributed()
    model = MODELS[args.model](args.attention)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    if torch.distributed.get_rank() == 0:
        estimate_zero3_model_states_mem_needs_all_live(
            model, num_gpus_per_node=torch.distributed.get_world_size(), num_nodes=1
        )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    show("initialize")
    tokens = torch.randint(0, 30000, (args.batch, args.seq), device=engine.device)
    for step in range(args.steps):
        if args.empty_cache:
            torch.cuda.empty_cache()
            show(f"empty {step + 1}")
        loss = engine(input_ids=tokens, labels=tokens).loss
        show(f"forward {step + 1}")
        engine.backward(loss)
        show(f"backward {step + 1}")
        engine.step()
        show(f"step {step + 1}")


def show(where: str) -> None:
    cuda = torch.cuda
    held = {
        "allocated": cuda.memory_allocated(),
        "peak": cuda.max_memory_allocated(),
        "reserved": cuda.memory_reserved(),
    }
    print(f"{where:12}", *(f"{name} {size / GIB:6.2f} GiB" for name, size in held.items()), flush=True)
    cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
