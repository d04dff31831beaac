"""Train a Llama from ``transformers`` on long sequences (Ulysses by Arctic Long Sequence Training): a plain script as a
user writes it.

torchrun --nproc-per-node 8 scripts/deepspeed/train_llama_ulysses.py --deepspeed_config scripts/deepspeed/configs/ulysses_z3.json
"""

from __future__ import annotations

import argparse

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--seq", type=int, default=512, help="whole sequence, before it is split")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--sp", type=int, default=8, help="ranks that share a sequence")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class RandomTokens(Dataset):
    """Reproducible random token sequences with their positions."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seq, self.vocab = args.seq, args.vocab

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab, (self.seq,), generator=generator)
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(self.seq)}


def sequence_loss(loss: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean over the tokens of all parts of the sequence, of each part's mean."""
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
    return sum(part * count for part, count in zip(losses, counts, strict=True)) / sum(counts)


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads or args.heads,
        max_position_embeddings=args.seq,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = LlamaForCausalLM(config)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=args.sp,
        micro_batch_size=1,
        seq_length=args.seq,
        seq_length_is_variable=False,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), mpu=mpu
    )
    data = RandomTokens(args)
    loader = UlyssesSPDataLoaderAdapter(
        DataLoader(data, batch_size=1, sampler=DistributedSampler(data)),
        sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=mpu.get_sequence_parallel_group(),
        sp_world_size=mpu.get_sequence_parallel_world_size(),
        device=engine.device,
    )
    for batch in loader:
        if engine.global_steps == args.steps:
            break
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        shift_labels = batch.pop("shift_labels")
        logits = engine(**batch).logits
        part = model.loss_function(
            logits=logits, labels=None, shift_labels=shift_labels, vocab_size=args.vocab
        )
        loss = sequence_loss(part, shift_labels, mpu.get_sequence_parallel_group())
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
