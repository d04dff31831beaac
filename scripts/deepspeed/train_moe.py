"""Train a GPT with mixture-of-experts layers of ``deepspeed.moe``: a plain script as a user writes it.

torchrun --nproc-per-node 8 scripts/deepspeed/train_moe.py --deepspeed_config scripts/deepspeed/configs/moe_z1.json
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.utils.data import Dataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument(
        "--ep",
        type=int,
        nargs="+",
        default=[8],
        help="expert-parallel size; several: of the mixture layers in turn",
    )
    parser.add_argument("--experts", type=int, default=16, help="experts a layer")
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--no-drop", action="store_true", help="size the buffers for the busiest expert")
    parser.add_argument("--residual", action="store_true", help="a dense MLP beside the experts")
    parser.add_argument("--noise", choices=["Jitter", "RSample"], help="noise of the gate")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Block(nn.Module):
    """A transformer layer; its MLP is a mixture of experts if ``ep`` is given."""

    def __init__(self, args: argparse.Namespace, ep: int | None) -> None:
        super().__init__()
        hidden = args.hidden
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.is_moe = ep is not None
        if self.is_moe:
            self.mlp = MoE(
                hidden_size=hidden,
                expert=self.mlp,
                num_experts=args.experts,
                ep_size=ep,
                k=args.topk,
                capacity_factor=args.capacity_factor,
                drop_tokens=not args.no_drop,
                use_residual=args.residual,
                noisy_gate_policy=args.noise,
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        if not self.is_moe:
            return x + self.mlp(self.norm2(x)), 0.0
        y, aux_loss, _ = self.mlp(self.norm2(x))
        return x + y, aux_loss


class MoEGPT(nn.Module):
    """Every second layer is a mixture of experts."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        sizes = [args.ep[i // 2 % len(args.ep)] if i % 2 else None for i in range(args.layers)]
        self.blocks = nn.ModuleList(Block(args, ep) for ep in sizes)
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)
        self.apply(initialize)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        total_aux = 0.0
        for block in self.blocks:
            x, aux_loss = block(x)
            total_aux = total_aux + aux_loss
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * total_aux


class RandomTokens(Dataset):
    """Reproducible random token sequences."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seq, self.vocab = args.seq, args.vocab

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab, (self.seq + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


def initialize(module: nn.Module) -> None:
    """Weights as in GPT-2."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1234)
    model = MoEGPT(args)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=groups, training_data=RandomTokens(args)
    )
    batches = iter(loader)
    while engine.global_steps < args.steps:
        tokens, labels = (t.to(engine.device) for t in next(batches))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
