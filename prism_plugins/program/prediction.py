"""The prediction: what ``prediction.json`` holds. Keys are stable; additions do not change the schema number."""

from __future__ import annotations

import msgspec

from prism_plugins.program.model import SCHEMA
from prism_plugins.program.replay import ReplaySummary


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank that was sliced, by its own ledger; fields as in :class:`ClassMemory`."""

    rank: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes_end: int
    device_used_bytes: int


class ClassMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the ranks of one class over a steady iteration, bytes: of the rank that has most."""

    ranks: str
    """Compact list, e.g. ``0-7,64-71``."""
    name: str
    peak_allocated_bytes: int
    """As ``torch.cuda.max_memory_allocated``: caching-allocator blocks in use."""
    peak_reserved_bytes: int
    """As ``torch.cuda.max_memory_reserved``."""
    allocated_bytes_end: int
    """Allocated when the iteration ends."""
    device_used_bytes: int
    """Reserved plus CUDA context, cuBLAS and NCCL buffers: what nvidia-smi shows."""
    capacity_bytes: int
    held_back_bytes: int = 0
    """By how much blocks in use and blocks held back for other streams (``active`` in ``torch.cuda.memory_stats``) peak above
    ``peak_allocated_bytes``."""
    peak_phase: str
    by_category: dict[str, int]
    """Requested bytes live at the peak, by :class:`MemoryCategory`."""
    outside_torch: dict[str, int] = {}
    """What the device holds beside the allocator: ``cuda_context``, ``libraries``, ``nccl`` (once per process) and
    ``nccl <group>`` for each communicator. With ``peak_reserved_bytes`` they sum to ``device_used_bytes``."""
    sliced: tuple[RankMemory, ...] = ()
    """Ranks of the class with a ledger of their own."""


class CommunicatorStart(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL communicators that a rank opens for its iterations: of the class that takes longest for it."""

    ranks: str
    count: int
    memory_bytes: int
    """Outside torch's allocator."""
    init_seconds: float
    """Estimated from measured and published figures: an order of magnitude (``costs/communicator_init.py``)."""
    not_priced: int
    """Communicators of sizes for which no figure is known; not part of ``init_seconds``."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of the large tensors of one node's ranks, bytes: the node with most. What else its processes hold
    (libraries, data sets, small tensors) comes on top."""

    pinned_bytes: int
    """Page-locked: torch's pinned allocator rounds sizes up to powers of two and keeps what is freed."""
    pageable_bytes: int
    """Peak over a steady iteration."""
    peak_bytes: int
    """Peak of both since the processes began, as if all of them had it at once."""
    capacity_bytes: int
    untouched_bytes: int
    """Reserved by the slice with most and never touched: what the emulation did without."""


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the iteration of the slowest rank goes; the parts sum to the iteration time, ms."""

    compute: float
    exposed_communication: float
    bubble: float
    """Idle while waiting for another pipeline stage."""
    host: float
    """Device idle because the host had not launched yet."""
    optimizer: float
    """Compute inside the optimizer phase."""


class SliceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One slice."""

    rank: int
    seconds: float
    ops: int
    collectives: int
    cached: bool


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One symmetry class."""

    name: str
    ranks: str
    num_ranks: int
    representative: int
    source: str
    """sliced, inferred or derived."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something the user should know before booking the cluster."""

    kind: str
    """oom, unpriced, hang, layout, audit, …"""
    severity: str
    """error (the job would not run), warning or info."""
    ranks: str = ""
    """Compact list; empty: the whole job."""
    phase: str = ""
    message: str


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """``--prism-audit``: ranks sliced only to be compared with their inferred program."""

    ranks: tuple[int, ...] = ()
    matched: int = 0
    approximated: tuple[int, ...] = ()
    """Of these, the ranks whose program is a similar rank's; they match if communication and phases do."""
    differing_ops: int = 0
    """Most device ops in which an approximated rank differs."""
    peak_error: float = 0.0
    """Largest error of an approximated rank's peak memory, as a fraction."""


class Opportunity(msgspec.Struct, frozen=True, kw_only=True):
    """Something that costs time, and what an iteration without it would save."""

    what: str
    advice: str
    """What usually helps."""
    gain_ms: float
    """Of the iteration time, if it cost nothing: an upper bound of what a change can bring."""
    method: str
    """How the gain was found: ``re-simulated`` without it, its time on the ``critical path``, or the slowest rank's
    ``breakdown``."""


class ExpectedError(msgspec.Struct, frozen=True, kw_only=True):
    """How far the iteration time may be off, from the errors that were measured for its parts."""

    fraction: float | None = None
    """Sum over the slowest rank's time of the median error of what priced it; None where too much of it was never
    compared with a measurement."""
    basis: str = ""
    """Where it comes from, or why there is none."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring."""

    schema: int = SCHEMA
    framework: str
    world_size: int
    layout: dict[str, int]
    """tp, pp, vpp, cp, ep, etp, dp."""
    num_microbatches: int
    cluster: str
    device: str
    cost_model: str
    iteration_time_ms: float
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None = None
    """Model FLOP/s over the data sheet's dense bf16 peak, a fraction; None where either is unknown."""
    expected_error: ExpectedError = ExpectedError()
    exposed_communication_ms: dict[str, float] = {}
    """By the parallel dimensions of the group (``tp``, ``dp``, …): transfers of the slowest rank beside which it computes
    nothing. Transfers of two groups at once count for both; waiting for other members does not count."""
    opportunities: tuple[Opportunity, ...] = ()
    """Largest gain first."""
    samples_per_s: float | None = None
    """Of the whole job, where the framework told the batch size."""
    timers_ms: dict[str, tuple[float, ...]] = {}
    """What the framework's own timers would show on the rank that prints its log, by name, once per use in an
    iteration."""
    logging_rank: int = -1
    """The rank whose log lines ``predicted.log`` holds; -1 for none."""
    breakdown_ms: Breakdown
    slowest_rank: int
    memory: tuple[ClassMemory, ...]
    communicators: CommunicatorStart | None = None
    """None when no rank communicates."""
    host_memory: HostMemory | None = None
    """None when no rank has large host tensors."""
    slices: tuple[SliceSummary, ...]
    classes: tuple[ClassSummary, ...]
    findings: tuple[Finding, ...]
    unpriced_ops: dict[str, int]
    """Op name → occurrences per iteration over the classes' exemplars."""
    synthesized_reads: int
    assumptions: tuple[str, ...]
    replay: tuple[ReplaySummary, ...] = ()
    """Ranks that ran again on a real GPU among timed virtual peers."""
    audit: Audit
    simulate_seconds: float
