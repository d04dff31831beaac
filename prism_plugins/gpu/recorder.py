"""The recorder of a slice on a real GPU: the interface of :class:`~prism_plugins.capture.recorder.Recorder`.

Nothing is recorded while iterations are timed; what a slice itself knows (calls, waits, phases) is kept as marks. Then
CUPTI alone watches some iterations, without a pause between them: what kernels take in the running job
(:mod:`prism_plugins.capture.kernel_times`). The last iterations run under the whole of ``torch.profiler``, where each mark is
an annotation too, and :mod:`prism_plugins.capture.kineto_program` makes the event stream of the trace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from prism_plugins.capture.call_recorder import CallRecorder
from prism_plugins.capture.kernel_times import KernelTimes, kernel_times
from prism_plugins.capture.kineto import Trace, read_trace
from prism_plugins.capture.kineto_program import (
    ANSWER,
    END,
    STREAM,
    Mark,
    SignatureTable,
    TracedIteration,
    build_iteration,
)
from prism_plugins.capture.recorder import DeviceStats, RecordedIteration
from prism_plugins.device.memory import HostCounts
from prism_plugins.errors import PrismError
from prism_plugins.gpu.sensors import GpuSensors, hindered
from prism_plugins.gpu.timing import Schedule, host_ratio, scale_of, steady_ms
from prism_plugins.program.measured import GpuState, Measured, MeasuredMemory, MeasuredOp, Watched
from prism_plugins.program.model import (
    EVENT_DTYPE,
    EventKind,
    MemoryCategory,
    OpSignature,
    Phase,
)

_SHORT_NS = 50_000
"""A pause between iterations that is shorter is no pause."""
_WATCH_NS = 2_000_000_000
"""After so long no further iteration is watched: a trace is kept in memory."""
_UNTIMED = 0.02
"""Share of traced kernel time without a counterpart in the watched iterations that is worth a remark."""
_NOTHING = contextlib.nullcontext()
_NO_HOST = HostCounts(**dict.fromkeys(HostCounts.__struct_fields__, 0))


class GpuRecorder(CallRecorder):
    """See the module docstring. One per process.

    Args:
        schedule: what the iterations are for.
        work_dir: where traces are exported to before they are read (and removed).
        sensors: read while iterations are timed.
    """

    def __init__(self, schedule: Schedule, *, work_dir: Path, sensors: GpuSensors | None = None) -> None:
        super().__init__()
        self.schedule = schedule
        self.sensors = sensors or GpuSensors()
        self.remarks: list[str] = []
        """For the assumptions of the slice."""
        self.memory = MeasuredMemory()
        self._work_dir = work_dir
        self._table = SignatureTable()
        self._marks: list[Mark] = []
        self._index = -1
        self._profiler: Any = None
        self._watcher: Any = None
        """CUPTI alone."""
        self._watch_began = 0
        self._times: KernelTimes | None = None
        self._watched: Watched | None = None
        self._traced: list[TracedIteration] = []
        self._begins: list[tuple[int, Any]] = []
        self._ends: list[tuple[int, Any]] = []
        self._host_ns: dict[str, dict[str, list[int]]] = {
            how: defaultdict(list) for how in ("plain", "watched", "traced")
        }
        self._phase_began = 0
        self._state = GpuState()
        self._categories: dict[int, str] = {}
        self._live: list[tuple[int, int, str]] = []
        self._streams: set[int] = set()
        self._scratch: Any = None
        self._event_ids: dict[int, int] = {}
        self._num_events = 0
        self._stats: DeviceStats | None = None
        """Of the timed iterations, once they are over."""
        self._counted: DeviceStats | None = None

    # --- iterations ---

    @property
    def has_program(self) -> bool:
        """Whether enough iterations were traced to know the program."""
        return len(self._traced) >= self.schedule.traced

    @property
    def warmed_up(self) -> bool:
        """Whether the warm-up is over."""
        return self._index >= self.schedule.warm_up

    @property
    def reads_values(self) -> bool:
        """Whether values may be read back now: it waits for the GPU, which timed iterations must not."""
        return not self.recording or not self.warmed_up

    def start(self) -> None:
        """An iteration begins."""
        self._index += 1
        self._marks.clear()
        if self._index == 0:
            self._warm_profiler()
        if self._index == self.schedule.warm_up:
            self.sensors.watch()
        if self.schedule.is_traced(self._index) and not self.has_program:
            self._end_timing()
            self._end_watching()
            torch.cuda.synchronize()
            self._state = self._state if self._traced else self.sensors.stop()
            self._follow_events()
            self._live = self.live_blocks()
            self._streams.clear()
            self._profiler = _new_profiler()
            self._profiler.start()
        else:
            self._mark_begin()
            if self.schedule.is_watched(self._index):
                self._watch()
        self.recording, self._starting = True, False

    def stop(self) -> RecordedIteration:
        """An iteration ended."""
        self.recording = False
        if self._profiler is None:
            self._ends.append((self._index, _timing_event()))
            return self._recorded(_events_of(self._marks), [])
        with record_function(END):
            pass
        torch.cuda.synchronize()
        traced = self._read_trace()
        self._traced.append(traced)
        return self._recorded(self._with_pause(traced.events), traced.initial)

    def _with_pause(self, events: np.ndarray) -> np.ndarray:
        """What lies between two iterations, at the end of one: the script waits for the GPU there (it logs a loss), and
        the GPU for the script."""
        pause_ns = round(self._times.tail_ns if self._times is not None else self._between_ms() * 1e6)
        if pause_ns < _SHORT_NS:
            return events
        rows = [(EventKind.DEVICE_SYNC, 0, 0, 0, 0), (EventKind.HOST, 0, 0, 0, pause_ns)]
        return np.concatenate([events, np.array(rows, EVENT_DTYPE)])

    def _between_ms(self) -> float:
        """Median over the timed iterations."""
        begins = dict(self._begins)
        pauses = [
            event.elapsed_time(begins[index + 1])
            for index, event in self._ends
            if self.schedule.warm_up <= index < self.schedule.warm_up + self.schedule.timed
            and index + 1 in begins
        ]
        return statistics.median(pauses) if pauses else 0.0

    def _recorded(self, events: np.ndarray, initial: list[Any]) -> RecordedIteration:
        return RecordedIteration(
            events=events,
            signatures=list(self._table.signatures),
            comms=list(self._comms),
            groups=list(self._groups),
            phases=list(self._phases),
            initial=initial,
        )

    def _mark_begin(self) -> None:
        self._begins.append((self._index, _timing_event()))

    def _watch(self) -> None:
        """The iteration that begins is watched by CUPTI alone: its kernels lie between two small ones."""
        if self._index == self.schedule.warm_up + self.schedule.timed:
            self._end_timing()
            self._watcher = _new_watcher()
            self._watcher.start()
            self._watch_began = time.perf_counter_ns()
        elif time.perf_counter_ns() - self._watch_began > _WATCH_NS:
            self._end_watching()
        if self._watcher is not None:
            torch.cuda._sleep(1)

    def _end_watching(self) -> None:
        """Read what CUPTI saw, and make it what kernels take where nothing watches them."""
        if self._watcher is None:
            return
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        watcher, self._watcher = self._watcher, None
        watcher.stop()
        times = kernel_times(self._read(watcher))
        if times is None:
            self.remarks.append(
                "iterations watched by CUPTI alone show no kernels: their times are the traced ones"
            )
            return
        ratio = host_ratio(self._host_ns["plain"], self._host_ns["watched"])
        self._times, fit = times.fitted(steady_ms(self._timed_ms()) * 1e6, host_ratio=ratio)
        self._watched = Watched(
            iteration_ms=tuple(ns / 1e6 for ns in times.span_ns),
            busy_ms=times.busy_ns / 1e6,
            beside_ms=times.beside_ns / 1e6,
            overlap_ms=times.overlap_ns / 1e6,
            gap_ms=times.gap_ns / 1e6,
            host_ms=times.host_ns / 1e6,
            tail_ms=times.tail_ns / 1e6,
            kernel_scale=fit.kernels,
            gap_scale=fit.gaps,
            host_scale=fit.host,
        )

    def _timed_ms(self) -> tuple[float, ...]:
        """Of the timed iterations, from begin to begin."""
        first, last = self.schedule.warm_up, self.schedule.warm_up + self.schedule.timed
        starts = [event for index, event in self._begins if first <= index <= last]
        return tuple(a.elapsed_time(b) for a, b in itertools.pairwise(starts))

    def _end_timing(self) -> None:
        """The timed iterations are over: the begin of this one ends the last of them."""
        if self._stats is not None:
            return
        if self._begins and self._begins[-1][0] != self._index:
            self._mark_begin()
        self._stats = _device_stats()
        self.memory = msgspec.structs.replace(
            self.memory, used=self._used_bytes(), reserved=torch.cuda.memory_reserved()
        )

    def _used_bytes(self) -> int:
        if self.sensors.others():
            return 0
        free, total = torch.cuda.mem_get_info()
        return self.sensors.used_bytes() or total - free

    def _warm_profiler(self) -> None:
        """CUPTI's first start takes long and allocates; let it be outside of what is measured."""
        try:
            with _new_profiler():
                torch.cuda._sleep(1)
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise PrismError(
                f"torch's profiler does not start on this GPU ({error}); a slice on cuda needs CUPTI: "
                "is another profiler attached?"
            ) from None

    def _follow_events(self) -> None:
        """From now on torch tells of every CUDA event it records or waits for, in Python or C++. That takes time, so it
        begins after the timed iterations (and cannot be switched off again)."""
        self._event_ids.clear()
        if self._traced:
            return
        self._scratch = torch.zeros(1, device="cuda")
        from torch.cuda import _gpu_trace

        _gpu_trace.register_callback_for_event_record(self._event_recorded)
        _gpu_trace.register_callback_for_event_wait(self._event_waited)
        _gpu_trace.register_callback_for_event_synchronization(self._event_synced)
        torch._C._activate_gpu_trace()

    def _event_recorded(self, event: int, stream: int) -> None:
        if self.recording and self._profiler is not None:
            self._event_ids[event] = self._num_events = self._num_events + 1
            self._add(EventKind.EVENT_RECORD, self._num_events, stream=stream)

    def _event_waited(self, event: int, stream: int) -> None:
        if self.recording and self._profiler is not None and event in self._event_ids:
            self._add(EventKind.EVENT_WAIT, self._event_ids[event], stream=stream)

    def _event_synced(self, event: int) -> None:
        if self.recording and self._profiler is not None and event in self._event_ids:
            self._add(EventKind.EVENT_SYNC, self._event_ids[event])

    def _read_trace(self) -> TracedIteration:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        trace = self._read(profiler)
        if not trace.work:
            raise PrismError(
                "torch's profiler saw no kernel on the GPU (CUPTI is not permitted or another profiler is attached); "
                "a slice on cuda needs it"
            )
        return build_iteration(
            trace,
            marks=self._marks,
            table=self._table,
            live=self._live,
            times=self._times,
            phases=list(self._phases),
        )

    def _read(self, profiler: Any) -> Trace:
        """What a profiler that was stopped saw."""
        path = self._work_dir / f"trace-{os.getpid()}.json"
        try:
            profiler.export_chrome_trace(str(path))
            return read_trace(path)
        finally:
            path.unlink(missing_ok=True)

    # --- what the slice adds ---

    def kernel(self, op: str, *_: Any, **__: Any) -> None:
        """A kernel of an extension: on a real GPU the profiler sees it."""

    def intern(self, signature: OpSignature) -> int:
        """Number of an op."""
        return self._table.intern(signature)

    def launch(self, signature_id: int) -> None:
        """Seen by the profiler."""

    def answering(self) -> Any:
        """A context in which the virtual peers of a call answer it; what runs inside is no part of the job."""
        return record_function(ANSWER) if self._profiler is not None else _NOTHING

    def begin_phase(self, phase: Phase) -> None:
        """Open a phase; closes the one that is open."""
        super().begin_phase(phase)
        self._phase_began = time.perf_counter_ns()

    def end_phase(self) -> None:
        """Close the open phase, if any."""
        if self._open_phase >= 0:
            took = time.perf_counter_ns() - self._phase_began
            if not self._index or self._index >= self.schedule.warm_up:
                kind = next(itertools.islice(self._phases, self._open_phase, None)).kind
                how = "watched" if self._watcher is not None else "plain"
                self._host_ns["traced" if self._profiler is not None else how][kind].append(took)
        super().end_phase()

    def host(self, ns: int) -> None:
        """Host work is measured as part of the whole."""

    def host_op(self, op: str, inputs: Sequence[Any], outputs: Sequence[Any] = ()) -> None:
        """Work of the host on host tensors: measured as part of the whole."""

    def host_views(self, count: int) -> None:
        """Views that a Python loop makes: measured as part of the whole."""

    def tag(self, tensor: Any, category: MemoryCategory) -> None:
        """Say what the storage behind a tensor is for. Not while iterations are timed: it takes time of the host, and who tags
        does so in each iteration."""
        if tensor.is_cuda and not self.schedule.is_timed(self._index):
            self._categories[tensor.untyped_storage().data_ptr()] = category.value

    def _add(
        self, kind: EventKind, ref: int = 0, value: int = 0, flags: int = 0, stream: int | None = None
    ) -> None:
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        if self._profiler is not None:
            if stream and stream not in self._streams:
                self._streams.add(stream)
                with (
                    record_function(f"{STREAM}{stream}"),
                    torch.cuda.stream(torch.cuda.ExternalStream(stream)),
                ):
                    self._scratch.add_(1)
            with record_function(f"prism::{len(self._marks)}"):
                pass
        self._marks.append(Mark(kind, ref, value, flags, stream))

    # --- state ---

    def live_blocks(self) -> list[tuple[int, int, str]]:
        """(address, bytes, category) of live allocations, by address: in which order they were made is not known."""
        live = []
        for segment in torch.cuda.memory_snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    category = self._categories.get(address, MemoryCategory.OTHER.value)
                    live.append((address, block["size"], category))
                address += block["size"]
        return live

    def live_allocations(self) -> list[Any]:
        """Not asked for: a traced iteration knows its own."""
        return []

    def stats(self) -> DeviceStats:
        """What the real allocator counts, of the iterations before the traced ones; the virtual device's other counts are
        zero. Asked for after each iteration, but counted only where it is needed: it takes time of the host, for which the GPU
        may wait."""
        if self._stats is not None:
            return self._stats
        if self._counted is None or not self.schedule.is_timed(self._index + 1):
            self._counted = _device_stats()
        return self._counted

    def reset_peaks(self) -> None:
        """Set peak counters to the current values: once, when iterations are alike; each call takes time."""
        if self._index + 1 == self.schedule.warm_up - 1:
            torch.cuda.reset_peak_memory_stats()

    # --- what was measured ---

    def measured(self, rank: int) -> Measured:
        """Everything this slice measured. Call when :attr:`has_program`."""
        timed = self._timed_ms()
        spans = tuple(t.span_ns / 1e6 for t in self._traced)
        busy_ms = statistics.mean(t.busy_ns for t in self._traced) / 1e6
        scale, remark = 1.0, ""
        if self._times is None:
            scale, remark = scale_of(steady_ms(timed), span_ms=statistics.mean(spans), busy_ms=busy_ms)
        elif busy_ms:
            untimed = statistics.mean(t.untimed_ns for t in self._traced) / 1e6
            if untimed > _UNTIMED * busy_ms:
                remark = (
                    f"{untimed:.1f} of {busy_ms:.1f} ms of traced kernels were not in the iterations before: their times are "
                    "the profiler's"
                )
        if remark:
            self.remarks.append(remark)
        if not self.sensors.available:
            self.remarks.append(f"clocks, power and throttling were not seen: {self.sensors.why_not}")
        held = hindered(self._state)
        if held:
            self.remarks.append(f"the GPU was slowed down while it was measured: {held}")
        host_profiled = min(t.host_ns for t in self._traced) / 1e6
        return Measured(
            rank=rank,
            torch=str(torch.__version__),
            iteration_ms=timed,
            profiled_ms=spans,
            busy_ms=busy_ms,
            between_ms=self._between_ms(),
            host_ms=self._host_ms(host_profiled),
            host_profiled_ms=host_profiled,
            scale=scale,
            watched=self._watched,
            ops=tuple(self._op_times(scale)),
            gpu=msgspec.structs.replace(self._state, name=torch.cuda.get_device_name()),
            memory=self.memory,
        )

    def _host_ms(self, traced_ms: float) -> float:
        """What the host needs to issue an iteration, calls included."""
        if self._times is not None and self._times.host_ns:
            return self._times.host_ns / 1e6
        return traced_ms * host_ratio(self._host_ns["plain"], self._host_ns["traced"])

    def _op_times(self, scale: float) -> Iterator[MeasuredOp]:
        size = len(self._table.signatures)
        total, host, count = np.zeros(size), np.zeros(size), np.zeros(size, np.int64)
        for traced in self._traced:
            refs = traced.events["ref"][traced.events["kind"] == EventKind.KERNEL]
            total += np.bincount(refs, traced.op_ns, minlength=size)
            host += np.bincount(refs, traced.op_host_ns, minlength=size)
            count += np.bincount(refs, minlength=size)
        for number in np.flatnonzero(count).tolist():
            times = int(count[number])
            mean, issue = float(total[number] / times) * scale, float(host[number] / times)
            yield MeasuredOp(self._table.signatures[number], mean, times, issue)


