"""Jobs that fit with balanced experts only."""

from __future__ import annotations

import pytest

from prism_plugins.checks.expert_load import expert_load_findings
from prism_plugins.program.prediction import ClassMemory
from prism_plugins.world.layout import Layout

GIB = 2**30
EXPERTS = Layout(world_size=8, dp=8, ep=8)


def memory(used: int, activations: int, *, name: str = "stage 0") -> ClassMemory:
    return ClassMemory(
        ranks="0-7", name=name, peak_allocated_bytes=used * GIB, peak_reserved_bytes=used * GIB, allocated_bytes_end=0,
        device_used_bytes=used * GIB, capacity_bytes=80 * GIB, peak_phase="forward",
        by_category={"activations": activations * GIB, "parameters": GIB},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("used", "activations", "severity"),
    [(70, 50, "warning"), (70, 15, "info"), (70, 10, None), (70, 0, None), (81, 40, None)],
)
def test_the_limit_is_told_in_times_the_mean(used, activations, severity):
    found = expert_load_findings(EXPERTS, [memory(used, activations)], "balanced")
    assert [f.severity for f in found] == ([severity] if severity else [])
    if severity == "warning":
        assert "more than 1.20 times the mean (if all 50.0 GiB" in found[0].message


def test_the_class_nearest_to_its_limit_is_named():
    (finding,) = expert_load_findings(EXPERTS, [memory(60, 25), memory(70, 15, name="stage 1")], "balanced")
    assert "borderline: stage 1" in finding.message


def test_nothing_is_said_where_load_does_not_move_memory():
    tight = [memory(70, 50)]
    assert expert_load_findings(EXPERTS, tight, "zipf:1.2") == []
    assert expert_load_findings(Layout(world_size=8, dp=8), tight, "balanced") == []
