"""Host memory of a node, from what the sliced ranks counted."""

from __future__ import annotations

import numpy as np

from prism_plugins.program.host_memory import host_memory_findings, host_memory_of_node
from prism_plugins.program.job import RankClass
from prism_plugins.program.model import EVENT_DTYPE, Program
from prism_plugins.program.slices import SliceReport

GIB = 2**30


def rank_class(ranks) -> RankClass:
    program = Program(
        rank=ranks[0],
        events=np.empty(0, EVENT_DTYPE),
        signatures=[], comms=[], groups=[], phases=[], initial=[],
    )  # fmt: skip
    return RankClass(name="c", ranks=np.array(ranks), representative=ranks[0], exemplar=program)


def report(rank: int, *, pinned: int = 0, pageable: int = 0, peak: int = 0) -> SliceReport:
    return SliceReport(
        rank=rank,
        status="ok",
        host_pinned_bytes=pinned * GIB,
        host_pageable_bytes=pageable * GIB,
        host_peak_bytes=peak * GIB,
        untouched_bytes=peak * GIB,
    )


def node(classes, reports, capacity=100):
    return host_memory_of_node(
        classes, {r.rank: r for r in reports}, gpus_per_node=4, capacity_bytes=capacity * GIB
    )


def test_every_rank_of_a_class_counts_as_its_sliced_member():
    host = node([rank_class(range(16))], [report(0, pinned=1, pageable=2, peak=5), report(15, pinned=3)])
    assert (host.pinned_bytes, host.pageable_bytes, host.peak_bytes) == (12 * GIB, 8 * GIB, 20 * GIB)
    assert host.untouched_bytes == 5 * GIB


def test_the_node_that_holds_most_is_reported():
    classes = [rank_class([0, 1, 2, 4]), rank_class([3, 5, 6, 7])]
    host = node(classes, [report(0, pinned=1, peak=1), report(3, pinned=10, peak=20)])
    assert host.peak_bytes == (1 + 3 * 20) * GIB
    assert host.pinned_bytes == (1 + 3 * 10) * GIB


def test_a_class_without_a_slice_counts_as_the_largest():
    host = node([rank_class([0, 1]), rank_class([2, 3])], [report(0, peak=7)])
    assert host.peak_bytes == 28 * GIB


def test_jobs_without_large_host_tensors_have_none():
    assert node([rank_class([0])], [report(0)]) is None
    assert host_memory_findings(None) == []


def test_a_node_that_is_too_small_is_found():
    classes = [rank_class(range(4))]
    assert host_memory_findings(node(classes, [report(0, peak=25)])) == []
    (finding,) = host_memory_findings(node(classes, [report(0, pinned=2, peak=26)]))
    assert (finding.kind, finding.severity) == ("host memory", "error")
    assert "104 GiB" in finding.message
    assert "8 GiB stay pinned" in finding.message
