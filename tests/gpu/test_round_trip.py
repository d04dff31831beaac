"""A program written as the trace that a GPU would have given of it, and read again, is the program it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_plugins.capture.kineto import parse_trace
from prism_plugins.capture.kineto_program import ANSWER, END, Mark, SignatureTable, build_iteration
from prism_plugins.program.model import EVENT_DTYPE, EventKind

MAIN, BACKWARD = 100, 200


class Writer:
    """Writes Kineto events; the host's clock runs on, the GPU's streams follow it."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self.marks: list[Mark] = []
        self.now = 1000.0
        self.free_at: dict[int, float] = {}
        self.correlation = 0
        self.address: dict[int, int] = {}
        self.rows: list[tuple] = []
        self.thread = MAIN
        self._next_id = 0
        self._blocks = iter(range(1 << 20, 1 << 40, 1 << 12))
        self._reusable: list[int] = []

    def put(self, cat: str, name: str, dur: float = 1.0, **args) -> None:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "tid": self.thread,
            "ts": self.now,
            "dur": dur,
            "args": args,
        }
        self.events.append(event)

    def launch(self, stream: int, us: float) -> None:
        self.correlation += 1
        self.put("cuda_runtime", "cudaLaunchKernel", correlation=self.correlation)
        start = max(self.now + 4, self.free_at.get(stream, 0.0))
        self.free_at[stream] = start + us
        self.events.append(
            {"ph": "X", "cat": "kernel", "name": "k", "tid": stream, "ts": start, "dur": us,
             "args": {"stream": stream, "correlation": self.correlation}}
        )  # fmt: skip

    def op(self, number: int, stream: int, kernels: int) -> None:
        self.put("cpu_op", f"aten::op{number}", dur=10.0 * kernels + 5)
        for _ in range(kernels):
            self.now += 5
            self.launch(stream, 3.0)
            self.now += 5
        self.now += 6
        self.rows.append((EventKind.KERNEL, number, stream != 7))

    def alloc(self, nbytes: int, *, inside: bool = False) -> None:
        address = self._reusable.pop() if self._reusable else next(self._blocks)
        self._memory(address, nbytes)
        if inside:
            self._memory(address, -nbytes)
            self._reusable.append(address)
            return
        self.address[self._next_id] = address
        self.rows.append((EventKind.ALLOC, self._next_id, nbytes))
        self._next_id += 1

    def free(self, which: int) -> None:
        number = sorted(self.address)[which % len(self.address)]
        address = self.address.pop(number)
        self._memory(address, -512)
        self._reusable.append(address)
        self.rows.append((EventKind.FREE, number, 0))

    def _memory(self, address: int, nbytes: int) -> None:
        self.now += 1
        args = {"Addr": address, "Bytes": nbytes, "Device Type": 1}
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "tid": self.thread,
                "ts": self.now,
                "args": args,
            }
        )
        self.now += 1

    def mark(self, mark: Mark) -> None:
        self.put("user_annotation", f"prism::{len(self.marks)}")
        self.marks.append(mark)
        self.now += 3
        self.rows.append((mark.kind, mark.ref, mark.value))

    def call(self, number: int) -> None:
        self.mark(Mark(EventKind.COMM, number, 10 + number))
        self.put("user_annotation", ANSWER, dur=30.0)
        self.now += 2
        self.alloc(512, inside=True)
        self.launch(7, 5.0)
        self.now += 40

    def trace(self) -> bytes:
        self.thread, self.now = MAIN, self.now + 1
        self.put("user_annotation", END)
        self.now += 5
        self.put("cuda_runtime", "cudaDeviceSynchronize", correlation=-5)
        by_thread = sorted(self.events, key=lambda e: -e["tid"])  # as torch writes it
        return json.dumps({"traceEvents": by_thread}).encode()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_added_or_moved(actions: list[tuple[int, int, bool]]) -> None:
    writer = Writer()
    for what, number, backward in actions:
        writer.thread = BACKWARD if backward else MAIN
        if what <= 2:
            writer.op(number, 7 if what < 2 else 13, 1 + number % 3)
        elif what == 3:
            writer.alloc(512 * (1 + number))
        elif what == 4 and writer.address:
            writer.free(number)
        elif what == 5:
            writer.call(number)
        elif what == 6:
            writer.mark(Mark(EventKind.PHASE_BEGIN, number))
        else:
            writer.mark(Mark(EventKind.WORK_WAIT, number))
    table = SignatureTable()
    iteration = build_iteration(parse_trace(writer.trace(), source="trace"), marks=writer.marks, table=table)
    read = []
    for event in iteration.events:
        kind, ref = EventKind(event["kind"]), int(event["ref"])
        if kind == EventKind.KERNEL:
            read.append((kind, int(table.signatures[ref].op.removeprefix("aten::op")), event["stream"] != 0))
        elif kind in (EventKind.ALLOC, EventKind.COMM):
            read.append((kind, ref, int(event["value"])))
        else:
            read.append((kind, ref, 0))
    assert read == writer.rows
    assert iteration.events.dtype == EVENT_DTYPE
    kernels = [row for row in writer.rows if row[0] == EventKind.KERNEL]
    expected = [3000 * (1 + number % 3) for _, number, _ in kernels]
    assert iteration.op_ns.tolist() == pytest.approx(expected, abs=3_000 * 3 + 100), (
        "kernels, and gaps up to 3 us each"
    )
    assert np.all(iteration.op_ns >= np.array(expected) - 1)
