"""PYTORCH_ALLOC_CONF, and what its settings do to blocks, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from prism_plugins.errors import PrismError
from prism_plugins.program.allocator_settings import (
    UNLIMITED,
    AllocatorSettings,
    parse_settings,
    settings_from_environment,
)
from prism_plugins.program.memory_allocator import CachingAllocator, block_bytes

MIB = 2**20


def test_all_keys():
    settings = parse_settings(
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:64,"
        "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
    )
    assert settings.expandable_segments
    assert settings.max_split_size == 128 * MIB
    assert settings.max_non_split_rounding == 64 * MIB
    assert settings.garbage_collection_threshold == 0.8
    # As torch documents the example: 256 MiB is interval 8; what lies below counts as the first entry.
    assert settings.roundup_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert settings.unknown == ()


def test_defaults_and_the_two_variables():
    assert settings_from_environment({}) == AllocatorSettings() == parse_settings("")
    assert parse_settings("roundup_power2_divisions:4").roundup_divisions == (4,) * 16
    both = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert settings_from_environment(both).max_split_size == 64 * MIB
    del both["PYTORCH_ALLOC_CONF"]
    assert settings_from_environment(both) == AllocatorSettings(expandable_segments=True)


def test_what_is_not_followed_is_named():
    settings = parse_settings("backend:cudaMallocAsync,pinned_use_background_threads:True,new_key:3")
    assert settings.unknown == ("backend:cudaMallocAsync", "new_key")
    assert settings.max_split_size == UNLIMITED


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:20",
        "max_split_size_mb:lots",
        "expandable_segments:yes",
        "garbage_collection_threshold:1.5",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[100:4]",
        "roundup_power2_divisions:[4]",
        "expandable_segments",
    ],
)
def test_what_torch_refuses(text):
    with pytest.raises(PrismError, match="PYTORCH_ALLOC_CONF"):
        parse_settings(text)


def test_divisions_between_powers_of_two():
    settings = parse_settings("roundup_power2_divisions:4")
    # torch's documentation: 1200 with 4 divisions becomes 1280 (1024, 1280, 1536, 1792); here above 512 x 4.
    requested = np.array([1200, 1200 * 1024, 1280 * 1024, 1281 * 1024, 2**30, 2**30 + 1, 2000, 0])
    expected = [1536, 1280 * 1024, 1280 * 1024, 1536 * 1024, 2**30, 2**30 + 2**28, 2048, 0]
    assert block_bytes(requested, settings).tolist() == expected


def play(conf, *steps):
    """Steps: bytes to allocate, or minus the ordinal of an allocation to release (-0.5 for the first)."""
    allocator = CachingAllocator(parse_settings(conf))
    for step in steps:
        if step > 0:
            allocator.run(np.array([step]), np.array([-1]), np.array([0]))
        else:
            allocator.run(np.array([-1]), np.array([int(-step)]), np.array([0]))
    return allocator


def test_an_expandable_segment_grows_at_its_end():
    conf = "expandable_segments:True"
    assert play(conf, 30 * MIB).reserved == 40 * MIB  # pages of 20 MiB
    assert play(conf, 30 * MIB, 10 * MIB).reserved == 40 * MIB  # the rest of the second page
    assert play(conf, 30 * MIB, 12 * MIB).reserved == 60 * MIB  # the rest, and a page more
    assert play(conf, 512).reserved == 2 * MIB  # small pool
    # What is released in the middle is reused; the end of what is mapped is kept for what fits nowhere else.
    allocator = play(conf, 30 * MIB, 40 * MIB, 30 * MIB, -0.5, 25 * MIB, 5 * MIB)
    assert allocator.reserved == 100 * MIB
    assert [block[:2] for block in allocator.live.values()] == [
        (allocator.live[1][0], 40 * MIB),
        (allocator.live[1][0] + 40 * MIB, 30 * MIB),
        (allocator.live[1][0] - 30 * MIB, 25 * MIB),
        (allocator.live[1][0] - 5 * MIB, 5 * MIB),
    ]
    # Ordinary segments would be 30 + 40 + 30 MiB too, but 35 MiB find no room in 30: one segment more.
    assert play("", 30 * MIB, 30 * MIB, -0.5, -1, 50 * MIB).reserved == 110 * MIB
    assert play(conf, 30 * MIB, 30 * MIB, -0.5, -1, 50 * MIB).reserved == 60 * MIB


def test_large_blocks_are_not_split():
    conf = "max_split_size_mb:64"
    # 100 MiB are above the limit: 40 MiB do not take from them, 90 MiB take all of them.
    assert play("", 100 * MIB, -0.5, 40 * MIB).reserved == 100 * MIB
    assert play(conf, 100 * MIB, -0.5, 40 * MIB).reserved == 140 * MIB
    taken = play(conf, 100 * MIB, -0.5, 90 * MIB)
    assert (taken.reserved, taken.allocated) == (100 * MIB, 100 * MIB)
    # … unless more than max_non_split_rounding_mb would be lost.
    assert play(conf, 100 * MIB, -0.5, 70 * MIB).reserved == 170 * MIB
    assert play(conf + ",max_non_split_rounding_mb:40", 100 * MIB, -0.5, 70 * MIB).reserved == 100 * MIB
