"""Timed virtual participants: the recorder of a replay.

The rank of interest runs the original script on the GPU. Each call with virtual peers goes to a communication stream of
its group, as NCCL's would: it waits there for what the issuing stream holds, the answer's values are computed, and the
stream stays occupied until the peers have come and the predicted duration is over. The issuing stream waits for it at once
(synchronous calls) or where the script waits. Calls are matched with the plan by their order in the iteration.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prism_plugins.capture.recorder import RecordedIteration
from prism_plugins.gpu.recorder import GpuRecorder
from prism_plugins.gpu.timing import make_schedule
from prism_plugins.program.model import CommSignature, GroupInfo
from prism_plugins.program.replay import ReplayCall, ReplayPlan, ReplayResult
from prism_plugins.replay.device_timer import DeviceTimer, make_timer
from prism_plugins.rundir import read_json

_ON_THE_HOST = ("gloo", "mpi", "ucc")
_KEPT_WORKS = 10_000
"""Calls whose ends can be waited for; a script waits for a call in the same iteration or the next."""
_AT_ONCE = ReplayCall("", 0, 0.0)


class _Pending(NamedTuple):
    """A call that was recorded and will be answered next."""

    call: ReplayCall
    work: int
    stream: Any
    waits: bool


class ReplayRecorder(GpuRecorder):
    """See the module docstring.

    Args:
        plan: what the simulation says of each call.
        iterations: to run.
        work_dir: as for :class:`GpuRecorder`.
        timer: keeps the virtual peers' time.
    """

    def __init__(
        self, plan: ReplayPlan, *, iterations: int, work_dir: Path, timer: DeviceTimer | None = None
    ) -> None:
        super().__init__(make_schedule(iterations, traced=0), work_dir=work_dir)
        self._plan = plan
        self._iterations = iterations
        self._timer = timer or make_timer()
        self._next = 0
        self._calls = 0
        self._unmatched = 0
        self._strangers = 0
        """Calls of this iteration that the plan does not foresee."""
        self._pending: _Pending | None = None
        self._group_list: list[GroupInfo] = []
        self._stream_of: dict[int, Any] = {}
        self._done: dict[int, Any] = {}
        self._last_work = -1

    @classmethod
    def of_plan(cls, path: Path, *, iterations: int, timer: DeviceTimer | None = None) -> ReplayRecorder:
        """The recorder for a plan file. Raises FileFormatError for a file that is none."""
        return cls(read_json(path, ReplayPlan), iterations=iterations, work_dir=path.parent, timer=timer)

    @property
    def has_program(self) -> bool:
        """Whether enough iterations were run."""
        return self._index + 1 >= self._iterations

    def start(self) -> None:
        """An iteration begins."""
        self._index += 1
        self._marks.clear()
        self._next = self._strangers = 0
        self._mark_begin()
        self._timer.begin(torch.cuda.current_stream())
        self.recording, self._starting = True, False

    def stop(self) -> RecordedIteration:
        """An iteration ended."""
        if self._plan.idle_ns > 0:
            self._timer.take_part(
                0,
                torch.cuda.current_stream(),
                duration_ns=0,
                peers_ns=self._plan.iteration_ns,
                channels=0,
                hbm_bytes=0,
            )
        self._calls = self._next
        if self._index >= self.schedule.warm_up:
            self._unmatched += self._strangers + len(self._plan.calls) - self._next
        return super().stop()

    def group(self, info: GroupInfo) -> int:
        """Index of a process group in the groups table."""
        index = super().group(info)
        if index == len(self._group_list):
            self._group_list.append(info)
        return index

    def comm(self, signature: CommSignature, *, work: int, is_async: bool) -> None:
        """A collective or p2p call on the current stream: it is reached now, and answered next."""
        super().comm(signature, work=work, is_async=is_async)
        self._pending = None
        if not self.recording:
            return
        call = self._match(signature)
        if self._group_list[signature.group].backend in _ON_THE_HOST:
            return
        current = torch.cuda.current_stream()
        stream = self._stream_of.get(signature.group)
        if stream is None:
            stream = self._stream_of[signature.group] = torch.cuda.Stream()
        stream.wait_stream(current)
        if work != self._last_work:  # calls that were coalesced are reached together
            self._timer.reached(work, stream)
            self._last_work = work
        self._pending = _Pending(call, work, stream, not is_async)

    @contextlib.contextmanager
    def _answer(self, pending: _Pending) -> Iterator[None]:
        current = torch.cuda.current_stream()
        call = pending.call
        with torch.cuda.stream(pending.stream):
            yield
        self._timer.take_part(
            pending.work,
            pending.stream,
            duration_ns=call.duration_ns,
            peers_ns=call.peers_ns,
            channels=call.channels,
            hbm_bytes=call.hbm_bytes,
        )
        if len(self._done) > _KEPT_WORKS:
            del self._done[next(iter(self._done))]
        event = self._done[pending.work] = torch.cuda.Event()
        event.record(pending.stream)
        if pending.waits:
            current.wait_event(event)

    def answering(self) -> Any:
        """A context in which the peers of the call just recorded answer it, on its communication stream."""
        pending, self._pending = self._pending, None
        return contextlib.nullcontext() if pending is None else self._answer(pending)

    def wait(self, work: int) -> None:
        """The current stream waits for a collective."""
        super().wait(work)
        event = self._done.get(work)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _match(self, signature: CommSignature) -> ReplayCall:
        calls = self._plan.calls
        if self._next < len(calls):
            call = calls[self._next]
            if call.kind == signature.kind and call.nbytes == signature.nbytes:
                self._next += 1
                return call
        self._strangers += 1
        return _AT_ONCE

    def result(self) -> ReplayResult:
        """What was measured."""
        torch.cuda.synchronize()
        starts = [event for _, event in self._begins]
        stats = torch.cuda.memory_stats()
        return ReplayResult(
            rank=self._plan.rank,
            iteration_ms=tuple(a.elapsed_time(b) for a, b in itertools.pairwise(starts)),
            calls=self._calls,
            unmatched=self._unmatched,
            timer=self._timer.name,
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            peak_requested_bytes=stats.get("requested_bytes.all.peak", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        )
