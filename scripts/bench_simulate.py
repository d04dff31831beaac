#!/usr/bin/env python3
"""How fast the simulation is: GPT-3 175B dimensions at world 1024 (TP8 PP16 DP8), synthetic 1F1B programs.

Each of the 16 stages × 2 tensor-parallel roles has its own program of about 285,000 events with 12,000 collectives, as a
slice of Megatron records them. Prints seconds (medians over repeats of wall and CPU time, pricing included) and events per second.

    python scripts/bench_simulate.py [--repeats 3] [--microbatches 192] [--dp 8] [--shards]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import numpy as np

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.model import (
    EVENT_DTYPE,
    CommSignature,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    Program,
    TensorSpec,
)
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout

HIDDEN, SEQUENCE, TP, PP, LAYERS_PER_STAGE = 12288, 2048, 8, 16, 6
KERNELS_BETWEEN_COMMS = 9


def main() -> None:
    args = _arguments()
    layout = Layout(
        world_size=TP * PP * args.dp, tp=TP, pp=PP, dp=args.dp, num_microbatches=args.microbatches
    )
    job = build_job(layout, shards=args.shards)
    events = sum(len(c.exemplar.events) for c in job.classes)
    comms = sum(int((c.exemplar.events["kind"] == EventKind.COMM).sum()) for c in job.classes)
    print(f"world {layout.world_size}, {len(job.classes)} classes, {events:,} events, {comms:,} comm calls")
    seconds, cpu = [], []
    for _ in range(args.repeats):
        costs = build_cost_model(load_cluster("dgx-h100"))
        began, began_cpu = time.perf_counter(), time.process_time()
        simulation = Simulation(job, costs)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    began = time.perf_counter()
    simulation.op_times(layout.world_size - 1)
    expand = time.perf_counter() - began
    median = statistics.median(seconds)
    slowest = simulation.timeline.breakdown[simulation.timeline.slowest_class]
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"simulate {median:.2f} s, {statistics.median(cpu):.2f} s of CPU (median of {args.repeats}), {events / median:,.0f} events/s; one rank's ops {expand:.2f} s"
    )
    print(
        f"iteration {simulation.timeline.iteration_time_ns / 1e6:,.0f} ms; {slowest}; peak RSS {rss_mib:,.0f} MiB"
    )


def build_job(layout: Layout, *, shards: bool = False) -> JobPrograms:
    """All classes of the job; with ``shards`` every data-parallel rank has its own optimizer kernels."""
    classes = []
    for stage in range(layout.pp):
        for name, tps in (("tp 0", (0,)), (f"tp 1-{layout.tp - 1}", tuple(range(1, layout.tp)))):
            ranks = np.array(
                sorted(
                    layout.rank_of({"tp": tp, "cp": 0, "ep": 0, "dp": dp, "pp": stage})
                    for tp in tps
                    for dp in range(layout.dp)
                )
            )
            exemplar = stage_program(layout, int(ranks[0]), shard=0)
            variants, variant_of = {}, {}
            if shards:
                for rank in ranks.tolist():
                    dp = layout.coords(rank)["dp"]
                    if dp and dp not in variants:
                        variants[dp] = stage_program(layout, rank, shard=dp)
                    if dp:
                        variant_of[rank] = dp
            classes.append(
                RankClass(
                    name=f"stage {stage} · {name}",
                    ranks=ranks,
                    representative=int(ranks[0]),
                    exemplar=exemplar,
                    variants=variants,
                    variant_of=variant_of,
                )
            )
    return JobPrograms(layout=layout, classes=tuple(classes))


def stage_program(layout: Layout, rank: int, *, shard: int) -> Program:
    """A 1F1B stage: forward and backward bodies repeated, p2p batches between, gradient sync, optimizer."""
    coords = layout.coords(rank)
    stage = coords["pp"]
    members = {
        axis: tuple(layout.rank_of({**coords, axis: i}) for i in range(getattr(layout, axis)))
        for axis in ("tp", "pp", "dp")
    }
    groups = [GroupInfo(ranks=members[axis], name=axis, desc=axis.upper()) for axis in ("tp", "pp", "dp")]
    signatures, comms = _tables(layout, stage)
    forward, backward = _body(4, signature0=0), _body(6, signature0=KERNELS_BETWEEN_COMMS)
    rows: list[np.ndarray] = []
    work = 1

    def add(body: np.ndarray, phase: int) -> None:
        nonlocal work
        body = body.copy()
        mine = body["kind"] == EventKind.COMM
        body["value"][mine] += work
        work += int(mine.sum())
        rows.extend(
            (
                _rows([(EventKind.PHASE_BEGIN, 0, 0, phase, 0)]),
                body,
                _rows([(EventKind.PHASE_END, 0, 0, phase, 0)]),
            )
        )

    def p2p(*refs: int) -> None:
        nonlocal work
        if refs:
            rows.append(
                _rows(
                    [(EventKind.COMM, 1, 0, r, work) for r in refs]
                    + [(EventKind.WORK_WAIT, 0, 0, work, 0), (EventKind.DEVICE_SYNC, 0, 0, 0, 0)]
                )
            )
            work += 1

    first, last = stage == 0, stage == layout.pp - 1
    recv_f, send_f = (() if first else (2,)), (() if last else (3,))
    recv_b, send_b = (() if last else (4,)), (() if first else (5,))
    warmup = min(layout.pp - 1 - stage, layout.num_microbatches)
    for _ in range(warmup):
        p2p(*recv_f)
        add(forward, 0)
        p2p(*send_f)
    steady = layout.num_microbatches - warmup
    if steady:
        p2p(*recv_f)
    for i in range(steady):
        add(forward, 0)
        p2p(*send_f, *recv_b)
        add(backward, 1)
        p2p(*send_b, *(recv_f if i + 1 < steady else ()))
    for _ in range(warmup):
        p2p(*recv_b)
        add(backward, 1)
        p2p(*send_b)
    optimizer = [(EventKind.COMM, 0, 0, 6, work)]
    optimizer += [
        (EventKind.KERNEL, 0, 0, 2 * KERNELS_BETWEEN_COMMS + (i + shard) % 3, 0) for i in range(400 + shard)
    ]
    optimizer += [(EventKind.COMM, 0, 0, 7, work + 1), (EventKind.STREAM_SYNC, 0, 0, 0, 0)]
    rows.append(_rows([(EventKind.PHASE_BEGIN, 0, 0, 2, 0), *optimizer, (EventKind.PHASE_END, 0, 0, 2, 0)]))
    return Program(
        rank=rank,
        events=np.concatenate(rows),
        signatures=signatures,
        comms=comms,
        groups=groups,
        phases=[Phase(kind="forward"), Phase(kind="backward"), Phase(kind="optimizer")],
        initial=[],
    )


def _tables(layout: Layout, stage: int) -> tuple[list[OpSignature], list[CommSignature]]:
    def mm(m: int, k: int, n: int) -> OpSignature:
        a, b, c = (TensorSpec("bfloat16", shape) for shape in ((m, k), (k, n), (m, n)))
        return OpSignature(op="aten::mm", inputs=(a, b), outputs=(c,))

    x = TensorSpec("bfloat16", (SEQUENCE // layout.tp, 1, HIDDEN))
    light = [
        OpSignature(op=f"aten::{op}", inputs=(x, x), outputs=(x,))
        for op in ("add.Tensor", "mul.Tensor", "_fused_rms_norm", "copy_")
    ]
    view = OpSignature(op="aten::view", inputs=(x,), outputs=(x,))
    forward = [mm(SEQUENCE, HIDDEN, 4 * HIDDEN // layout.tp), view, view, *light, view, view]
    backward = [mm(SEQUENCE, 4 * HIDDEN // layout.tp, HIDDEN), view, view, *light, view, view]
    shards = [
        OpSignature(op="aten::_foreach_mul_.Scalar", inputs=(TensorSpec("float32", (n,)),))
        for n in (1 << 20, 1 << 21, 1 << 22)
    ]
    part, full = SEQUENCE // layout.tp * HIDDEN, SEQUENCE * HIDDEN
    comms = [
        CommSignature(kind="all_gather", group=0, dtype="bfloat16", in_numel=part, out_numel=full),
        CommSignature(kind="reduce_scatter", group=0, dtype="bfloat16", in_numel=full, out_numel=part),
        CommSignature(kind="recv", group=1, dtype="bfloat16", out_numel=part, peer=max(stage - 1, 0)),
        CommSignature(
            kind="send", group=1, dtype="bfloat16", in_numel=part, peer=min(stage + 1, layout.pp - 1)
        ),
        CommSignature(
            kind="recv", group=1, dtype="bfloat16", out_numel=part, peer=min(stage + 1, layout.pp - 1)
        ),
        CommSignature(kind="send", group=1, dtype="bfloat16", in_numel=part, peer=max(stage - 1, 0)),
        CommSignature(kind="reduce_scatter", group=2, dtype="float32", in_numel=1 << 30, out_numel=1 << 27),
        CommSignature(kind="all_gather", group=2, dtype="bfloat16", in_numel=1 << 27, out_numel=1 << 30),
    ]
    return forward + backward + shards, comms


def _body(comms_per_layer: int, *, signature0: int) -> np.ndarray:
    rows, work = [], 0
    for _ in range(LAYERS_PER_STAGE):
        for c in range(comms_per_layer):
            for k in range(KERNELS_BETWEEN_COMMS):
                rows.append((EventKind.KERNEL, 0, 0, signature0 + k, 0))
            for _ in range(7):
                rows += [(EventKind.ALLOC, 0, 0, 0, 512), (EventKind.FREE, 0, 0, 0, 0)]
            rows.append((EventKind.COMM, 0, 0, c % 2, work))
            work += 1
    return _rows(rows)


def _rows(rows: list[tuple]) -> np.ndarray:
    return np.array(rows, dtype=EVENT_DTYPE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=192)
    parser.add_argument("--dp", type=int, default=8, help="data-parallel size; world is 128 times this")
    parser.add_argument(
        "--shards", action="store_true", help="give every data-parallel rank its own optimizer kernels"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
