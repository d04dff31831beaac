"""A small model of a distributed optimizer's step, for tests: norm, clipping, foreach Adam, copy to the parameters."""

from __future__ import annotations

import numpy as np

from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    Program,
    TensorSpec,
)
from prism_plugins.program.shards import RankShards
from prism_plugins.program.slices import OptimizerShard

Parameter = tuple[int, bool, int, bool]
"""Elements, split by tensor parallelism, parameter group, kept in full precision."""


def cut_into_shards(
    parameters: list[Parameter], *, num_ranks: int, num_groups: int
) -> tuple[OptimizerShard, ...]:
    """Cut the parameters, laid one after the other, into equal pieces without regard to their borders."""
    total = sum(n for n, *_ in parameters)
    piece = -(-total // num_ranks)
    shards = []
    for index in range(num_ranks):
        groups: list[list[tuple[int, bool, bool]]] = [[] for _ in range(num_groups)]
        begin = 0
        for numel, split, group, full in parameters:
            length = min(begin + numel, (index + 1) * piece) - max(begin, index * piece)
            if length > 0:
                groups[group].append((length, split, full))
            begin += numel
        for group in groups:
            group.sort(key=lambda fragment: not fragment[2])
        fragments = [fragment for group in groups for fragment in group]
        shards.append(
            OptimizerShard(
                index=index,
                fragments=tuple((n, split) for n, split, _ in fragments),
                group_sizes=tuple(len(group) for group in groups),
                full_precision=tuple(i for i, (_, _, full) in enumerate(fragments) if full),
            )
        )
    return tuple(shards)


class Writer:
    """Writes events and interns signatures."""

    def __init__(self, first_id: int) -> None:
        self.rows: list[tuple] = []
        self.signatures: list[OpSignature] = []
        self.next_id = first_id

    def op(self, name: str, inputs: list[tuple], outputs: list[tuple], dtype: str = "float32") -> None:
        signature = OpSignature(
            op=f"aten::{name}",
            inputs=tuple(TensorSpec(dtype, shape) for shape in inputs),
            outputs=tuple(TensorSpec(dtype, shape) for shape in outputs),
        )
        if signature not in self.signatures:
            self.signatures.append(signature)
        self.rows.append((EventKind.KERNEL, 0, 0, self.signatures.index(signature), 0))

    def alloc(self, nbytes: int) -> int:
        self.next_id += 1
        self.rows.append((EventKind.ALLOC, 0, 0, self.next_id, nbytes))
        return self.next_id

    def free(self, id: int) -> None:
        self.rows.append((EventKind.FREE, 0, 0, id, 0))

    def sync(self) -> None:
        self.rows.append((EventKind.STREAM_SYNC, 0, 0, 0, 0))


def step_program(
    shards: RankShards, *, rank: int, tp_first: bool, num_ranks: int, first_id: int = 0
) -> Program:
    """The program of an iteration that is nothing but an optimizer step."""
    w = Writer(first_id + 500)
    w.rows.append((EventKind.PHASE_BEGIN, 0, 0, 0, 0))
    flag = w.alloc(4)
    w.op("zero_", [(1,)], [(1,)])
    norms = []
    for shard in shards:
        for n, split in shard.fragments:
            if split or tp_first:
                norms.append(w.alloc(4))
                w.op("linalg_vector_norm", [(n,)], [()])
    for _ in norms:
        w.op("_local_scalar_dense", [()], [])
        w.sync()
    for id in reversed(norms):
        w.free(id)
    w.rows.append((EventKind.COMM, 0, 0, 0, 77))
    for shard in shards:
        for n, _ in shard.fragments:
            scaled = w.alloc(4 * n)
            w.op("mul.Tensor", [(n,)], [(n,)])
            w.op("copy_", [(n,), (n,)], [(n,)])
            w.free(scaled)
    w.free(flag)
    for shard in shards:
        begin = 0
        for size in shard.group_sizes:
            group = [(n,) for n, _ in shard.fragments[begin : begin + size]]
            begin += size
            if group:
                w.op("_foreach_mul_.Scalar", group, group)
                roots = [w.alloc(4 * n) for (n,) in group]
                w.op("_foreach_sqrt", group, group)
                w.op("_foreach_addcdiv_.ScalarList", group * 3, group)
                for id in reversed(roots):
                    w.free(id)
        half = [n for i, (n, _) in enumerate(shard.fragments) if i not in shard.full_precision]
        for n in half:
            w.op("copy_", [(n,), (n,)], [(n,)], dtype="bfloat16")
    w.rows.append((EventKind.PHASE_END, 0, 0, 0, 0))
    initial = [Allocation(first_id + 1, 4096, "parameters")]
    ids = iter(range(first_id + 2, first_id + 400))
    for shard in shards:
        for i, (n, _) in enumerate(shard.fragments):
            if i not in shard.full_precision:
                initial.append(Allocation(next(ids), 4 * n, "optimizer_state"))
    initial.append(Allocation(next(ids), 32768, "other"))
    for shard in shards:
        for n, _ in shard.fragments:
            initial += [Allocation(next(ids), 4 * n, "optimizer_state") for _ in range(2)]
    return Program(
        rank=rank,
        events=np.array(w.rows, dtype=EVENT_DTYPE),
        signatures=w.signatures,
        comms=[CommSignature(kind="all_reduce", group=0, dtype="float32", in_numel=1, out_numel=1)],
        groups=[GroupInfo(ranks=tuple(range(num_ranks)), name="world")],
        phases=[Phase(kind="optimizer")],
        initial=initial,
    )
