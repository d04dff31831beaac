"""The clock of a replay without a GPU: what the script reads of it is where the simulation has its rank.

Before training it is the real one. In an iteration it shows when the host comes to the next event of the simulated
program; between two iterations it stands at the end of the one before. Each iteration begins where the one before ended,
so nothing drifts. Readings advance it by a little, and by more the more there were in a row, so that a loop that waits for it ends;
sleeping advances it by what was slept.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from prism_plugins.errors import FileFormatError
from prism_plugins.program.model import EventKind
from prism_plugins.program.replay import ClockPlan

if TYPE_CHECKING:
    from prism_plugins.slice_context import Context

READING_NS = 100
"""By what a reading advances the clock."""
_PATIENCE = 1000
"""After so many readings in a row each advances it by twice as much."""
NO_TIME = (EventKind.ALLOC, EventKind.FREE, EventKind.HOST)
"""Events that differ between iterations (the garbage collector frees when it likes); their times are part of the next."""
_KEPT_RECORDS = 100_000
"""CUDA events whose times are known afterwards."""
_FUNCTIONS = ("time", "perf_counter", "monotonic")


class VirtualClock:
    """See the module docstring.

    Args:
        plan: what the simulation says.
        count: how many events were recorded so far in this iteration.
        events: they, shape (n,), dtype ``EVENT_DTYPE``.
        real: the real clock, ns.

    Raises :class:`FileFormatError` for a plan that contradicts itself.
    """

    def __init__(
        self,
        plan: ClockPlan,
        *,
        count: Callable[[], int],
        events: Callable[[], np.ndarray],
        real: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.kinds = _array(plan.kinds, np.uint8)
        self._host_ns = _array(plan.host_ns, np.float64)
        self._record_ns = _array(plan.record_ns, np.float64)
        if len(self.kinds) != len(self._host_ns):
            raise FileFormatError("plan.json: as many kinds of events as times are needed")
        self.iteration_ns = plan.iteration_ns
        self._count = count
        self._events = events
        self._place = (0, 0)
        """Events when the clock was read last, and how many of them tell where the host is."""
        self._real = real
        self._made_at = real()
        self._base = -1.0
        """When the open iteration began, or the last one ended; negative: none began."""
        self._open = False
        self._last = 0.0
        self._in_a_row = 0
        self._records: dict[int, float] = {}
        self._lock = threading.RLock()

    def begin(self) -> float:
        """An iteration begins; returns when, ns."""
        with self._lock:
            if self._base < 0:
                self._base = self.now_ns()
            self._open = True
            self._place = (0, 0)
            return self._base

    def end(self, events: np.ndarray) -> bool:
        """An iteration with these events ended. Returns whether it was the simulated one; one that was cut short took as long
        as the simulated one until there."""
        with self._lock:
            kinds = timed_kinds(events)
            self._keep_records(events)
            self._base += self._host_at(len(kinds))
            self._open = False
            return bool(np.array_equal(kinds, self.kinds))

    def now_ns(self) -> float:
        """Nanoseconds since the clock was made; never the same twice."""
        with self._lock:
            if self._base < 0:
                now = float(self._real() - self._made_at)
            elif self._open:
                now = self._base + self._host_at(self._position())
            else:
                now = self._base
            self._in_a_row = 0 if now > self._last else self._in_a_row + 1
            step = READING_NS * 2 ** min(self._in_a_row // _PATIENCE, 20)
            self._last = max(now, self._last + step)
            return self._last

    def _position(self) -> int:
        """How many events were recorded that tell where the host is."""
        count = self._count()
        if count != self._place[0]:
            self._place = (count, len(timed_kinds(self._events())))
        return self._place[1]

    def elapsed_ms(self, begin: int, end: int) -> float | None:
        """Time of the device between two records of CUDA events, by their ids in the event stream; None where one of them
        lies outside of iterations."""
        with self._lock:
            if self._open and not {begin, end} <= self._records.keys():
                self._keep_records(self._events())
            if {begin, end} <= self._records.keys():
                return (self._records[end] - self._records[begin]) / 1e6
            return None

    def slept(self, seconds: float) -> None:
        """The script slept: all that follows is later by as much."""
        with self._lock:
            if self._base >= 0:
                self._base += seconds * 1e9

    def install(self, context: Context) -> None:
        """Have ``time.time`` and its like, ``time.sleep`` and CUDA events read this clock, where the script or a framework
        asks. Python's own library, prism, and threads that the script started see the real one (timeouts)."""
        from prism_plugins.device.streams import use_event_clock

        why = "the replayed rank sees simulated time"
        for name in _FUNCTIONS:
            real, real_ns = getattr(time, name), getattr(time, f"{name}_ns")
            offset = real_ns()
            made = self.now_ns()
            context.patch(time, name, self._reading(real, offset - made, 1e-9), why=why)
            context.patch(time, f"{name}_ns", self._reading(real_ns, offset - made, None), why=why)
        real_sleep = time.sleep

        def sleep(seconds: float) -> None:
            real_sleep(seconds)
            if not _needs_real_time():
                self.slept(seconds)

        context.patch(time, "sleep", sleep, why=why)
        use_event_clock(self.elapsed_ms)

    def _reading(self, real: Callable[[], Any], offset: float, unit: float | None) -> Callable[[], Any]:
        def read() -> Any:
            if _needs_real_time():
                return real()
            now = offset + self.now_ns()
            return round(now) if unit is None else now * unit

        return read

    def _host_at(self, number: int) -> float:
        """When the host comes to the event of this number, from the begin of the iteration."""
        return float(self._host_ns[number]) if number < len(self._host_ns) else self.iteration_ns

    def _keep_records(self, events: np.ndarray) -> None:
        ids = events["ref"][events["kind"] == EventKind.EVENT_RECORD].tolist()
        for number, at in zip(ids, self._record_ns.tolist(), strict=False):
            self._records[number] = self._base + at
        while len(self._records) > _KEPT_RECORDS:
            del self._records[next(iter(self._records))]


def timed_kinds(events: np.ndarray) -> np.ndarray:
    """Kinds of the events that tell where the host is, shape (n,), uint8."""
    kinds = events["kind"]
    return kinds[~np.isin(kinds, NO_TIME)].astype(np.uint8)


def _needs_real_time() -> bool:
    """Whether the caller of the function that asks is Python's own library, prism, torch where it waits for processes, or works
    beside the training. (Threads of autograd, which Python did not start, are part of it.)"""
    if not isinstance(threading.current_thread(), (type(threading.main_thread()), threading._DummyThread)):
        return True
    name = sys._getframe(2).f_globals.get("__name__") or ""
    top = name.partition(".")[0]
    return top == "prism_plugins" or top in sys.stdlib_module_names or name.startswith("torch.distributed")


def _array(data: bytes, dtype: Any) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise FileFormatError(f"plan.json: {len(data)} bytes are no whole number of values")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
