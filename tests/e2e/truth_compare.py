"""Compares what truth_logger.py saw with programs: the same steps, with the same communication in each, in order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from prism_plugins.program.infer import infer_job, program_of
from prism_plugins.program.model import DTYPE_BYTES, CommSignature, EventKind, Program
from prism_plugins.program.store import load_program
from prism_plugins.rundir import RunDir

STEPS = frozenset(
    [
        "forward", "backward", "grad_sync", "optimizer", "recv_forward", "recv_backward", "send_forward",
        "send_backward", "send_forward_recv_backward", "send_backward_recv_forward", "send_forward_recv_forward",
        "send_backward_recv_backward", "send_forward_backward_recv_forward_backward",
    ]
)  # fmt: skip
"""Phases that the logger sees as well."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One collective or p2p call."""

    kind: str
    ranks: tuple[int, ...]
    dtype: str
    in_bytes: int
    out_bytes: int
    peer: int = -1
    """Global rank of the root or the partner."""
    op: str = ""
    splits: tuple[tuple[int, ...], ...] = ()
    """all_to_all with uneven splits: elements sent to, and received from, each member."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The begin of a step; its end is a step without a kind."""

    kind: str = ""
    microbatch: int = -1
    chunk: int = -1


Items = Sequence[Call | Step]


