"""What collectives and the compute beside them, and kernels of several streams, cost each other.

A collective holds one SM per channel from the start of its kernel (also while it waits for its peers) to its end, and
moves bytes through HBM while it transfers. First order, per stretch of overlap, with ``S`` SMs, ``c`` of them held, HBM
demands ``b`` of the compute and ``r`` of the transfer, and ``B`` bytes per second that HBM gives:

* compute bound by arithmetic lasts longer by ``c / S`` of the overlap;
* compute bound by memory, and the transfer, last longer by ``1 - B / (b + r)`` of it, if that is positive;
* kernels of ``n`` streams take turns: a large kernel fills the GPU, and the blocks of the next get SMs only as its last
  ones leave. Each runs as long as alone but waits for ``n - 1`` of the overlap, so that the work of all is as long as one
  after the other (the wait is shared out evenly over a run; what small kernels could gain is left out);
* transfers that share NVLink or the NICs, and together ask for ``U`` times its rate, last longer by ``U - 1`` of it, if
  that is positive (fair shares; a message counts half, it leaves one direction free).

The job is simulated without interference, overlaps are read off, kernels and transfers stretched or delayed, and the job is
simulated once more: two passes whatever the job, and the second only where something overlaps. What the stretching
itself moves is second order and left out.

The form is that of fair shares; nothing is fitted. Measured: dp2 against dp2no on two H200s (docs/accuracy.md) shows a few
milliseconds in 1100, about what this gives; published means are 10-20 % of the overlapped compute. Turns: in traces of an
H200 (docs/accuracy.md) kernels of two streams overlap by a few microseconds, the last wave of the first.
"""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.base import Interference
from prism_plugins.simulate.compile import Code, StreamItems, recut
from prism_plugins.simulate.process import Machine
from prism_plugins.simulate.unit import Unit

WORTH_A_PASS = 1e-4
"""Share of the iteration below which the second pass is left out."""
_MOST_SMS = 0.5
"""Channels of concurrent collectives never hold more of the GPU than this: their kernels wait for one another then."""


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """By how much things last longer, ns, on the cell where it is most."""

    kernels_ns: float = 0.0
    """Kernels, for the collectives beside them and in waits for other streams' kernels."""
    transfers_ns: float = 0.0
    """Transfers, for others on the same link."""

    def __bool__(self) -> bool:
        """Whether anything was changed."""
        return self.kernels_ns > 0 or self.transfers_ns > 0


