"""The recorder: the one way Python code writes into the event stream of an iteration.

Kernels, allocations, events and synchronisations are recorded by the C++ layer without entering Python. What Python
adds (communication, phases, fused ops) goes into the same stream, so the order is the host's issue order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prism_plugins.capture.call_recorder import CallRecorder
from prism_plugins.device import library
from prism_plugins.device.memory import HostCounts, begin_peaks, host_counts, memory_counts, peak_bytes
from prism_plugins.errors import PrismError
from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    MemoryCategory,
    OpSignature,
    Phase,
    TensorSpec,
    category_flag,
)

if TYPE_CHECKING:
    from torch import Tensor

CATEGORIES = tuple(MemoryCategory)
"""In the order of the C++ enum."""


class RecordedIteration(msgspec.Struct, kw_only=True):
    """What one iteration did. Tables and their ids belong to the process: two equal iterations have equal refs
    (allocation, event and work ids apart)."""

    events: np.ndarray
    """Shape (num_events,), dtype :data:`EVENT_DTYPE`."""
    signatures: list[OpSignature]
    comms: list[CommSignature]
    groups: list[GroupInfo]
    phases: list[Phase]
    initial: list[Allocation]
    """Live when recording started, in allocation order."""


class DeviceStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the virtual device and what it could not do for real. Bytes, as torch.cuda counts them."""

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    requested_bytes: int
    peak_requested_bytes: int
    num_ooms: int
    """Allocations beyond the GPU's memory."""
    num_ops: int
    num_computed: int
    """Of these: computed on the CPU."""
    num_cache_hits: int
    num_cache_misses: int
    record_ns_per_op: float
    """Time the recorder takes per op: median of a sample of one op in 64."""
    late_peak_active_bytes: int
    """Of the ledger that reuses a block only when the GPU would have come to its release (``csrc/blocks.h``); 0 in a CUDA build."""
    late_peak_reserved_bytes: int
    delayed_reuse: int
    """Releases of blocks that other streams used: a real GPU reuses them later."""
    synthesized_reads: dict[str, int]
    """Read-backs of values nobody computed, by ``op dtype``."""
    no_cpu_kernel: dict[str, int]
    """Ops on real memory whose results had to be synthesized, by name."""
    no_meta_kernel: dict[str, int]
    """Ops that only mutate their arguments and have no Meta kernel: taken as keeping the shapes, by name."""
    dropped: dict[str, int]
    """What reached the CUDA runtime of a CUDA build past torch's operators, and was not carried out, by name."""
    host: HostCounts


def recorded_events() -> np.ndarray:
    """What was recorded since the recorder's start; dtype EVENT_DTYPE, shape (num_events,)."""
    events = np.empty(library.call("num_events"), EVENT_DTYPE)
    library.call("copy_events", events.ctypes.data)
    return events


