"""Random numbers of the virtual device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

DEVICE = "virtual"


def draw():
    return torch.rand(4, device="cuda").tolist()


def test_seed_decides():
    torch.cuda.manual_seed(3)
    first = draw()
    assert draw() != first
    torch.cuda.manual_seed(3)
    assert draw() == first
    torch.manual_seed(3)  # seeds every device
    assert draw() == first


def test_state_is_saved_and_restored():
    state = torch.cuda.get_rng_state()
    assert state.shape == (16,)
    assert state.dtype == torch.uint8
    first = draw()
    torch.cuda.set_rng_state(state)
    assert draw() == first
    with torch.random.fork_rng(devices=[0]):
        draw()
    second = draw()
    torch.cuda.set_rng_state(state)
    assert [draw(), draw()] == [first, second]


def test_shape_only_draws_advance_the_state():
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state().tolist()
    torch.randn(1024, 1024, device="cuda")
    F.dropout(torch.ones(1024, 1024, device="cuda"), 0.5)
    assert torch.cuda.get_rng_state().tolist() != before


def test_generators_of_their_own():
    g = torch.Generator("cuda").manual_seed(1)
    h = torch.Generator("cuda").manual_seed(1)
    assert g.device.type == "cuda"
    assert (
        torch.rand(3, device="cuda", generator=g).tolist()
        == torch.rand(3, device="cuda", generator=h).tolist()
    )
    assert torch.cuda.default_generators[1].device == torch.device("cuda", 1)
    assert torch.randperm(10, device="cuda").sort().values.tolist() == list(range(10))


def test_the_hosts_random_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    torch.rand(10, device="cuda")
    F.dropout(torch.ones(100, device="cuda"), 0.5)
    torch.randint(0, 5, (7,), device="cuda")
    assert torch.rand(3).tolist() == expected


def test_small_dropout_is_computed():
    torch.cuda.manual_seed(0)
    x = torch.ones(1000, device="cuda")
    y = F.dropout(x, 0.25)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75} or len(y.unique()) == 2
    assert 600 < (y > 0).sum().item() < 900