def _device_stats() -> DeviceStats:
    stats = torch.cuda.memory_stats()
    return DeviceStats(
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        requested_bytes=stats.get("requested_bytes.all.current", 0),
        peak_requested_bytes=stats.get("requested_bytes.all.peak", 0),
        num_ooms=stats.get("num_ooms", 0),
        num_ops=0,
        num_computed=0,
        num_cache_hits=0,
        num_cache_misses=0,
        record_ns_per_op=0.0,
        late_peak_active_bytes=0,
        late_peak_reserved_bytes=0,
        delayed_reuse=0,
        synthesized_reads={},
        no_cpu_kernel={},
        no_meta_kernel={},
        dropped={},
        host=_NO_HOST,
    )


def _timing_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _new_profiler() -> Any:
    from torch._C._profiler import _ExperimentalConfig

    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        record_shapes=True,
        profile_memory=True,
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True, capture_overload_names=True),
    )


def _new_watcher() -> Any:
    """CUPTI alone: kernels, copies, and the calls that launched them."""
    return profile(activities=[ProfilerActivity.CUDA])


def _events_of(marks: Sequence[Mark]) -> np.ndarray:
    rows = [(mark.kind, mark.flags, 0, mark.ref, mark.value) for mark in marks]
    return np.array(rows, EVENT_DTYPE)
