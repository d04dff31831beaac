"""What the Megatron integration does for realistic values on a real GPU, on tensors of the CPU."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from prism_plugins.capture import recorder as capture
from prism_plugins.integrations.megatron.compat import _embedding


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(capture, "_recorder", types.SimpleNamespace(answering=contextlib.nullcontext))
    spec = types.SimpleNamespace(device="cuda", real_ranks=())
    said: list[str] = []
    return types.SimpleNamespace(context=types.SimpleNamespace(spec=spec, assume=said.append, said=said))


def layer(start: int, part: int, whole: int = 100) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        num_embeddings_per_partition=part, num_embeddings=whole, vocab_start_index=start
    )


def test_every_rank_embeds_tokens_of_its_own_part(session) -> None:
    seen: list[torch.Tensor] = []
    forward = _embedding(session, lambda self, tokens: seen.append(tokens.clone()), None)
    tokens = torch.tensor([[0, 7, 49], [50, 63, 99]])
    forward(layer(50, 50), tokens.clone())
    forward(layer(0, 50), tokens.clone())
    forward(layer(0, 100), tokens.clone())
    assert seen[0].tolist() == [[50, 57, 99], [50, 63, 99]]
    assert seen[1].tolist() == [[0, 7, 49], [0, 13, 49]]
    assert torch.equal(seen[2], tokens), "a vocabulary that is not split stays as it is"
    assert session.context.said


@pytest.mark.parametrize(("device", "real_ranks"), [("virtual", ()), ("cpu", ()), ("cuda", (0, 1))])
def test_elsewhere_nothing_changes(session, device: str, real_ranks: tuple) -> None:
    session.context.spec.device, session.context.spec.real_ranks = device, real_ranks

    def original(self, tokens):
        return tokens

    assert _embedding(session, original, None) is original
