"""The base classes that torch.cuda's Stream and Event have in a CUDA build, over torch's generic ones.

``torch.Stream`` and ``torch.Event`` talk to the device through its guard, which the virtual backend provides; the
classes here add what ``torch._C._CudaStreamBase`` and ``_CudaEventBase`` offer beyond them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prism_plugins.device.library import call, is_loaded

CUDA_DEVICE_TYPE = 1
"""``c10::DeviceType::CUDA``."""

_STREAMS_PER_POOL = 32
_event_clock: Callable[[int, int], float | None] | None = None


def use_event_clock(clock: Callable[[int, int], float | None] | None) -> None:
    """Have ``elapsed_time`` ask ``clock(id of the first record, id of the second)``, ms; where it does not know, and without
    one, host time counts."""
    global _event_clock
    _event_clock = clock


class CudaStreamBase(torch.Stream):
    """Stands for ``torch._C._CudaStreamBase``. Ids: 0 default, 1-32 normal pool, 33-64 high-priority pool."""

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = CUDA_DEVICE_TYPE,
        stream_ptr: int | None = None,
    ):
        """Wrap a stream by id or by pointer, or take one from the pool of its priority."""
        index = call("get_device") if device_index is None else device_index
        if stream_ptr is not None:
            stream_id = call("external_stream", stream_ptr)
        elif stream_id is None:
            stream_id = call("stream_from_pool", int(priority < 0))
        return super().__new__(cls, stream_id=stream_id, device_index=index, device_type=CUDA_DEVICE_TYPE)

    @property
    def cuda_stream(self) -> int:
        """What stands for the ``cudaStream_t``; 0 is the default stream."""
        return self.stream_id

    @property
    def priority(self) -> int:
        """-1 for streams of the high-priority pool, else 0."""
        return -1 if _STREAMS_PER_POOL < self.stream_id <= 2 * _STREAMS_PER_POOL else 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority, as an H100 reports them."""
        return (0, -5)


class CudaEventBase(torch.Event):
    """Stands for ``torch._C._CudaEventBase``."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ):
        """Make an event of the current device."""
        return super().__new__(
            cls, device=torch.device("cuda", call("get_device")), enable_timing=enable_timing
        )

    @property
    def cuda_event(self) -> int:
        """What stands for the ``cudaEvent_t``; 0 until it is recorded."""
        return self.event_id

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Host time between the two records, or what :func:`use_event_clock` says, ms. (torch.Event's own refuses subclasses.)"""
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if _event_clock is not None:
            told = _event_clock(record_id(self), record_id(end_event))
            if told is not None:
                return told
        return call("elapsed_ms", self.event_id, end_event.event_id)

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes):
        """Events cannot leave the process of a slice."""
        raise NotImplementedError("prism's virtual CUDA has no interprocess events")

    def ipc_handle(self) -> bytes:
        """Events cannot leave the process of a slice."""
        raise NotImplementedError("prism's virtual CUDA has no interprocess events")


def record_id(event: torch.cuda.Event) -> int:
    """Id of the event's last record, the ``ref`` of its EVENT_RECORD; 0 until it is recorded, and on a real GPU."""
    if not is_loaded():
        return 0
    handle = event.cuda_event
    return call("event_record", handle) if handle else 0
