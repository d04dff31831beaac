#!/usr/bin/env python3
"""Train a small Llama with Hugging Face's Trainer on DeepSpeed, on random tokens.

    deepspeed --num_gpus 8 train_trainer.py --deepspeed configs/zero3_auto.json --output_dir out
    torchrun --nproc-per-node 1 train_trainer.py --deepspeed configs/zero3_auto.json --output_dir out \\
        --prism-emulate --prism-world-size 1024

Every option of ``transformers.TrainingArguments`` is accepted.
"""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 4
    num_heads: int = 4
    vocab_size: int = 32000
    seq_length: int = 512


class RandomTokens(Dataset):
    """Sequences of random tokens, the same in every run."""

    def __init__(self, num_sequences: int, seq_length: int, vocab_size: int) -> None:
        self.num_sequences = num_sequences
        self.seq_length = seq_length
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab_size, (self.seq_length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    model_args, training_args = HfArgumentParser(
        (ModelArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    config = LlamaConfig(
        vocab_size=model_args.vocab_size,
        hidden_size=model_args.hidden_size,
        intermediate_size=model_args.intermediate_size,
        num_hidden_layers=model_args.num_layers,
        num_attention_heads=model_args.num_heads,
        num_key_value_heads=model_args.num_heads,
        max_position_embeddings=model_args.seq_length,
        use_cache=False,
    )
    # Under ZeRO-3 the parameters are sharded while the model is built: TrainingArguments was made before it.
    model = LlamaForCausalLM._from_config(config)
    sizes = (model_args.seq_length, model_args.vocab_size)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=RandomTokens(1_000_000, *sizes),
        eval_dataset=RandomTokens(256, *sizes),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
