from __future__ import annotations

import pytest

from prism_plugins.device.facts import GPUS, gpu_facts
from prism_plugins.errors import PrismError


def test_known_gpus():
    for gpu in GPUS.values():
        assert gpu.memory_bytes % 2**16 == 0
        assert gpu.num_sms > 100
    assert gpu_facts("h200").memory_bytes > gpu_facts("h100-sxm-80gb").memory_bytes


def test_unknown_gpu():
    with pytest.raises(PrismError, match="known are h100"):
        gpu_facts("h900")
