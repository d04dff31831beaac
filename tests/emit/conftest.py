"""Synthetic programs: a 1F1B iteration with tp all_reduce, batched p2p, an asynchronous dp all_reduce and an optimizer.

Times come from a plain event-by-event pass over one rank (no peers), enough to draw and to sum.
"""

import dataclasses

import msgspec
import numpy as np
import pytest

from prism_plugins.emit.predicted_log import write_predicted_log
from prism_plugins.emit.prediction_json import write_prediction
from prism_plugins.options import Job, Options
from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    Program,
    TensorSpec,
)
from prism_plugins.program.prediction import (
    Audit,
    Breakdown,
    ClassMemory,
    ClassSummary,
    Prediction,
    SliceSummary,
)
from prism_plugins.program.slices import JobFacts, SliceReport, StageInfo
from prism_plugins.program.store import save_program
from prism_plugins.rundir import RunDir, RunInfo, write_json
from prism_plugins.simulate.timeline import COMM_LANE, OpTimes
from prism_plugins.world.classes import plan_representatives
from prism_plugins.world.layout import Layout

BF16 = "bfloat16"
LAYOUT = Layout(world_size=8, tp=2, pp=2, dp=2, num_microbatches=4)


def _spec(*shape, dtype=BF16, strides=()):
    return TensorSpec(dtype, shape, strides)


SIGNATURES = [
    OpSignature(op="aten::mm", inputs=(_spec(4096, 4096), _spec(4096, 11008)), outputs=(_spec(4096, 11008),)),
    OpSignature(op="aten::add.Tensor", inputs=(_spec(4096, 4096),) * 2, outputs=(_spec(4096, 4096),)),
    OpSignature(
        op="prism::fused",
        inputs=(_spec(4096, 11008),),
        outputs=(_spec(4096, 5504),),
        attrs={"name": "fused 100% swiglu"},
    ),
    OpSignature(op="aten::view", inputs=(_spec(4096, 4096),), outputs=(_spec(4096, 4096),)),
    OpSignature(op="aten::copy_", inputs=(_spec(4096, 4096),) * 2, outputs=(_spec(4096, 4096),)),
    OpSignature(
        op="aten::add_.Tensor", inputs=(_spec(1, dtype="float32"),), outputs=(_spec(1, dtype="float32"),)
    ),
    OpSignature(op="aten::_fused_adamw_", inputs=(_spec(1 << 20, dtype="float32"),) * 4, outputs=()),
]
DURATION_NS = [310_250.0, 41_777.7, 25_125.3, 0.0, 33_333.3, 400.0, 1_234_567.8]
FREE_OP = 3
TINY_OP = 5
COMM_NS = {"all_reduce": 150_500.5, "send": 70_000.0, "recv": 70_000.0, "all_gather": 90_000.0}


@dataclasses.dataclass
class Recorder:
    """Appends events the way a slice does."""

    rank: int
    layout: Layout

    def __post_init__(self):
        self.rows, self.comms, self.groups, self.phases = [], [], [], []
        self.next_work = 1
        self.comm_index = {}

    def event(self, kind, *, ref=0, value=0, stream=0, flags=0):
        self.rows.append((int(kind), int(flags), stream, ref, value))

    def kernel(self, ref):
        self.event(EventKind.KERNEL, ref=ref)

    def group(self, dim, desc):
        coords = self.layout.coords(self.rank)
        sizes = self.layout.sizes()
        ranks = tuple(self.layout.rank_of({**coords, dim: i}) for i in range(sizes[dim]))
        info = GroupInfo(ranks=ranks, name=str(len(self.groups)), desc=desc)
        self.groups.append(info)
        return len(self.groups) - 1

    def comm(self, kind, group, numel, *, work=None, is_async=False, peer=-1):
        signature = CommSignature(
            kind=kind, group=group, dtype=BF16, peer=peer, reduce_op="SUM" if "reduce" in kind else "",
            in_numel=0 if kind == "recv" else numel, out_numel=0 if kind == "send" else numel,
        )  # fmt: skip
        if signature not in self.comm_index:
            self.comm_index[signature] = len(self.comms)
            self.comms.append(signature)
        if work is None:
            work, self.next_work = self.next_work, self.next_work + 1
        flags = EventFlag.ASYNC if is_async else 0
        self.event(EventKind.COMM, ref=self.comm_index[signature], value=work, flags=flags)
        return work

    def phase(self, **fields):
        phase = Phase(**fields)
        if phase not in self.phases:
            self.phases.append(phase)
        return self.phases.index(phase)


