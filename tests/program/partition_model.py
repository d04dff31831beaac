"""A small model of ZeRO 1 and 2 as DeepSpeed 0.19 runs them: reduction of buckets, accumulation, check, norm, step.

It is written rank by rank from partition boundaries, as the optimizer works, and knows nothing of how programs are derived.
"""

from __future__ import annotations

import math

import numpy as np

from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventKind,
    GroupInfo,
    Phase,
    Program,
)
from prism_plugins.program.slices import (
    FlatPartitions,
    JobFacts,
    PartitionFragment,
    SliceReport,
    StageInfo,
)
from prism_plugins.world.layout import Layout
from tests.program.optimizer_model import Writer

Shape = tuple[int, ...]
BF16, FP32, FP64 = "bfloat16", "float32", "float64"


class PartitionedJob:
    """What the slices of all ranks of a job with ``dp`` data-parallel ranks would give.

    ``groups``: shapes of the parameters of each parameter group; ``buckets``: parameters reduced together, for each
    micro-batch (what is in none has no gradient); ``uncounted``: parameters left out of the norm.
    """

    def __init__(
        self,
        groups: list[list[Shape]],
        buckets: list[list[int]],
        *,
        dp: int,
        micro_batches: int = 1,
        uncounted: tuple[int, ...] = (),
    ) -> None:
        self.shapes = [shape for group in groups for shape in group]
        self.buckets, self.micro_batches, self.uncounted, self.dp = buckets, micro_batches, uncounted, dp
        numels = [[math.prod(shape) for shape in group] for group in groups]
        self.sizes = [-(-sum(group) // dp) for group in numels]
        owned = [self._cut(numels, rank) for rank in range(dp)]
        kinds = list(dict.fromkeys(owned))
        facts = JobFacts(
            framework="test",
            layout=Layout(world_size=dp, dp=dp),
            stages=(StageInfo(fingerprint="all"),),
            shard_kinds=tuple(tuple(f.numel for f in kind) for kind in kinds),
            kind_of=tuple(kinds.index(kind) for kind in owned),
            partitions=FlatPartitions(
                shapes=tuple(self.shapes), uncounted=uncounted, sizes=tuple(self.sizes), owned=tuple(kinds)
            ),
        )
        self.owned, self.facts = owned, facts
        self.programs = {rank: self._program(rank) for rank in range(dp)}
        self.reports = {
            rank: SliceReport(
                rank=rank,
                status="ok",
                facts=facts,
                gradient_buckets=tuple(map(tuple, buckets * micro_batches)),
            )
            for rank in range(dp)
        }

    def _cut(self, numels: list[list[int]], rank: int) -> tuple[PartitionFragment, ...]:
        fragments, parameter = [], 0
        for group, sizes in enumerate(numels):
            begin, end = rank * self.sizes[group], (rank + 1) * self.sizes[group]
            offset = 0
            for numel in sizes:
                first, last = max(begin, offset), min(end, offset + numel)
                if first < last:
                    fragments.append(PartitionFragment(group, parameter, first - offset, last - first))
                offset, parameter = offset + numel, parameter + 1
        return tuple(fragments)

    def _owners(self, parameter: int) -> list[int]:
        return [rank for rank in range(self.dp) if any(f.parameter == parameter for f in self.owned[rank])]

    def _program(self, rank: int) -> Program:
        w = Writer(1000 * (rank + 1))
        comms: list[CommSignature] = []
        filled: list[int] = []
        phases = [Phase(kind="backward", microbatch=m) for m in range(self.micro_batches)]
        for m in range(self.micro_batches):
            w.rows.append((EventKind.PHASE_BEGIN, 0, 0, m, 0))
            buffer = None
            for bucket in self.buckets:
                for parameter in bucket:  # other gradients are flat copies as well
                    n = math.prod(self.shapes[parameter])
                    w.op("copy_", [(n,), (n,)], [(n,)], BF16)
                buffer = self._reduce(w, comms, bucket, rank, buffer)
            zeros = [f for f in self.owned[rank] if not any(f.parameter in bucket for bucket in self.buckets)]
            for f in zeros:
                filled.append(w.alloc(2 * math.prod(self.shapes[f.parameter])))
                w.op("zero_", [self.shapes[f.parameter]], [self.shapes[f.parameter]], BF16)
            if m:  # gradients accumulate, each in its own shape
                for f in self.owned[rank]:
                    w.op("add_.Tensor", [self.shapes[f.parameter]] * 2, [self.shapes[f.parameter]], BF16)
                if buffer is not None:
                    w.free(buffer)
            else:
                kept = buffer
            w.rows.append((EventKind.PHASE_END, 0, 0, m, 0))
        w.rows.append((EventKind.PHASE_BEGIN, 0, 0, len(phases), 0))
        self._step(w, rank)
        if kept is not None:
            w.free(kept)
        for zeros in filled:
            w.free(zeros)
        w.rows.append((EventKind.PHASE_END, 0, 0, len(phases), 0))
        return Program(
            rank=rank,
            events=np.array(w.rows, dtype=EVENT_DTYPE),
            signatures=w.signatures,
            comms=comms,
            groups=[GroupInfo(ranks=tuple(range(self.dp)), name="dp")],
            phases=[*phases, Phase(kind="optimizer")],
            initial=[Allocation(1, 4096, "parameters")],
        )

    def _reduce(self, w: Writer, comms: list, bucket: list[int], rank: int, buffer: int | None) -> int | None:
        """Reduce all, copy back what follows each other of the rank's, keep the gradients it owns something of."""
        numel = sum(math.prod(self.shapes[p]) for p in bucket)
        flat = w.alloc(2 * numel)
        w.op("cat", [(numel,)], [(numel,)], BF16)
        comms.append(CommSignature(kind="all_reduce", group=0, dtype=BF16, in_numel=numel, out_numel=numel))
        w.rows.append((EventKind.COMM, 0, 0, len(comms) - 1, len(comms)))
        pieces: list[list[int]] = []  # [rank, elements] as they lie in the bucket
        for parameter in bucket:
            for owner in self._owners(parameter):
                n = next(f.numel for f in self.owned[owner] if f.parameter == parameter)
                if pieces and pieces[-1][0] == owner:
                    pieces[-1][1] += n
                else:
                    pieces.append([owner, n])
        for owner, n in pieces:
            if owner == rank:
                w.op("copy_", [(n,), (n,)], [(n,)], BF16)
        w.free(flat)
        for parameter in bucket:
            if rank in self._owners(parameter):
                if buffer is None:
                    buffer = w.alloc(2 * sum(math.prod(self.shapes[f.parameter]) for f in self.owned[rank]))
                n = math.prod(self.shapes[parameter])
                w.op("copy_", [(n,), (n,)], [(n,)], BF16)
        return buffer

    def _gradients(self, rank: int, group: int) -> list[tuple[Shape, int]]:
        """(shape, parameter) of the tensors a partition is made of; the last may be padding."""
        tensors = [
            (shape if f.numel == math.prod(shape := self.shapes[f.parameter]) else (f.numel,), f.parameter)
            for f in self.owned[rank]
            if f.group == group
        ]
        padding = self.sizes[group] - sum(math.prod(shape) for shape, _ in tensors)
        return tensors + [((padding,), -1)] * (padding > 0)

    def _step(self, w: Writer, rank: int) -> None:
        for group in range(len(self.sizes)):
            found = w.alloc(4)
            w.op("zero_", [(1,)], [(1,)])
            for shape, _ in self._gradients(rank, group):
                largest = w.alloc(2)
                w.op("amax", [shape], [()], BF16)
                for _ in range(4):
                    flag = w.alloc(1)
                    w.op("eq.Tensor", [(), ()], [()], "bool")
                    w.free(flag)
                w.op("add_.Tensor", [(1,), ()], [(1,)])
                w.free(largest)
            w.free(found)
            counted = [
                shape for shape, p in self._gradients(rank, group) if p >= 0 and p not in self.uncounted
            ]
            norms = []
            for shape in counted:
                wide = w.alloc(8 * math.prod(shape))
                w.op("copy_", [shape, shape], [shape], FP64)
                norms.append(w.alloc(8))
                w.op("linalg_vector_norm", [shape], [()], FP64)
                w.free(wide)
            if norms:
                k = len(norms)
                joined = w.alloc(8 * k)
                w.op("cat", [(1,)] * k, [(k,)], FP64)
                power = w.alloc(8 * k)
                w.op("pow.Tensor_Scalar", [(k,)], [(k,)], FP64)
                w.free(joined)
                total = w.alloc(8)
                w.op("sum.dim_IntList", [(k,)], [()], FP64)
                w.free(power)
                w.free(total)
            else:
                w.op("zero_", [()], [()])
            for norm in norms:
                w.free(norm)
        stacked = w.alloc(4 * len(self.sizes))
        w.op("cat", [(1,)] * len(self.sizes), [(len(self.sizes),)])
        w.free(stacked)
        for group, size in enumerate(self.sizes):
            tensors = [math.prod(shape) for shape, _ in self._gradients(rank, group)]
            flat = w.alloc(2 * size) if len(tensors) > 1 else None
            if flat is not None:
                w.op("cat", [(n,) for n in tensors], [(size,)], BF16)
            w.op("copy_", [(size,), (size,)], [(size,)])
            if flat is not None:
                w.free(flat)
            w.op("multi_tensor_adam", [(size,)] * 4, [])
            w.op("copy_", [(size,), (size,)], [(size,)], BF16)