class _Runs(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one stream: arrays over its items, ns, bytes/ns."""

    items: StreamItems
    start: np.ndarray
    end: np.ndarray
    arithmetic: np.ndarray
    """Share of the run that arithmetic bounds."""
    memory_rate: np.ndarray
    """HBM demand of the rest."""


def apply(units: list[Unit], machine: Machine, model: Interference, total_ns: float) -> Slowdown:
    """Stretch what overlaps; returns zeros when nothing was changed."""
    hbm = model.hbm_bytes_per_s / 1e9
    stretched: list[tuple[Unit, list[StreamItems]]] = []
    delays: list[tuple[Unit, np.ndarray]] = []
    worst = crowded = 0.0
    for unit in units:
        ops = unit.stretch.ops
        several = sum(len(items.kernels) > 0 for items in unit.stretch.streams) > 1
        beside_compute = len(ops) and (len(unit.stretch.streams) > 1 or ops.is_async.any())
        if not (several or beside_compute):
            continue
        held, moving, rate = _transfers(unit, machine)
        runs = [_runs(unit, items, machine) for items in unit.stretch.streams]
        lost = _Integral(*held, lambda level: np.minimum(level, _MOST_SMS * model.num_sms) / model.num_sms)
        active = _Integral(*moving[:2], np.ones(len(rate)), lambda level: (level > 0).astype(float))
        demand = _Integral(*moving, lambda level: level)
        crowd = _crowd(runs)
        new = []
        added = 0.0
        for run in runs:
            length = run.items.run_ns
            beside = active.between(run.start, run.end)
            transfer_rate = np.divide(
                demand.between(run.start, run.end), beside, out=np.zeros(len(beside)), where=beside > 0
            )
            both = transfer_rate + run.memory_rate
            shared = np.where(both > hbm, 1 - hbm / np.maximum(both, 1e-30), 0.0)
            extra = run.arithmetic * lost.between(run.start, run.end) + (1 - run.arithmetic) * shared * beside
            waits = crowd.between(run.start, run.end) if model.streams_share else np.zeros(len(length))
            extra, waits = (np.where(length > 0, x, 0.0) for x in (extra, waits))
            added += float(extra.sum() + waits.sum())
            safe = np.maximum(length, 1e-30)
            new.append(recut(unit.stretch, run.items, 1 + extra / safe, waits / (safe + extra)))
        if added > 0:
            stretched.append((unit, new))
            worst = max(worst, added)
        shared_link = _link_delays(unit, moving)
        crowded = max(crowded, float(shared_link.sum()))
        delays.append((unit, _delays(runs, moving, rate, hbm) + shared_link))
    worst, crowded = (x if x >= WORTH_A_PASS * total_ns else 0.0 for x in (worst, crowded))
    if not worst and not crowded:
        return Slowdown()
    for unit, streams in stretched:
        unit.restretch(msgspec.structs.replace(unit.stretch, streams=tuple(streams)))
    for unit, delay in delays:
        slots = unit.linked.slot - unit.layer.first_slot
        duration = unit.layer.duration_ns
        # Members of one meeting agree on its end: the most delayed one decides.
        longer = unit.layer.undisturbed_ns[slots] + delay[unit.linked.op]
        np.maximum.at(duration, slots, longer)
    return Slowdown(kernels_ns=worst, transfers_ns=crowded)


def _transfers(unit: Unit, machine: Machine) -> tuple[tuple, tuple, np.ndarray]:
    """(start, end, channels) in which ops hold SMs; (start, end, bytes/ns) in which they move data; the rates."""
    ops, prices = unit.stretch.ops, unit.stretch.prices
    end = machine.values(unit.op_slot)
    duration = machine.durations(unit.linked.first_slot)
    began = end - duration
    kernel = began.copy()
    for items in unit.stretch.streams:
        at = np.flatnonzero(items.code == Code.COMM_ASYNC)
        op = items.arg[at]
        came = machine.trace(unit, items.stream)[at]
        previous = unit.op_previous[op]
        came = np.where(previous >= 0, np.maximum(came, machine.values(previous)), came)
        kernel[op] = np.minimum(np.maximum(came, 0.0), began[op])
    channels = prices.comm_channels[ops.comm].astype(float)
    rate = prices.comm_hbm_rate[ops.comm]
    return (kernel, end, channels), (began, end, rate), rate


def _runs(unit: Unit, items: StreamItems, machine: Machine) -> _Runs:
    stretch = unit.stretch
    prices = stretch.prices
    after = machine.trace(unit, items.stream)
    at_start = np.concatenate(([machine.start(unit, items.stream)], after[:-1]))
    base = machine.base_at(unit, items.event)
    end = np.maximum(at_start + items.run_ns, base + items.issue_ns)
    ref = stretch.program.events["ref"][items.kernels]
    durations = prices.op_ns[ref]
    bound = prices.op_arithmetic[ref]

    def per_run(values: np.ndarray) -> np.ndarray:
        total = np.concatenate(([0.0], np.cumsum(values)))
        stop = np.append(items.first_kernel[1:], len(values))
        return total[stop] - total[items.first_kernel]

    arithmetic_ns = per_run(np.where(bound, durations, 0.0))
    memory_bytes = per_run(np.where(bound, 0.0, prices.op_bytes[ref]))
    memory_ns = items.run_ns - arithmetic_ns
    return _Runs(
        items=items,
        start=end - items.run_ns,
        end=end,
        arithmetic=arithmetic_ns / np.maximum(items.run_ns, 1e-30),
        memory_rate=np.divide(memory_bytes, memory_ns, out=np.zeros(len(end)), where=memory_ns > 1.0),
    )


def _crowd(runs: list[_Runs]) -> _Integral:
    """Streams that run kernels beside one that does."""
    start = np.concatenate([run.start for run in runs])
    end = np.concatenate([run.end for run in runs])
    return _Integral(start, end, np.ones(len(start)), lambda level: np.maximum(level - 1.0, 0.0))


def _delays(runs: list[_Runs], moving: tuple, rate: np.ndarray, hbm: float) -> np.ndarray:
    """Per op: how much longer its transfer takes beside memory-bound kernels, ns."""
    start = np.concatenate([run.start for run in runs])
    end = np.concatenate([run.end for run in runs])
    both = np.concatenate([run.memory_rate for run in runs]) + (float(rate.max()) if len(rate) else 0.0)
    share = np.concatenate([1 - run.arithmetic for run in runs])
    level = share * np.where(both > hbm, 1 - hbm / np.maximum(both, 1e-30), 0.0)
    return _Integral(start, end, level, lambda x: np.minimum(x, 1.0)).between(moving[0], moving[1])


def _link_delays(unit: Unit, moving: tuple) -> np.ndarray:
    """Per op: how much longer its transfer takes beside others on its link, ns."""
    began, end, _ = moving
    delay = np.zeros(len(began))
    for share in unit.stretch.prices.comm_share.values():
        mine = share[unit.stretch.ops.comm]
        over = _Integral(began, end, mine, lambda level: np.maximum(level - 1.0, 0.0))
        delay += np.where(mine > 0, over.between(began, end), 0.0)
    return delay


class _Integral:
    """The integral over time of a function of the summed weights of intervals."""

    def __init__(self, start: np.ndarray, end: np.ndarray, weight: np.ndarray, function) -> None:
        keep = (end > start) & (weight > 0)
        start, end, weight = start[keep], end[keep], weight[keep]
        time = np.concatenate((start, end))
        order = np.argsort(time, kind="stable")
        self._time = time[order]
        level = function(np.cumsum(np.concatenate((weight, -weight))[order]).clip(min=0.0))
        self._total = (
            np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(self._time)))) if len(time) else None
        )

    def between(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Its value from ``start`` to ``end``, elementwise."""
        if self._total is None:
            return np.zeros(len(start))
        return np.interp(end, self._time, self._total) - np.interp(start, self._time, self._total)
