"""Train a Llama from ``transformers``, any ZeRO stage or AutoTP: a plain script as a user writes it.

torchrun --nproc-per-node 8 scripts/deepspeed/train_llama.py --deepspeed_config scripts/deepspeed/configs/autotp_z1.json
"""

from __future__ import annotations

import argparse
import contextlib

import deepspeed
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, help="size of the MLP; default: 3 times the hidden size")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--zero-init", action="store_true", help="never hold the whole model on one rank")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class RandomTokens(Dataset):
    """Reproducible random token sequences."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seq, self.vocab = args.seq, args.vocab

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab, (self.seq,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ffn or 3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    sharded = deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config) if args.zero_init else None
    with sharded or contextlib.nullcontext():
        model = LlamaForCausalLM(config)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=RandomTokens(args)
    )
    batches = iter(loader)
    while engine.global_steps < args.steps:
        batch = {name: tensor.to(engine.device) for name, tensor in next(batches).items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
