"""Train a GPT with DeepSpeed's pipeline engine on synthetic tokens: a plain script as a user writes it.

    deepspeed scripts/deepspeed/train_gpt_pipeline.py --stages 4 --deepspeed_config scripts/deepspeed/pipeline_z1.json

Ranks that are left over after pipeline and tensor parallelism are data parallel.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import Tensor, nn


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tied", action="store_true", help="output layer shares the embedding's weight")
    parser.add_argument("--with-mask", action="store_true", help="stages exchange (activations, mask) tuples")
    parser.add_argument("--partition", default="type:block", help="uniform, parameters or type:REGEX")
    parser.add_argument("--checkpoint-interval", type=int, default=0, help="layers per activation checkpoint")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0: none")
    return deepspeed.add_config_arguments(parser).parse_args()


class CopyToTensorParallel(torch.autograd.Function):
    """Identity; its gradient is summed over the tensor-parallel group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverTensorParallel(torch.autograd.Function):
    """Sum over the tensor-parallel group; its gradient is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Embedding(nn.Module):
    """Token and position embedding. With ``with_mask`` it passes (activations, padding mask) on."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.word = nn.Embedding(args.vocab, args.hidden)
        self.position = nn.Embedding(args.seq, args.hidden)
        nn.init.normal_(self.word.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.with_mask = args.with_mask

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return (x, tokens.ne(0).long()) if self.with_mask else x


class Block(nn.Module):
    """A transformer block; heads and the MLP are split over the tensor-parallel group."""

    def __init__(self, args: argparse.Namespace, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        ways = args.tensor_parallel
        self.heads, self.group = args.heads // ways, group
        self.norm1, self.norm2 = nn.LayerNorm(args.hidden), nn.LayerNorm(args.hidden)
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden // ways)
        self.out = nn.Linear(args.hidden // ways, args.hidden)
        self.up = nn.Linear(args.hidden, 4 * args.hidden // ways)
        self.down = nn.Linear(4 * args.hidden // ways, args.hidden)
        if ways > 1:
            # How DeepSpeed knows which gradients count once and which on every rank of the group.
            for param in (*self.qkv.parameters(), self.out.weight, *self.up.parameters(), self.down.weight):
                param.tensor_model_parallel = True

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        x, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        x = x + self.gather(self.out(self.attention(self.split(self.norm1(x)), mask)))
        x = x + self.gather(self.down(F.gelu(self.up(self.split(self.norm2(x))))))
        return x if mask is None else (x, mask)

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            causal = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & mask.bool()[:, None, None])
        return y.transpose(1, 2).reshape(batch, seq, -1)

    def split(self, x: Tensor) -> Tensor:
        return x if self.group is None else CopyToTensorParallel.apply(x, self.group)

    def gather(self, x: Tensor) -> Tensor:
        return x if self.group is None else SumOverTensorParallel.apply(x, self.group)


class Norm(nn.LayerNorm):
    """The last norm; drops the mask."""

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(inputs[0] if isinstance(inputs, tuple) else inputs)


class Output(nn.Linear):
    """The output layer of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.hidden, args.vocab, bias=False)
        nn.init.normal_(self.weight, std=0.02)


def logits_of(embedding: Embedding, x: Tensor) -> Tensor:
    """The tied output layer."""
    return F.linear(x, embedding.word.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same for an index on every rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.vocab, self.seq = args.vocab, args.seq

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, self.vocab, (self.seq + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


def build_model(args: argparse.Namespace) -> PipelineModule:
    replicas = dist.get_world_size() // (args.stages * args.tensor_parallel)
    topology = PipeModelDataParallelTopology(num_pp=args.stages, num_mp=args.tensor_parallel, num_dp=replicas)
    group = None
    if args.tensor_parallel > 1:
        group = PipelineParallelGrid(topology=topology).get_slice_parallel_group()
    if args.tied:
        first = TiedLayerSpec("embedding", Embedding, args, tied_weight_attr="word.weight")
        last = TiedLayerSpec(
            "embedding", Embedding, args, forward_fn=logits_of, tied_weight_attr="word.weight"
        )
    else:
        first = LayerSpec(Embedding, args)
        last = LayerSpec(Output, args)
    blocks = [LayerSpec(Block, args, group) for _ in range(args.layers)]
    return PipelineModule(
        layers=[first, *blocks, LayerSpec(Norm, args.hidden), last],
        topology=topology,
        loss_fn=loss_fn,
        partition_method=args.partition,
        activation_checkpoint_interval=args.checkpoint_interval,
        checkpointable_layers=["Block"],
    )


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(args=args, model=build_model(args), training_data=Tokens(args))
    for step in range(args.steps):
        engine.train_batch()
        if args.eval_every and (step + 1) % args.eval_every == 0:
            loader = torch.utils.data.DataLoader(Tokens(args), batch_size=engine.micro_batch_size)
            engine.eval_batch(iter(loader))


if __name__ == "__main__":
    main()
