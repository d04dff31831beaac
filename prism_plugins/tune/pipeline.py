"""How long a pipeline of stages takes: the 1F1B and the interleaved schedule, step by step.

Transfers between stages are rendezvous: a part of an exchange begins when both sides have come to it, and a stage goes
on when all parts of its exchange have ended (Megatron's batched isend/irecv). With ``async_p2p`` a stage only waits for
what it needs. After some micro-batches per stage the schedule is periodic, so long iterations are extended from two
shorter ones (exact for even stages; where stages differ it settles later, less than 1 % is missed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from prism_plugins.errors import PrismError

_SIMULATED_PER_STAGE = 6
"""Micro-batches per pipeline stage after which the rest is extended."""


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in any one unit of time."""

    forward: tuple[tuple[float, ...], ...]
    """[stage][chunk], of one micro-batch."""
    backward: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...]
    """From a stage to the next one, and back; of the last one, to the first (interleaved)."""
    async_p2p: bool


def pipeline_ends(stages: Stages, num_microbatches: int) -> tuple[float, ...]:
    """When each stage has done its last backward step."""
    pp, chunks = len(stages.forward), len(stages.forward[0])
    base = _SIMULATED_PER_STAGE * pp
    base += (num_microbatches - base) % pp
    if num_microbatches <= 2 * base:
        return _ends(stages, num_microbatches)
    if chunks == 1 and pp == 1:
        return (
            _ends(stages, 1)[0] + (num_microbatches - 1) * (stages.forward[0][0] + stages.backward[0][0]),
        )
    first, second = _ends(stages, base), _ends(stages, base + pp)
    periods = (num_microbatches - base) / pp
    return tuple(a + (b - a) * periods for a, b in zip(first, second, strict=True))


def _ends(stages: Stages, m: int) -> tuple[float, ...]:
    if len(stages.forward) == 1:
        work = sum(stages.forward[0]) + sum(stages.backward[0])
        return (m * work,)
    if len(stages.forward[0]) > 1:
        return _interleaved(stages, m)
    return _one_forward_one_backward(stages, m)


class _Step(NamedTuple):
    work: float
    """Compute before the exchange."""
    parts: tuple[tuple[int, bool, int], ...]
    """(boundary below which stage, forward, micro-batch)."""


def _one_forward_one_backward(stages: Stages, m: int) -> tuple[float, ...]:
    pp = len(stages.forward)
    plans = [_plan(stages, s, m) for s in range(pp)]
    clock = [0.0] * pp
    at = [0] * pp
    arrived: dict[tuple[int, bool, int], float] = {}
    """Parts that one side has come to."""
    done: dict[tuple[int, bool, int], float] = {}
    waiting = [False] * pp
    todo = list(range(pp))
    while todo:
        s = todo.pop()
        plan = plans[s]
        while at[s] < len(plan):
            step = plan[at[s]]
            if not waiting[s]:
                clock[s] += step.work
                for part in step.parts:
                    other = arrived.pop(part, None)
                    if other is None:
                        arrived[part] = clock[s]
                    else:
                        done[part] = max(other, clock[s]) + stages.transfer[part[0]]
                        todo.append(part[0] if part[0] != s else s + 1)
                waiting[s] = True
            ends = [done.get(part) for part in step.parts]
            if None in ends:
                break
            clock[s] = max([clock[s], *(end for end in ends if end is not None)])
            waiting[s] = False
            at[s] += 1
    if any(a < len(plan) for a, plan in zip(at, plans, strict=True)):
        raise PrismError(
            "the pipeline schedule of a composed layout does not come to an end; this is a defect of prism"
        )
    return tuple(clock)