def make_program(rank=0, *, layout=None, layers=2, source="sliced"):
    """One 1F1B iteration of ``rank``."""
    layout = layout or LAYOUT
    r = Recorder(rank, layout)
    tp = r.group("tp", "TENSOR_MODEL_PARALLEL_GROUP")
    dp = r.group("dp", "DATA_PARALLEL_GROUP_WITH_CP")
    pp = r.group("pp", "PIPELINE_MODEL_PARALLEL_GROUP")
    stage, stages = layout.coords(rank)["pp"], layout.pp
    warmup = min(stages - 1 - stage, layout.num_microbatches)
    order = [("forward", m) for m in range(warmup)]
    for m in range(layout.num_microbatches - warmup):
        order += [("forward", warmup + m), ("backward", m)]
    order += [("backward", m) for m in range(layout.num_microbatches - warmup, layout.num_microbatches)]
    allocation = 100

    def p2p(kind, *sides):
        ref = r.phase(kind=kind[0], parts=(kind,))
        r.event(EventKind.PHASE_BEGIN, ref=ref)
        work = r.next_work
        r.next_work += 1
        for side, peer in sides:
            r.comm(side, pp, 4096 * 4096, work=work, peer=peer, is_async=True)
        r.event(EventKind.WORK_WAIT, ref=work)
        r.event(EventKind.PHASE_END, ref=ref)

    for kind, m in order:
        if kind == "forward" and stage > 0:
            p2p(("recv_forward", m), ("recv", stage - 1))
        if kind == "backward" and stage < stages - 1:
            p2p(("send_forward_recv_backward", m), ("send", stage + 1), ("recv", stage + 1))
        ref = r.phase(kind=kind, microbatch=m)
        r.event(EventKind.PHASE_BEGIN, ref=ref)
        for _ in range(layers):
            r.event(EventKind.ALLOC, ref=allocation, value=4096 * 11008 * 2)
            for op in (0, 1, FREE_OP, 2, 0, 4, TINY_OP):
                r.kernel(op)
            r.comm("all_reduce", tp, 4096 * 4096)
            r.event(EventKind.FREE, ref=allocation)
            allocation += 1
        r.event(EventKind.PHASE_END, ref=ref)
        if kind == "backward" and stage > 0:
            p2p(("send_backward", m), ("send", stage - 1))
    sync = r.phase(kind="grad_sync")
    r.event(EventKind.PHASE_BEGIN, ref=sync)
    work = r.comm("all_reduce", dp, 1 << 24, is_async=True)
    r.kernel(1)
    r.event(EventKind.WORK_WAIT, ref=work)
    r.event(EventKind.PHASE_END, ref=sync)
    optimizer = r.phase(kind="optimizer")
    r.event(EventKind.PHASE_BEGIN, ref=optimizer)
    r.event(EventKind.STREAM_SYNC, flags=EventFlag.SYNTHESIZED)
    for _ in range(layers):
        r.kernel(6)
    r.event(EventKind.PHASE_END, ref=optimizer)
    return Program(
        rank=rank,
        events=np.array(r.rows, dtype=EVENT_DTYPE),
        signatures=SIGNATURES,
        comms=r.comms,
        groups=r.groups,
        phases=r.phases,
        initial=[Allocation(1, 1 << 30, "parameters")],
        source=source,
    )


