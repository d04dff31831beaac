"""The ``Work`` handles our process group returns."""

from __future__ import annotations

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

    Args:
        recorder: receives ``wait(work)``.
        work: id of the recorded call.
        tensors: what the call writes.
        source: group rank of the sender of a recv.
        finish: for calls that are really executed, blocks until the values have arrived.
    """

    def __init__(
        self,
        recorder: Any,
        *,
        work: int,
        tensors: Sequence[Tensor] = (),
        source: int = -1,
        finish: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._work = work
        self._tensors = tensors
        self._source = source
        self._finish = finish
        self._waited: set[int] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the call."""
        stream = _current_stream()
        if self._waited is None:
            self._waited = {stream}
        elif stream in self._waited:
            return True
        else:
            self._waited.add(stream)
        self._recorder.wait(self._work)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            source = finish()
            if source is not None:
                self._source = source
        return True

    def is_completed(self) -> bool:
        """Always: virtual peers answer at once, and a poll must not spin."""
        return True

    def result(self) -> list[Tensor]:
        """The tensors the call wrote."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Group rank of the sender of a recv."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A completed future of the tensors the call wrote; its ``wait`` is the wait of this handle."""
        future = _completed_future(self.result(), kind=_WaitingFuture)
        future.work = self
        return future

    getFuture = get_future


class _WaitingFuture(torch.futures.Future):
    """A future whose Python ``wait`` and ``value`` make the current stream wait for the collective."""

    work: VirtualWork | None = None

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return super().wait()

    def value(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return super().value()


def _completed_future(tensors: list[Tensor], kind: type = torch.futures.Future) -> torch.futures.Future:
    devices = list({t.device for t in tensors if t.device.type != "cpu"})
    future = kind(devices=devices) if devices else kind()
    future.set_result(tensors)
    return future


def _current_stream() -> int:
    """Id of the calling thread's current stream on the virtual device, 0 where there is none."""
    if not library.is_loaded():
        return 0
    return library.call("current_stream", library.call("get_device"))