class Witnessed(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank really did in one iteration."""

    sequence: tuple[Call | Step, ...]
    losses: tuple[float, ...]
    grad_norm: float
    parameters: float
    """Sum of the absolute values of the parameters that are no experts', before the optimizer's step."""


def read_log(path: Path) -> list[Witnessed]:
    """The iterations of one rank that came to their end."""
    iterations: list[Witnessed] = []
    records: list[list] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record[0] == "iteration":
            iterations += _iteration(records)
            records = []
        records.append(record)
    return [*iterations, *_iteration(records)]


def _iteration(records: list[list]) -> list[Witnessed]:
    if not records or records[0] != ["iteration"]:
        return []  # What came before the first one.
    values = {name: rest[0] for name, *rest in records if name not in ("iteration", "begin", "end", "comm")}
    if "grad_norm" not in values:
        return []
    sequence: list[Call | Step] = []
    for name, *rest in records:
        if name == "begin":
            sequence.append(Step(kind=rest[0], microbatch=rest[1], chunk=rest[2]))
        elif name == "end":
            sequence.append(Step())
        elif name == "comm":
            sequence.append(_seen_call(rest[0]))
    return [
        Witnessed(
            sequence=tuple(sequence),
            losses=tuple(values["losses"]),
            grad_norm=values["grad_norm"],
            parameters=values["parameters"],
        )
    ]


def _seen_call(call: dict) -> Call:
    splits = tuple(tuple(side) if len(set(side)) > 1 else () for side in call["splits"])
    return Call(
        kind=call["kind"],
        ranks=tuple(call["ranks"]),
        dtype=call["dtype"],
        in_bytes=call["in_bytes"],
        out_bytes=call["out_bytes"],
        peer=call["peer"],
        op=call["op"],
        splits=splits if any(splits) else (),
    )


def sequence_of(program: Program, steps: frozenset[str] = STEPS) -> tuple[Call | Step, ...]:
    """The steps and communication of a program, in host order."""
    return tuple(_sequence_of(program, steps))


def _sequence_of(program: Program, steps: frozenset[str]) -> Iterator[Call | Step]:
    calls = [_predicted_call(comm, program) for comm in program.comms]
    is_open = False
    for kind, _, _, ref, _ in program.events.tolist():
        if kind == EventKind.COMM:
            yield calls[ref]
        elif kind == EventKind.PHASE_BEGIN:
            phase = program.phases[ref]
            is_open = phase.kind in steps
            if is_open:
                yield Step(kind=phase.kind, microbatch=phase.microbatch, chunk=phase.chunk)
        elif kind == EventKind.PHASE_END and is_open:
            is_open = False
            yield Step()


def _predicted_call(comm: CommSignature, program: Program) -> Call:
    ranks = program.groups[comm.group].ranks
    itemsize = DTYPE_BYTES.get(comm.dtype, 0)
    return Call(
        kind=comm.kind,
        ranks=ranks,
        dtype=comm.dtype,
        in_bytes=comm.in_numel * itemsize,
        out_bytes=comm.out_numel * itemsize,
        peer=ranks[comm.peer] if comm.peer >= 0 else -1,
        op=comm.reduce_op,
        splits=(comm.send_splits, comm.recv_splits) if comm.send_splits or comm.recv_splits else (),
    )


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's program compares with what that rank really did."""

    rank: int
    source: str
    """``sliced``, ``inferred`` or ``derived``."""
    num_calls: int
    """Collectives and p2p calls of the real rank."""
    num_matched: int
    """Of these, the ones before the first difference."""
    num_steps: int
    difference: str
    """Empty when steps and calls are equal, in the same order throughout."""


def compare(
    rundir: Path, witnessed: dict[int, list[Witnessed]], steps: frozenset[str] = STEPS
) -> list[RankResult]:
    """Compare every rank's last iteration with its program in a run directory."""
    programs = load_programs(rundir, len(witnessed))
    results = []
    for rank, iterations in sorted(witnessed.items()):
        seen, predicted = iterations[-1].sequence, sequence_of(programs[rank], steps)
        at = num_equal(seen, predicted)
        results.append(
            RankResult(
                rank=rank,
                source=programs[rank].source,
                num_calls=sum(isinstance(item, Call) for item in seen),
                num_matched=sum(isinstance(item, Call) for item in seen[:at]),
                num_steps=sum(isinstance(item, Step) and bool(item.kind) for item in seen),
                difference=first_difference(seen, predicted),
            )
        )
    return results


def load_programs(path: Path, world_size: int) -> dict[int, Program]:
    """The programs of all ranks, from the slices in a run directory."""
    rundir = RunDir(path)
    info = rundir.read_info()
    assert info.facts is not None
    job = infer_job(
        info.facts,
        {rank: rundir.read_report(rank) for rank in info.slices},
        {rank: load_program(rundir.slice(rank).program) for rank in info.slices},
    )
    return {rank: program_of(job, rank) for rank in range(world_size)}


def num_equal(seen: Items, predicted: Items) -> int:
    """Length of the common beginning."""
    pairs = zip(seen, predicted, strict=False)
    return next((i for i, (real, ours) in enumerate(pairs) if real != ours), min(len(seen), len(predicted)))


def first_difference(seen: Items, predicted: Items) -> str:
    """Where two sequences part, for people; empty when they are equal."""
    at = num_equal(seen, predicted)
    if at == len(seen) == len(predicted):
        return ""
    before = "".join(f"\n    {item}" for item in seen[max(0, at - 3) : at])
    real, ours = (items[at] if at < len(items) else "nothing more" for items in (seen, predicted))
    return f"item {at} of {len(seen)}, after{before}\n  really  {real}\n  program {ours}"


def check_computed(
    witnessed: dict[int, list[Witnessed]],
    *,
    tp: int,
    pp: int,
    vocab_size: int = 256,
    shared_weights: bool = True,
) -> None:
    """The real run computed: finite values that change, equal on all ranks where they must be.

    Ranks are in the order tp, dp, pp. ``shared_weights``: data-parallel ranks hold the same parameters.
    """
    world = len(witnessed)
    last_stage = range(world - world // pp, world)
    for rank, iterations in witnessed.items():
        assert len(iterations) >= 2, f"rank {rank}: {len(iterations)} iteration(s) in the log"
        assert iterations[-1].sequence == iterations[-2].sequence, f"rank {rank} is not steady"
        assert iterations[-1].parameters != iterations[0].parameters, f"rank {rank}: nothing was learnt"
    num_iterations = len(witnessed[0])
    for i in range(num_iterations):
        now = {rank: iterations[i] for rank, iterations in witnessed.items()}
        norms = {one.grad_norm for one in now.values()}
        assert len(norms) == 1, f"gradient norms differ between ranks: {norms}"
        assert 0 < norms.pop() < math.inf
        for rank, one in now.items():
            first_of_tp = now[rank - rank % tp]
            assert one.losses == first_of_tp.losses, f"rank {rank}: losses differ within its tp group"
            assert bool(one.losses) == (rank in last_stage)
            # Labels are random: a fresh model knows nothing of them.
            assert all(abs(loss - math.log(vocab_size)) < 0.3 for loss in one.losses), one.losses
            first_of_dp = now[rank // (world // pp) * (world // pp) + rank % tp]
            if shared_weights:
                assert one.parameters == first_of_dp.parameters, f"rank {rank}: parameters differ over dp"
        data = {now[rank].losses for rank in last_stage}
        assert len(data) == world // pp // tp, "data-parallel ranks saw the same data"