def make_times(program, *, host_op_ns=6_000.0):
    """A plain pass over the rows: host, streams, communicators; peers are always on time, data moves after 1 µs."""
    n = len(program.events)
    host_at, start, end, transfer = (np.zeros(n) for _ in range(4))
    lane = np.zeros(n, dtype=np.int32)
    host, ready, work_end, work_start = 0.0, {}, {}, {}
    for i, event in enumerate(program.events.tolist()):
        kind, flags, stream, ref, value = event
        host_at[i] = start[i] = end[i] = transfer[i] = host
        if kind in (EventKind.KERNEL, EventKind.COMM):
            host += host_op_ns
        lane[i] = stream
        if kind == EventKind.KERNEL:
            start[i] = max(host, ready.get(stream, 0.0))
            end[i] = ready[stream] = start[i] + DURATION_NS[ref]
            transfer[i] = start[i]
        elif kind == EventKind.COMM:
            comm = program.comms[ref]
            lane[i] = COMM_LANE + comm.group
            if value not in work_start:
                work_start[value] = max(host, ready.get(stream, 0.0), ready.get(int(lane[i]), 0.0))
                work_end[value] = work_start[value] + COMM_NS[comm.kind]
            start[i], end[i] = work_start[value], work_end[value]
            transfer[i] = start[i] + 1_000.0
            ready[int(lane[i])] = end[i]
            if not flags & EventFlag.ASYNC:
                ready[stream] = end[i]
        elif kind == EventKind.WORK_WAIT:
            ready[stream] = max(ready.get(stream, 0.0), work_end[ref])
        elif kind == EventKind.STREAM_SYNC:
            host = max(host, ready.get(stream, 0.0))
    return OpTimes(host_ns=host_at, start_ns=start, end_ns=end, transfer_start_ns=transfer, lane=lane)


@pytest.fixture
def build():
    """(make_program, make_times)."""
    return make_program, make_times


GIB = 2**30


def class_memory(name, ranks, used_gib):
    return ClassMemory(
        ranks=ranks,
        name=name,
        peak_allocated_bytes=int((used_gib - 6) * GIB),
        peak_reserved_bytes=int((used_gib - 4) * GIB),
        allocated_bytes_end=20 * GIB,
        device_used_bytes=int(used_gib * GIB),
        capacity_bytes=80 * GIB,
        peak_phase="backward mb 0",
        by_category={"parameters": 4 * GIB, "activations": int((used_gib - 10) * GIB), "workspace": 0},
    )


@pytest.fixture
def prediction():
    return Prediction(
        framework="megatron",
        world_size=64,
        layout={"tp": 8, "pp": 4, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 2},
        num_microbatches=8,
        cluster="dgx-h100",
        device="virtual",
        cost_model="roofline on dgx-h100",
        iteration_time_ms=1234.5,
        tokens_per_s_per_gpu=3456.7,
        tflops_per_gpu=412.34,
        breakdown_ms=Breakdown(compute=800, exposed_communication=200, bubble=150, host=34.5, optimizer=50),
        slowest_rank=63,
        memory=(
            class_memory("stage 0 · tp 0", "0,32", 61.0),
            class_memory("stage 0 · tp 1-7", "1-7,33-39", 60.5),
        ),
        slices=(SliceSummary(rank=0, seconds=8.5, ops=4000, collectives=300, cached=False),
                SliceSummary(rank=63, seconds=9.0, ops=4100, collectives=300, cached=True)),
        classes=(
            ClassSummary(name="stage 0 · tp 0", ranks="0,32", num_ranks=2, representative=0, source="sliced"),
            ClassSummary(name="rest", ranks="1-31", num_ranks=62, representative=63, source="derived"),
        ),
        findings=(),
        unpriced_ops={},
        synthesized_reads=3,
        assumptions=("balanced routing",),
        audit=Audit(),
        simulate_seconds=0.4,
    )  # fmt: skip


FACTS = JobFacts(
    framework="megatron",
    layout=LAYOUT,
    stages=(StageInfo(fingerprint="first"), StageInfo(fingerprint="last")),
)


@pytest.fixture
def run(tmp_path, monkeypatch, prediction):
    """A finished run under prism_out, in the working directory, with the slices that inference needs."""
    monkeypatch.chdir(tmp_path)
    rundir = RunDir(tmp_path / "prism_out" / "20260101-000000-train")
    sliced = sorted(r.rank for r in plan_representatives(FACTS))
    for rank in sliced:
        rundir.slice(rank).path.mkdir(parents=True)
        save_program(make_program(rank), rundir.slice(rank).program)
        write_json(rundir.slice(rank).report, SliceReport(rank=rank, status="ok", facts=FACTS))
    job = Job(options=Options(world_size=8), run_as="script", argv=("train.py",))
    rundir.write_info(RunInfo(job=job, status="ok", facts=FACTS, slices=tuple(sliced)))
    write_prediction(rundir.prediction, msgspec.structs.replace(prediction, world_size=8))
    write_predicted_log(rundir.predicted_log, [" iteration 1/ 2 | elapsed 1.2 |"], prediction)
    return rundir