def _plan(stages: Stages, s: int, m: int) -> list[_Step]:
    """Megatron's schedule without interleaving, as compute steps each with the exchange that follows it."""
    pp = len(stages.forward)
    f, b = stages.forward[s][0], stages.backward[s][0]
    warm = min(pp - s - 1, m)

    def parts(*wanted: tuple[int, bool, int]) -> tuple[tuple[int, bool, int], ...]:
        return tuple(part for part in wanted if 0 <= part[0] < pp - 1)

    def above(forward: bool, i: int) -> tuple[int, bool, int]:
        return (s - 1, forward, i)

    def below(forward: bool, i: int) -> tuple[int, bool, int]:
        return (s, forward, i)

    plan: list[_Step] = []
    for i in range(warm):
        plan.append(_Step(0.0, parts(above(True, i))))
        plan.append(_Step(f, parts(below(True, i))))
    rest = m - warm
    if rest:
        plan.append(_Step(0.0, parts(above(True, warm))))
    for i in range(rest):
        plan.append(_Step(f, parts(below(True, warm + i), below(False, i))))
        following = above(True, warm + i + 1) if i < rest - 1 else (-1, True, 0)
        plan.append(_Step(b, parts(above(False, i), following)))
    for i in range(rest, m):
        plan.append(_Step(0.0, parts(below(False, i))))
        plan.append(_Step(b, parts(above(False, i))))
    return plan


def _interleaved(stages: Stages, m: int) -> tuple[float, ...]:
    """Megatron's interleaved schedule: groups of pp micro-batches go through the chunks in turn."""
    pp, chunks = len(stages.forward), len(stages.forward[0])
    total = m * chunks

    def chunk_of(k: int, *, forward: bool) -> tuple[int, int]:
        group, rest = divmod(k, pp * chunks)
        chunk, within = divmod(rest, pp)
        return (chunk if forward else chunks - 1 - chunk, group * pp + within)

    orders: list[list[tuple[bool, int, int]]] = []
    for s in range(pp):
        warm = min((pp - s - 1) * 2 + (chunks - 1) * pp, total)
        order = [(True, *chunk_of(k, forward=True)) for k in range(warm)]
        for k in range(total - warm):
            order.append((True, *chunk_of(warm + k, forward=True)))
            order.append((False, *chunk_of(k, forward=False)))
        order += [(False, *chunk_of(k, forward=False)) for k in range(total - warm, total)]
        orders.append(order)
    clock = [0.0] * pp
    at = [0] * pp
    end: dict[tuple[int, bool, int, int], float] = {}
    last = pp - 1
    progress = True
    blocking = 0.0 if stages.async_p2p else 1.0
    while progress:
        progress = False
        for s in range(pp):
            order = orders[s]
            while at[s] < len(order):
                forward, c, i = order[at[s]]
                if forward:
                    needs = (s - 1, True, c, i) if s else (last, True, c - 1, i) if c else None
                    lag = stages.transfer[s - 1]
                elif s < last:
                    needs, lag = (s + 1, False, c, i), stages.transfer[s]
                elif c < chunks - 1:
                    needs, lag = (0, False, c + 1, i), stages.transfer[last]
                else:
                    needs, lag = (s, True, c, i), 0.0
                ready = 0.0
                if needs is not None:
                    known = end.get(needs)
                    if known is None:
                        break
                    ready = known + lag
                work = stages.forward[s][c] if forward else stages.backward[s][c]
                clock[s] = max(clock[s] + blocking * lag, ready) + work
                end[s, forward, c, i] = clock[s]
                at[s] += 1
                progress = True
    if any(a < len(order) for a, order in zip(at, orders, strict=True)):
        raise PrismError(
            "the interleaved schedule of a composed layout does not come to an end; this is a defect of prism"
        )
    return tuple(clock)


def busy(stages: Stages, num_microbatches: int) -> Sequence[float]:
    """Compute of each stage in an iteration."""
    return [
        num_microbatches * (sum(f) + sum(b)) for f, b in zip(stages.forward, stages.backward, strict=True)
    ]


def critical_path(stages: Stages, num_microbatches: int) -> float:
    """What no schedule is faster than: a stage's work, behind and before one micro-batch through the first chunks before it."""
    before = longest = 0.0
    for work, f, b in zip(busy(stages, num_microbatches), stages.forward, stages.backward, strict=True):
        longest = max(longest, before + work)
        before += f[0] + b[0]
    return longest
