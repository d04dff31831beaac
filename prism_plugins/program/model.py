"""What one rank does in one iteration: the data model every later stage reads.

A :class:`Program` is an event stream (a numpy array, 16 bytes an event) plus the tables its ``ref`` column
points into. The stream is in host issue order. Streams, waits, allocations and phases are events of the same
stream, so order, overlap and memory come from one record.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec
import numpy as np

SCHEMA = 1
"""Version of every file this package writes. A reader refuses a larger number."""


class EventKind(enum.IntEnum):
    """What an event is, and what its ``ref`` and ``value`` mean."""

    KERNEL = 0
    """Device work on ``stream``. ref: index into ``signatures``."""
    COMM = 1
    """A collective or p2p call issued from ``stream``. ref: index into ``comms``; value: work id. Calls with the
    same work id were coalesced (ncclGroupStart/End) and run as one. Runs on the communicator's own stream
    after what ``stream`` holds so far; without ``EventFlag.ASYNC`` the issuing stream waits for it."""
    WORK_WAIT = 2
    """``stream`` waits for a collective (``Work.wait``). ref: work id."""
    EVENT_RECORD = 3
    """A CUDA event is recorded on ``stream``. ref: event id (a new id for every record)."""
    EVENT_WAIT = 4
    """``stream`` waits for a recorded event. ref: event id."""
    EVENT_SYNC = 5
    """The host waits for a recorded event. ref: event id."""
    STREAM_SYNC = 6
    """The host waits for ``stream`` (also: a read-back such as ``.item()``)."""
    DEVICE_SYNC = 7
    """The host waits for every stream."""
    ALLOC = 8
    """Device memory is requested. ref: allocation id (unique in the slice); value: requested bytes. flags: what it is
    for, where an integration told (:func:`category_flag`), and :attr:`EventFlag.OTHER_STREAM`, :attr:`EventFlag.MESSAGE`."""
    FREE = 9
    """Device memory is released. ref: allocation id."""
    PHASE_BEGIN = 10
    """ref: index into ``phases``. Phases do not nest."""
    PHASE_END = 11
    """ref: index into ``phases``."""
    HOST = 12
    """Host work. value: nanoseconds that are known. ref: 0, or 1 + index into ``signatures`` of work that the cost
    model prices as well (its op begins with ``host::``)."""


class EventFlag(enum.IntFlag):
    """Bits of the ``flags`` column."""

    ASYNC = 1
    """COMM: the caller got a Work and the issuing stream does not wait yet."""
    SYNTHESIZED = 2
    """STREAM_SYNC: the value read back was synthesized, not computed."""
    OTHER_STREAM = 64
    """ALLOC: another stream than the allocation's uses it (``record_stream``, or autograd on a stream of its own), so the
    caching allocator reuses it only when that stream has come to the release."""
    MESSAGE = 128
    """ALLOC: a send or receive uses it; NCCL's stream then counts as such another stream."""


EVENT_DTYPE = np.dtype(
    [("kind", "<u1"), ("flags", "<u1"), ("stream", "<u2"), ("ref", "<u4"), ("value", "<i8")]
)

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Geometry of a tensor argument: torch's dtype name, shape, and strides in elements (empty: contiguous)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of the storage behind a view)."""
        return self.numel * DTYPE_BYTES[self.dtype]


class OpSignature(msgspec.Struct, frozen=True, kw_only=True):
    """A distinct device op: everything its cost depends on."""

    op: str
    """Qualified name with overload, e.g. ``aten::mm`` or ``aten::add.Tensor``; ``prism::fused`` for a compiled region."""
    inputs: tuple[TensorSpec, ...] = ()
    """Tensor arguments in schema order, tensor lists flattened."""
    outputs: tuple[TensorSpec, ...] = ()
    scalars: tuple[tuple[str, int | float | bool | str | tuple[int, ...] | None], ...] = ()
    """Non-tensor arguments that matter, by schema name."""
    attrs: dict[str, int | float | str] = {}
    """For fused ops: ``name``, ``flops``, ``read_bytes``, ``write_bytes``; free otherwise."""

    def problem(self) -> str:
        """What no op has, an unknown dtype or a size that cannot be; empty where all is well."""
        for t in (*self.inputs, *self.outputs):
            if t.dtype not in DTYPE_BYTES:
                return f"{self.op[:60]} has the unknown dtype {t.dtype[:20]!r}"
            if not all(0 <= n < 1 << 48 for n in t.shape):
                return f"{self.op[:60]} has the shape {t.shape[:8]}"
            if len(t.strides) not in (0, len(t.shape)) or not all(0 <= n < 1 << 48 for n in t.strides):
                return f"{self.op[:60]} has the shape {t.shape[:8]} with the strides {t.strides[:8]}"
        return ""


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as the script made it."""

    ranks: tuple[int, ...]
    """Global ranks in group-rank order."""
    name: str
    """torch's ``group_name``."""
    desc: str = ""
    """torch's ``group_desc``, e.g. ``TENSOR_MODEL_PARALLEL_GROUP``."""
    backend: str = "nccl"
    """The backend the script asked for."""

    @property
    def label(self) -> str:
        """What it is called where its ranks are not listed; torch calls groups without a description ``undefined``."""
        return self.desc if self.desc not in ("", "undefined") else f"a group of {len(self.ranks)} ranks"


