"""How thread blocks of attention fill a GPU."""

from __future__ import annotations

import math

import pytest

from prism_plugins.costs.attention_tiles import FLASH_BACKWARD, FLASH_FORWARD, Tiles, log_waste

PLAIN = Tiles(1, 128, 128, 0.0)


def waste(tiles: Tiles = PLAIN, *, num_sms: int = 4, **sizes) -> float:
    given = {"heads": 1, "queries": 512, "keys": 512, "causal": False, "backward": False} | sizes
    return math.exp(log_waste(tiles, num_sms=num_sms, **given))


def test_blocks_that_fill_every_sm_waste_nothing() -> None:
    assert waste() == pytest.approx(1.0)
    assert waste(heads=3) == pytest.approx(1.0)


def test_a_last_wave_that_is_nearly_empty_costs_a_wave() -> None:
    assert waste(queries=640) == pytest.approx(2 / 1.25)


def test_a_causal_mask_leaves_the_longest_block_for_last() -> None:
    # Blocks of 1, 2, 3 and 4 tiles on 4 SMs: the kernel lasts 4; half of 16 tiles on 4 SMs would be 2.
    assert waste(causal=True) == pytest.approx(2.0)
    # Backward the first block of keys is seen by all queries: 4, 3, 2, 1.
    assert waste(causal=True, backward=True) == pytest.approx(2.0)


def test_many_heads_even_out_and_stay_cheap() -> None:
    few = waste(FLASH_FORWARD, heads=8, queries=2048, keys=2048, causal=True, num_sms=132)
    many = waste(FLASH_FORWARD, heads=100_000, queries=2048, keys=2048, causal=True, num_sms=132)
    # What stays is the diagonal, half of whose tiles is masked, and the prologue of each block.
    blocks = 16
    tiles = sum(2 * (i + 1) + FLASH_FORWARD.prologue for i in range(blocks))
    assert many == pytest.approx(tiles / (blocks * 32 / 2), rel=0.01)
    assert few > many


def test_a_query_alone_wastes_its_tile() -> None:
    assert waste(FLASH_BACKWARD, queries=1, keys=1, num_sms=132) > 1000
