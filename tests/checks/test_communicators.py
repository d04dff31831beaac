"""Jobs whose ranks open many communicators."""

from __future__ import annotations

from prism_plugins.checks.communicators import communicator_findings
from prism_plugins.program.prediction import ClassMemory

MIB = 2**20


def memory(name: str, communicators: int) -> ClassMemory:
    outside = {"cuda_context": 600 * MIB} | {f"nccl G{i} (2 ranks)": 512 * MIB for i in range(communicators)}
    return ClassMemory(
        ranks="0-7", name=name, peak_allocated_bytes=0, peak_reserved_bytes=0, allocated_bytes_end=0, device_used_bytes=0,
        capacity_bytes=80 * 2**30, peak_phase="", by_category={}, outside_torch=outside,
    )  # fmt: skip


def test_the_class_with_most_communicators_is_named_with_their_memory():
    (finding,) = communicator_findings([memory("stage 0", 3), memory("stage 1", 30)])
    assert finding.severity == "info"
    assert "stage 1 opens 30 NCCL communicators: 15.0 GiB" in finding.message


def test_the_usual_number_is_not_worth_a_word():
    assert communicator_findings([memory("stage 0", 8)]) == []
    assert communicator_findings([]) == []
