"""Replays the ops of programs in the proportions of the programs, and measures each op there and in a cool state.

A GPU held at its power cap clocks by what all its ops together draw: one op in a loop is not that op in a job. So
rounds of about 30 ms issue every op of a mix in program order, each as often as its share of the iteration says; ops
of too small a share to be met often get a few extra blocks. Blocks are timed one by one (:mod:`.timers`), the queue
never empty. The clock moves from block to block, which tells the share of an op's time that scales with it.
Afterwards each op runs in short bursts on a rested GPU, which shows the clock it can reach: peak current limits
GEMMs far below the maximum. The heaviest ops finally run alone until their power is steady.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from prism_plugins.calibration.rebuild import Call, CannotRebuild, rebuild
from prism_plugins.calibration.sensors import Sensors
from prism_plugins.calibration.signatures import SignatureList
from prism_plugins.calibration.timers import CpuTimer, CudaTimer, Sample
from prism_plugins.calibration.values import Operands, span
from prism_plugins.costs.calibration import Figure
from prism_plugins.costs.families import family_of
from prism_plugins.program.model import DTYPE_BYTES, OpSignature

MIN_BLOCKS = 6
MIN_REPETITIONS = 20
_ROUND_US = 30_000.0
_BLOCK_US = 250.0
_GRAPH_BELOW_US = 300.0
"""Shorter ops are replayed from a CUDA graph, so that the time of the issuing host does not show."""
_EXTRA_SHARE = 0.15
"""Of a round's time, for ops that the mix alone would measure too seldom."""
_WARM_UP_S = 2.0
_COOL_BLOCKS = 2
_COOL_PAUSE_S = 0.005
_POWER_S = 0.35
_POWER_SHARE = 0.02
"""Power is measured of ops with at least this share of a mix."""
_MAX_SETS = 16
_MAX_TIMED = 250
"""Blocks of one op that are timed in one mix; more tell nothing new."""


class Entry:
    """One op under measurement."""

    def __init__(self, signature: OpSignature, calls: list[Call]) -> None:
        self.signature = signature
        self.calls = calls
        self.repetitions = 1
        self.launch: Callable[[], None] = self._run
        self.estimate_us = 1.0
        self.hot: list[Sample] = []
        self.cool: list[Sample] = []
        self.power_w = 0.0
        self.power_clock_mhz = 0.0
        self._turn = 0

    def _run(self) -> None:
        for _ in range(self.repetitions):
            self.calls[self._turn]()
            self._turn = (self._turn + 1) % len(self.calls)

    @property
    def block_us(self) -> float:
        """Expected time of a block."""
        return self.estimate_us * self.repetitions

    @property
    def done(self) -> bool:
        """Whether it was measured often enough."""
        return len(self.hot) >= MIN_BLOCKS and sum(s.repetitions for s in self.hot) >= MIN_REPETITIONS


class _Wanting:
    """Truthy while an op needs more blocks in a mix: two in this one, enough in all."""

    def __init__(self, entry: Entry) -> None:
        self.timed = 0
        self.here = 2
        self.blocks = MIN_BLOCKS - len(entry.hot)
        self.repetitions = MIN_REPETITIONS - sum(s.repetitions for s in entry.hot)

    def note(self, repetitions: int) -> None:
        """A block was issued."""
        self.timed += 1
        self.here -= 1
        self.blocks -= 1
        self.repetitions -= repetitions

    def __bool__(self) -> bool:
        return self.here > 0 or self.blocks > 0 or self.repetitions > 0


class ReplayedMix(NamedTuple):
    """A mix, and the power state it ran in."""

    name: str
    ops: list[tuple[Entry, float]]
    """With their occurrences."""
    clock_mhz: float
    power_w: float


