"""Snapshots for memory_viz: torch's own module reads them, and their sums are those of the memory stage."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from prism_plugins.cli import main
from prism_plugins.emit.memory_snapshot import snapshot
from prism_plugins.program.memory import allocated_curve
from prism_plugins.program.model import EVENT_DTYPE, Allocation, EventKind, Phase, Program
from prism_plugins.simulate.timeline import OpTimes

MIB = 2**20


def program() -> Program:
    rows = [
        (EventKind.PHASE_BEGIN, 0, 0, 0, 0),
        (EventKind.ALLOC, 0, 0, 10, 3 * MIB),
        (EventKind.ALLOC, 0, 0, 11, 1000),
        (EventKind.ALLOC, 0, 3, 12, 30 * MIB),
        (EventKind.FREE, 0, 0, 10, 0),
        (EventKind.ALLOC, 0, 0, 13, 2 * MIB),
        (EventKind.FREE, 0, 0, 1, 0),
        (EventKind.PHASE_END, 0, 0, 0, 0),
    ]
    return Program(
        rank=0,
        events=np.array(rows, dtype=EVENT_DTYPE),
        signatures=[],
        comms=[],
        groups=[],
        phases=[Phase(kind="forward", microbatch=2)],
        initial=[Allocation(1, 5 * MIB, "parameters"), Allocation(2, 512, "gradients")],
    )


def times(n: int) -> OpTimes:
    at = np.arange(n) * 1000.0
    return OpTimes(host_ns=at, start_ns=at, end_ns=at, transfer_start_ns=at, lane=np.zeros(n, dtype=np.int32))


def test_blocks_and_history_add_up() -> None:
    p = program()
    made = snapshot(p, times(len(p.events)))
    (trace,) = made["device_traces"]
    live = 0
    for entry in trace:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
    assert live == sum(s["allocated_size"] for s in made["segments"])
    # Without what the next iteration renews, as the curve of the memory stage counts it.
    assert live == allocated_curve(p)[-1]
    for segment in made["segments"]:
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    assert {s["stream"] for s in made["segments"]} == {0, 3}
    frames = next(e["frames"] for e in trace if e["action"] == "alloc" and e["size"] == 30 * MIB)
    assert frames == [{"name": "forward micro-batch 2", "filename": "not told", "line": 0}]


def test_torch_reads_it() -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    p = program()
    made = snapshot(p, times(len(p.events)))
    history = viz.trace(made)
    assert "cudaMalloc(20971520, 20.0MiB)" in history
    assert "# free completed for" in history
    assert "30.0MiB" in viz.segsum(made)
    assert "script" in viz.trace_plot(made)
    assert "script" in viz.segment_plot(made)


def test_prism_trace_writes_them(run, capsys) -> None:
    assert main(("trace", "latest", "--format", "memory", "--ranks", "0")) == 0
    path = run.path / "memory" / "rank0.pickle"
    assert str(path.name) in capsys.readouterr().out
    with path.open("rb") as file:
        assert set(pickle.load(file)) >= {"segments", "device_traces"}
