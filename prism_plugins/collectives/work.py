"""The ``Work`` handles our process group returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prism_plugins.device import library


class CompletedWork(dist.Work):
    """The handle of a call that was synchronous: there is nothing left to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether the call has completed on the device."""
        return True

    def is_success(self) -> bool:
        """Whether the call succeeded."""
        return True

    def exception(self) -> None:
        """No call of ours fails after it was issued."""
        return None

    def synchronize(self) -> None:
        """Make the current stream wait for the call."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait for the call."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors the call wrote."""
        return []

    def source_rank(self) -> int:
        """Group rank of the sender of a recv."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A completed future of the tensors the call wrote."""
        return _completed_future(self.result())

    getFuture = get_future


class VirtualWork(CompletedWork):
    """The handle of an asynchronous call: the first wait on each stream is recorded.

    Like NCCL's, it keeps the tensors it writes alive as long as it lives, and those it only reads until the
    first wait.

    Args:
        recorder: receives ``wait(work)``.
        work: id of the recorded call.
        tensors: what the call writes.
        reads: what the call only reads.
        source: group rank of the sender of a recv.
        finish: for calls that are really executed, blocks until the values have arrived.
    """

    def __init__(
        self,
        recorder: Any,
        *,
        work: int,
        tensors: Sequence[Tensor] = (),
        reads: Sequence[Tensor] = (),
        source: int = -1,
        finish: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._work = work
        self._tensors = tensors
        self._reads = reads
        self._source = source
        self._finish = finish
        self._waited: set[int] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the call."""
        stream = _current_stream()
        if self._waited is None:
            self._waited = {stream}
            self._reads = ()
            self._arrive()
        elif stream in self._waited:
            return True
        else:
            self._waited.add(stream)
        self._recorder.wait(self._work)
        return True

    def is_completed(self) -> bool:
        """Always: virtual peers answer at once, and real ones are waited for, so that no poll spins."""
        self._arrive()
        return True

    def result(self) -> list[Tensor]:
        """The tensors the call wrote."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Group rank of the sender of a recv."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A completed future of the tensors the call wrote.

        Whoever waits for it, in Python or C++, makes its stream wait for the call: as with NCCL, the event in the
        future is recorded on a stream of its own that has waited for the call. A future of CPU tensors has no
        event: the current stream waits now.
        """
        devices = list({t.device for t in self._tensors if t.device.type != "cpu"})
        if not devices:
            self.wait()
            return _completed_future(self.result())
        self._arrive()
        if not library.is_loaded():
            with torch.cuda.stream(_futures_stream()):
                self._recorder.wait(self._work)
                return _completed_future(self.result(), devices)
        device = library.call("get_device")
        before = library.call("exchange_stream", device, library.call("external_stream", _FUTURES))
        try:
            self._recorder.wait(self._work)
            return _completed_future(self.result(), devices)
        finally:
            library.call("exchange_stream", device, before)

    getFuture = get_future

    def _arrive(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            source = finish()
            if source is not None:
                self._source = source


_FUTURES = 0x507269736D00
"""Stands for the ``cudaStream_t`` on which futures are completed. Even: an odd one would be of torch's pools."""


@functools.cache
def _futures_stream() -> torch.cuda.Stream:
    """The same on a real GPU."""
    return torch.cuda.Stream()


def _completed_future(tensors: list[Tensor], devices: Sequence[torch.device] = ()) -> torch.futures.Future:
    future = torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()
    future.set_result(tensors)
    return future


def _current_stream() -> int:
    """The calling thread's current stream, 0 where there is no device."""
    if not library.is_loaded():
        return torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0
    return library.call("current_stream", library.call("get_device"))