class Replay:
    """Measures signature lists on one device."""

    def __init__(
        self,
        device: str,
        *,
        sensors: Sensors,
        say: Callable[[str], None] = lambda _: None,
        round_us: float = _ROUND_US,
        budget_s: float = 3600.0,
    ) -> None:
        self.device = torch.device(device)
        self.sensors = sensors
        self.not_measured: collections.Counter[str] = collections.Counter()
        self.static_w = 0.0
        self.mixes: list[ReplayedMix] = []
        self._say = say
        self._round_us = round_us
        self._deadline = time.monotonic() + budget_s
        self._cuda = self.device.type == "cuda"
        self._timer: CudaTimer | CpuTimer = CudaTimer() if self._cuda else CpuTimer()
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if self._cuda else 1 << 20
        self._operands = Operands(self.device, pool_bytes=(2 << 30) if self._cuda else (4 << 20))
        self._rotate_bytes = 2 * l2
        self._graph_pool = torch.cuda.graph_pool_handle() if self._cuda else None

    # ── what a caller asks for ───────────────────────────────────────────────────────────────────────────────

    def measure(self, signatures: SignatureList) -> list[Figure]:
        """Measure every signature; ops that belong to several mixes are measured in each, the samples joined. Ops of no
        mix are measured as extras of the first."""
        for signature in signatures.signatures:
            for spec in (*signature.inputs, *signature.outputs):
                self._operands.expect(spec)
        entries: dict[int, Entry] = {}
        with torch.no_grad():
            for index, signature in enumerate(signatures.signatures):
                entry = self._prepare(signature)
                if entry is not None:
                    entries[index] = entry
            self._say(f"{len(entries)} of {len(signatures.signatures)} ops rebuilt")
            self.static_w = self.static_w or self._measure_static()
            in_mixes = {i for mix in signatures.mixes for i in mix.ops}
            rest = dict.fromkeys((i for i in entries if i not in in_mixes), 0.0)
            for number, mix in enumerate(signatures.mixes):
                weights = {i: float(n) for i, n in zip(mix.ops, mix.counts, strict=True) if i in entries}
                self._replay_mix(mix.name, entries, weights | (rest if number == 0 else {}))
            if not signatures.mixes:
                self._replay_mix("ops of no mix", entries, rest)
            self._cool_down(entries.values())
            self._measure_power(self._heaviest(signatures, entries))
        self._timer.drain()
        return [figure_of(entry) for entry in entries.values() if entry.hot]

    # ── preparation ──────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, signature: OpSignature) -> Entry | None:
        """Rebuild an op, run it, choose how a block of it is launched. None (counted) where that is not possible."""
        try:
            nbytes = sum(span(t) * DTYPE_BYTES[t.dtype] for t in (*signature.inputs, *signature.outputs))
            sets = max(1, min(_MAX_SETS, -(-self._rotate_bytes // max(nbytes, 1))))
            entry = Entry(signature, [rebuild(signature, self._operands) for _ in range(sets)])
            entry.calls[0]()
            self._timer.drain()
            entry.estimate_us = self._estimate(entry)
        except CannotRebuild as error:
            self.not_measured[str(error)] += 1
            return None
        except Exception as error:  # an op that fails on these operands is named, and the others go on
            self._timer.drain()
            self.not_measured[f"{signature.op}: {_first_line(error)}"] += 1
            return None
        wanted = max(1, min(64, round(_BLOCK_US / entry.estimate_us)))
        entry.repetitions = wanted
        if self._timer.uses_graphs and entry.estimate_us < _GRAPH_BELOW_US:
            self._capture(entry)
        return entry

    def _estimate(self, entry: Entry) -> float:
        for entry.repetitions in (1, 4):
            self._timer.hold()
            self._timer.block(entry.launch, entry.repetitions)
        return max(0.5, min(s.us for s in self._timer.read_all()))

    def _capture(self, entry: Entry) -> None:
        """Launch the block from a CUDA graph. Ops that synchronise cannot be captured and stay eager."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._graph_pool):
                entry.launch()
        except Exception:
            torch.cuda.synchronize()
            return
        entry.launch = graph.replay
        entry.launch()
        self._timer.block(entry.launch, entry.repetitions)
        entry.estimate_us = max(0.5, self._timer.read_all()[0].us)

    # ── the three states ─────────────────────────────────────────────────────────────────────────────────────

    def _replay_mix(self, name: str, entries: dict[int, Entry], weights: dict[int, float]) -> None:
        """Rounds of a mix until each op of it was measured often enough, at least twice in this mix."""
        total = sum(entries[i].estimate_us * w for i, w in weights.items())
        per_round = {i: w * self._round_us / total if total else 0.0 for i, w in weights.items()}
        credit = dict.fromkeys(weights, 0.0)
        wanting = {i: _Wanting(entries[i]) for i in weights}
        timed: list[Entry] = []
        began = time.perf_counter()
        warm_until = began + (_WARM_UP_S if self._cuda and total else 0.0)
        measured_from = 0.0
        rounds = 0
        while time.monotonic() < self._deadline and not self._timer.full():
            warm = time.perf_counter() >= warm_until
            if warm and not rounds:
                measured_from = time.perf_counter()
            extra_us = self._round_us * (_EXTRA_SHARE if total else 1.0)
            for index in weights:
                entry = entries[index]
                credit[index] += per_round[index]
                blocks = int(credit[index] // entry.repetitions)
                credit[index] -= blocks * entry.repetitions
                if not blocks and warm and extra_us > 0 and wanting[index]:
                    blocks = 1
                    extra_us -= entry.block_us
                for _ in range(blocks):
                    if (
                        warm
                        and not self._timer.full()
                        and (wanting[index] or wanting[index].timed < _MAX_TIMED)
                    ):
                        self._timer.block(entry.launch, entry.repetitions)
                        timed.append(entry)
                        wanting[index].note(entry.repetitions)
                    else:
                        entry.launch()
            rounds += warm
            if rounds >= MIN_BLOCKS and not any(wanting.values()):
                break
            if rounds % 8 == 7:
                self._operands.refresh()
        samples = self._timer.read_all()
        for entry, sample in zip(timed, samples, strict=True):
            entry.hot.append(sample)
        power = self.sensors.power_w(measured_from, time.perf_counter())
        clock = _mean((s.clock_mhz, s.us * s.repetitions) for s in samples)
        if total:
            self.mixes.append(ReplayedMix(name, [(entries[i], w) for i, w in weights.items()], clock, power))
        self._say(
            f"{name}: {len(weights)} ops, {rounds} rounds, {time.perf_counter() - began:.1f} s, "
            f"{clock:.0f} MHz, {power:.0f} W"
        )

    def _cool_down(self, entries: Iterable[Entry]) -> None:
        """Short bursts on a rested GPU, which then runs at the highest clock that peak current allows the op."""
        if not self._cuda:
            return
        began = time.perf_counter()
        torch.cuda.synchronize()
        time.sleep(0.5)
        for entry in entries:
            for _ in range(_COOL_BLOCKS):
                if time.monotonic() > self._deadline:
                    return
                time.sleep(_COOL_PAUSE_S)
                self._timer.hold()
                self._timer.block(entry.launch, entry.repetitions)
                entry.cool += self._timer.read_all()
        self._say(f"cool state: {time.perf_counter() - began:.1f} s")

    def _measure_static(self) -> float:
        """Power of a GPU at full clocks that computes next to nothing."""
        if not (self._cuda and self.sensors.available):
            return 0.0
        began = time.perf_counter()
        while time.perf_counter() < began + 0.8:
            torch.cuda._sleep(2_000_000)
            torch.cuda.synchronize()
        return self.sensors.power_w(began + 0.3, time.perf_counter())

    def _heaviest(self, signatures: SignatureList, entries: dict[int, Entry]) -> list[Entry]:
        chosen: dict[int, Entry] = {}
        for mix in signatures.mixes:
            times = {
                i: entries[i].estimate_us * n
                for i, n in zip(mix.ops, mix.counts, strict=True)
                if i in entries
            }
            total = sum(times.values())
            chosen |= {i: entries[i] for i, us in times.items() if us >= _POWER_SHARE * total}
        return list(chosen.values())

    def _measure_power(self, entries: list[Entry]) -> None:
        """Each op alone until its power is steady; clock and power of the second half of that time."""
        if not (self._cuda and self.sensors.available):
            return
        began = time.perf_counter()
        for entry in entries:
            if time.monotonic() > self._deadline:
                break
            start = time.perf_counter()
            tickets: list[int] = []
            while time.perf_counter() < start + _POWER_S:
                for _ in range(max(1, int(4_000 / entry.block_us))):
                    entry.launch()
                tickets.append(self._timer.block(entry.launch, entry.repetitions))
                if len(tickets) > 2:
                    self._timer.wait(tickets[-3])  # at most two batches ahead
            samples = self._timer.read_all()[len(tickets) // 2 :]
            entry.power_w = self.sensors.power_w(start + _POWER_S / 2, start + _POWER_S)
            entry.power_clock_mhz = statistics.median(s.clock_mhz for s in samples)
        self._say(f"power of {len(entries)} ops: {time.perf_counter() - began:.1f} s")


def figure_of(entry: Entry) -> Figure:
    """The figure of a measured op, in the state of the mix.

    Clocks dip for some milliseconds whenever the power limiter acts, and an iteration pays for the dips too: the
    figure is the mean of all blocks but the extreme hundredth at either end (hiccups of the host).
    """
    samples = sorted(entry.hot)
    cut = len(samples) // 100
    kept = samples[cut : len(samples) - cut]
    times = [s.us for s in kept]
    us, quarter = statistics.fmean(times), len(times) // 4
    clock = us / statistics.fmean(s.us / s.clock_mhz for s in kept) if all(s.clock_mhz for s in kept) else 0.0
    return Figure(
        signature=entry.signature,
        us=round(us, 4),
        median_us=round(statistics.median(times), 4),
        clock_mhz=round(clock, 1),
        burst_clock_mhz=round(max((s.clock_mhz for s in entry.cool), default=0.0), 1),
        compute_share=round(_compute_share(kept, entry.signature), 3),
        spread=round((times[-1 - quarter] - times[quarter]) / us, 4),
        repetitions=sum(s.repetitions for s in entry.hot),
        power_w=round(entry.power_w, 1),
        power_clock_mhz=round(entry.power_clock_mhz, 1),
    )


_MIN_CLOCK_SPREAD = 0.012
"""Standard deviation over mean of the clock: with less, blocks do not tell what scales with it."""


def _compute_share(samples: list[Sample], signature: OpSignature) -> float:
    """``a / f`` over ``t`` at the mean clock, from a least-squares fit of ``t = a / f + b`` through the blocks."""
    periods = np.array([1 / s.clock_mhz for s in samples if s.clock_mhz])
    times = np.array([s.us for s in samples if s.clock_mhz])
    if len(periods) >= MIN_BLOCKS and periods.std() > _MIN_CLOCK_SPREAD * periods.mean():
        slope = np.polyfit(periods / periods.mean() - 1, times / times.mean() - 1, 1)[0]
        return float(np.clip(slope, 0.0, 1.0))
    return _TYPICAL_SHARE.get(family_of(signature.op) or "", 0.1)


_TYPICAL_SHARE = {
    "gemm": 0.96, "scaled_gemm": 0.96, "batched_gemm": 0.2, "attention_forward": 0.95, "attention_backward": 0.95,
    "cudnn_attention_forward": 0.95, "cudnn_attention_backward": 0.95, "cat": 0.6, "softmax_forward": 0.5,
    "norm_forward": 0.5, "sort": 0.9, "scatter": 0.4, "elementwise": 0.2,
}  # fmt: skip
"""Medians of the ops whose share could be measured on an H200; for ops whose clock hardly moved."""


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    total = sum(w for _, w in pairs)
    return sum(x * w for x, w in pairs) / total if total else 0.0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