class Recorder(CallRecorder):
    """See the module docstring. One per process: :func:`get_recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self._start = library.function("start")
        self._stop = library.function("stop")
        self._add = library.function("add_event")
        self._signatures: list[OpSignature] = []
        self._ids: dict[OpSignature, int] = {}
        self._initial: list[Allocation] = []
        self._tags: dict[int, int] = {}
        self._in_messages: set[int] = set()

    @property
    def has_program(self) -> bool:
        """Whether a recorded iteration is a whole program: here each one is."""
        return True

    def start(self) -> None:
        """Forget recorded events, remember the live allocations and begin to record."""
        self._initial = self.live_allocations()
        self._tags.clear()
        self._in_messages.clear()
        self.recording, self._starting = True, False
        self._start()

    def stop(self) -> RecordedIteration:
        """End recording and return what was recorded since :meth:`start`."""
        self._stop()
        self.recording = False
        events = recorded_events()
        self._flag_allocations(events)
        return RecordedIteration(
            events=events,
            signatures=self._decode_signatures(),
            comms=list(self._comms),
            groups=list(self._groups),
            phases=list(self._phases),
            initial=self._initial,
        )

    def kernel(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        scalars: Sequence[tuple[str, int | float | bool | str | tuple[int, ...] | None]] = (),
        attrs: dict[str, int | float | str] | None = None,
    ) -> None:
        """Record a device op that is not an aten kernel (a fused region, an extension)."""
        if not self.recording:
            return
        signature = OpSignature(
            op=op,
            inputs=tuple(tensor_spec(t) for t in inputs),
            outputs=tuple(tensor_spec(t) for t in outputs),
            scalars=tuple(scalars),
            attrs=attrs or {},
        )
        self.launch(self.intern(signature))

    def intern(self, signature: OpSignature) -> int:
        """Id of a signature in this process, for :meth:`launch`."""
        encoded = msgspec.json.encode(signature)
        return library.call("intern", encoded, len(encoded))

    def launch(self, signature_id: int) -> None:
        """Record an op whose signature was interned before."""
        if self.recording:
            self._add(EventKind.KERNEL, signature_id, 0, 0)

    def host(self, ns: int) -> None:
        """Record host work of a known duration, ns."""
        if self.recording:
            self._add(EventKind.HOST, 0, ns, 0)

    def host_op(self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        """Record work of the host on host tensors, for the cost model to price. ``op`` begins with ``host::``."""
        if self.recording:
            signature = OpSignature(
                op=op,
                inputs=tuple(tensor_spec(t) for t in inputs),
                outputs=tuple(tensor_spec(t) for t in outputs),
            )
            self._add(EventKind.HOST, 1 + self.intern(signature), 0, 0)

    def host_views(self, count: int) -> None:
        """Record that a Python loop makes so many views and keeps them."""
        if self.recording and count:
            signature = OpSignature(op="host::views", scalars=(("count", count),))
            self._add(EventKind.HOST, 1 + self.intern(signature), 0, 0)

    def tag(self, tensor: Tensor, category: MemoryCategory) -> None:
        """Say what the storage behind a tensor is for. No-op off the virtual device."""
        if tensor.is_cuda:
            storage = tensor.untyped_storage()._cdata
            library.call("set_category", storage, CATEGORIES.index(category))
            if self.recording:
                self._tags[library.call("allocation_id", storage)] = category_flag(category)

    def message(self, tensor: Tensor) -> None:
        """Say that a send or receive uses the storage behind a tensor."""
        if not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()._cdata
        library.call("use_in_message", storage)
        if self.recording:
            self._in_messages.add(library.call("allocation_id", storage))

    def _flag_allocations(self, events: np.ndarray) -> None:
        """What tagged allocations of the iteration are for and who else uses them, in the flags of their ALLOC events."""
        size = library.call("used_on_other_streams", None, 0)
        buffer = (ctypes.c_uint32 * size)()
        library.call("used_on_other_streams", buffer, size)
        flags = dict(self._tags)
        for ids, flag in ((buffer, EventFlag.OTHER_STREAM), (self._in_messages, EventFlag.MESSAGE)):
            for allocation in ids:
                flags[allocation] = flags.get(allocation, 0) | int(flag)
        if flags:
            for i in np.flatnonzero(events["kind"] == EventKind.ALLOC).tolist():
                events["flags"][i] = flags.get(int(events["ref"][i]), 0)

    def live_allocations(self) -> list[Allocation]:
        """Device allocations that are live now, in allocation order."""
        size = library.call("live_allocations", None, 0)
        buffer = (ctypes.c_int64 * (3 * size))()
        library.call("live_allocations", buffer, size)
        rows = np.frombuffer(buffer, np.int64).reshape(-1, 3) if size else np.empty((0, 3), np.int64)
        return [Allocation(int(i), int(n), CATEGORIES[c].value) for i, c, n in rows.tolist()]

    def stats(self) -> DeviceStats:
        """State of the current device."""
        device = library.call("get_device")
        memory = memory_counts(device)
        buffer = (ctypes.c_int64 * 8)()
        library.call("counters", buffer)
        ops, computed, hits, misses, _, delayed, _, median_ns = buffer
        late = (ctypes.c_int64 * 2)()
        library.call("late_peaks", device, late)
        return DeviceStats(
            allocated_bytes=memory["allocated_bytes"]["all"]["current"],
            peak_allocated_bytes=peak_bytes(device, "allocated_bytes"),
            reserved_bytes=memory["reserved_bytes"]["all"]["current"],
            peak_reserved_bytes=peak_bytes(device, "reserved_bytes"),
            requested_bytes=memory["requested_bytes"]["all"]["current"],
            peak_requested_bytes=peak_bytes(device, "requested_bytes"),
            num_ooms=memory["num_ooms"],
            num_ops=ops,
            num_computed=computed,
            num_cache_hits=hits,
            num_cache_misses=misses,
            record_ns_per_op=float(median_ns),
            late_peak_active_bytes=late[0],
            late_peak_reserved_bytes=late[1],
            delayed_reuse=delayed,
            synthesized_reads=_tally(0),
            no_cpu_kernel=_tally(1),
            no_meta_kernel=_tally(2),
            dropped=_counts(library.text("native_tally")) if library.is_native() else {},
            host=host_counts(),
        )

    def reset_peaks(self) -> None:
        """Set peak counters to the current values."""
        begin_peaks(library.call("get_device"))
        library.call("reset_host_peaks")

    def _decode_signatures(self) -> list[OpSignature]:
        for i in range(len(self._signatures), library.call("num_signatures")):
            self._signatures.append(msgspec.json.decode(library.text("signature", i), type=OpSignature))
        return list(self._signatures)


def tensor_spec(t: Tensor) -> TensorSpec:
    """Geometry of a tensor."""
    strides = () if t.is_contiguous() else tuple(t.stride())
    return TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), strides)


_recorder: Recorder | None = None


def use_recorder(recorder: Any) -> None:
    """Have :func:`get_recorder` give another recorder of the same interface (a slice on a real GPU has its own)."""
    global _recorder
    _recorder = recorder


def get_recorder() -> Recorder:
    """The recorder of this process. Raises PrismError outside a slice."""
    global _recorder
    if _recorder is None:
        if not library.is_loaded():
            raise PrismError("there is no recorder: this process is not a slice")
        _recorder = Recorder()
    return _recorder


def _tally(which: int) -> dict[str, int]:
    return _counts(library.text("tally", which))


def _counts(lines: str) -> dict[str, int]:
    rows = (line.rsplit("\t", 1) for line in lines.splitlines())
    return {name: int(count) for name, count in rows}