class CommSignature(msgspec.Struct, frozen=True, kw_only=True):
    """A distinct collective or p2p call."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier."""
    group: int
    """Index into ``Program.groups``."""
    dtype: str = ""
    in_numel: int = 0
    """Elements this rank contributes (all_gather: its shard; reduce_scatter: the full input)."""
    out_numel: int = 0
    """Elements this rank receives (all_gather: the full output; reduce_scatter: its shard)."""
    peer: int = -1
    """Group rank of the root (broadcast, reduce, gather, scatter) or of the other side (send, recv)."""
    reduce_op: str = ""
    send_splits: tuple[int, ...] = ()
    """all_to_all with uneven splits: elements sent to each member; empty when even."""
    recv_splits: tuple[int, ...] = ()
    site: str = ""
    """``path:line`` of the call in the script or its framework; empty where it is not known."""

    @property
    def nbytes(self) -> int:
        """Message size in the convention of nccl-tests: the larger of input and output."""
        return max(self.in_numel, self.out_numel) * DTYPE_BYTES.get(self.dtype, 0)


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A named stretch of the iteration.

    ``kind`` is ``forward``, ``backward``, a p2p method of the pipeline scheduler (``recv_forward``,
    ``send_forward_recv_backward``, …), ``grad_sync``, ``optimizer`` or another name an integration chose.
    ``parts`` names what the phase does independent of the stage it runs on: ``(("send_forward", 2),
    ("recv_backward", 0))`` is the third forward send and the first backward receive of this stage. The
    ordinals are equal on all stages, which is what lets one captured stage stand for another.
    """

    kind: str
    microbatch: int = -1
    chunk: int = -1
    parts: tuple[tuple[str, int], ...] = ()


class MemoryCategory(enum.StrEnum):
    """What a live allocation is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication_buffers"
    WORKSPACE = "workspace"
    TEMPORARY = "temporary"
    OTHER = "other"


_CATEGORY_SHIFT = 2  # beside the bits of EventFlag
_CATEGORIES = tuple(MemoryCategory)


def category_flag(category: MemoryCategory) -> int:
    """The ``flags`` of an ALLOC event whose memory is known to be for ``category``."""
    return _CATEGORIES.index(category) + 1 << _CATEGORY_SHIFT


def category_of_flag(flags: int) -> MemoryCategory | None:
    """The category in the ``flags`` of an ALLOC event; None where nobody told."""
    number = (flags & ~(EventFlag.OTHER_STREAM | EventFlag.MESSAGE)) >> _CATEGORY_SHIFT
    return _CATEGORIES[number - 1] if number else None


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """An allocation that is live when the iteration begins."""

    id: int
    nbytes: int
    """Requested bytes; the caching allocator's rounding is applied by the memory stage."""
    category: str = MemoryCategory.OTHER


class Program(msgspec.Struct, kw_only=True):
    """One steady iteration of one rank. See the module docstring."""

    rank: int
    events: np.ndarray
    """Shape (num_events,), dtype :data:`EVENT_DTYPE`."""
    signatures: list[OpSignature]
    comms: list[CommSignature]
    groups: list[GroupInfo]
    phases: list[Phase]
    initial: list[Allocation]
    """Live at the start of the iteration, in allocation order."""
    source: str = "sliced"
    """``sliced``, ``inferred`` (same class, other members) or ``derived`` (other schedule or shard)."""

    def iter_phases(self) -> Iterator[tuple[Phase, int, int]]:
        """Yield (phase, index of its PHASE_BEGIN, index of its PHASE_END) in order."""
        kind = self.events["kind"]
        begins = int(EventKind.PHASE_BEGIN)
        at = np.flatnonzero((kind == begins) | (kind == EventKind.PHASE_END))
        begin = -1
        for i, what, ref in zip(at.tolist(), kind[at].tolist(), self.events["ref"][at].tolist(), strict=True):
            if what == begins:
                begin = i
            else:
                yield self.phases[ref], begin, i
