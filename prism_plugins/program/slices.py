"""What the conductor tells a slice, and what a slice tells the conductor.

Both travel as JSON files in the run directory; the program itself is a separate binary file.
"""

from __future__ import annotations

import msgspec

from prism_plugins.moe_load import BALANCED
from prism_plugins.program.model import SCHEMA, CommSignature, GroupInfo, Phase
from prism_plugins.program.prediction import Finding
from prism_plugins.world.layout import Layout


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a script can ask of ``torch.cuda.get_device_properties``."""

    name: str
    memory_bytes: int
    """``total_memory`` as CUDA reports it, bytes."""
    num_sms: int
    capability: tuple[int, int]
    l2_bytes: int = 50 * 2**20


class SliceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child process needs to run the script as one rank of the target world."""

    schema: int = SCHEMA
    rank: int
    world_size: int
    gpus_per_node: int
    argv: tuple[str, ...]
    """Script path (or module name) and its arguments, prism's flags removed."""
    run_as: str = "script"
    """``script`` (path) or ``module`` (``python -m``)."""
    device: str = "virtual"
    """``virtual``, ``cpu`` or ``cuda``."""
    iterations: int = 3
    """Iterations to run at most; a slice stops earlier once two in a row are equal."""
    gpu: GpuFacts
    slice_dir: str
    """Where this slice writes: report.json, program.npz, journal.json, log.txt."""
    journals: tuple[str, ...] = ()
    """journal.json files of slices that ran before, for control payloads sent by virtual ranks."""
    real_ranks: tuple[int, ...] = ()
    """Ranks that run as processes at the same time; groups inside this set really communicate."""
    store: str = ""
    """host:port of the TCPStore the real ranks share; empty when none do."""
    gpu_memory_bytes: int = 0
    """On ``cuda``: what the process may take of the GPU; 0: all."""
    replay: str = ""
    """plan.json of a replay; empty: the slice measures (or records) instead."""
    moe_load: str = BALANCED
    """Tokens per expert, see :mod:`prism_plugins.moe_load`."""
    apex: bool = False
    """NVIDIA Apex can be imported, on virtual kernels."""


class OptimizerShard(msgspec.Struct, frozen=True, kw_only=True):
    """The parameter fragments one data-parallel rank's optimizer owns, in the order its loops visit them.

    A rank with several optimizers (dense and expert parameters, or a first model chunk stepped apart) has one
    shard in each; they are stepped in the order of ``optimizer``.
    """

    index: int
    """Index along the sharding axis (the rank in the group the optimizer shards over)."""
    fragments: tuple[tuple[int, bool], ...]
    """(number of elements, counted in the gradient norm on tp rank != 0 as well) of each fragment, parameter
    group after parameter group."""
    optimizer: int = 0
    """Position in the chain of optimizers."""
    expert: bool = False
    """Sharded over the data-parallel axis of the experts instead of dp x cp."""
    group_sizes: tuple[int, ...] = ()
    """How many fragments each parameter group has, in order (zeros included); the inner optimizer steps group by
    group. Empty: one group."""
    uncounted: tuple[int, ...] = ()
    """Positions of fragments that no rank counts in the norm (embeddings shared with another stage)."""
    full_precision: tuple[int, ...] = ()
    """Positions of fragments whose model parameter is fp32 and has no separate main copy; visited after the
    others by the loops that copy gradients and parameters, and first in their group everywhere else."""


class PartitionFragment(msgspec.Struct, frozen=True, array_like=True):
    """The stretch of one parameter that lies in a partition of a flat buffer."""

    group: int
    """Parameter group, each with a buffer of its own."""
    parameter: int
    start: int
    """First element, of the parameter."""
    numel: int


class FlatPartitions(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters laid end to end in flat buffers that are cut into equal partitions, one a data-parallel rank."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each parameter, in the order in which the buckets of a :class:`SliceReport` number them."""
    uncounted: tuple[int, ...] = ()
    """Parameters whose gradients the ranks of this slice's role leave out of the gradient norm."""
    sizes: tuple[int, ...]
    """Elements of a partition, by group."""
    owned: tuple[tuple[PartitionFragment, ...], ...]
    """What a rank of each kind (see :attr:`JobFacts.shard_kinds`) owns, in the order of the buffers. What a partition
    has beyond is padding at its end."""


class StageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline stage holds and in which order it works, told by the framework itself."""

    fingerprint: str
    """Equal for two stages that hold the same layers, embedding, loss, …"""
    schedule: tuple[Phase, ...] = ()
    """The phases of one iteration in the order the framework's scheduler runs them on this stage."""
    receives: str = ""
    """The tensors the stage before announced, where stages do; known to slices of this very stage."""
    sends: str = ""
    """The tensors this stage announced to the next one, likewise."""
    layers: int = 0
    """Layers it holds, of all its chunks; 0: unknown."""
    flops_per_token: float = 0.0
    """Model FLOPs a token costs on this stage, likewise; 0: unknown."""


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the lead slice learnt about the job before its first iteration."""

    framework: str
    layout: Layout
    stages: tuple[StageInfo, ...] = ()
    """One per pipeline rank."""
    shards: tuple[OptimizerShard, ...] = ()
    """One per index of the sharding axis for this slice's own stage; empty when optimizer state is replicated."""
    shard_kinds: tuple[tuple[int, ...], ...] = ()
    """Where data-parallel ranks run different programs that are not derived from each other: the sizes, in elements,
    of the parameter fragments that a rank of each kind owns."""
    kind_of: tuple[int, ...] = ()
    """Index into ``shard_kinds`` of each rank of a dp x cp group of this slice's own stage, members ascending. Ranks of
    equal kind run equal programs. Empty: all do."""
    kinds_are_classes: bool = False
    """Kinds differ throughout (ranks that hold more or less loaded experts): each is a class of its own, whose optimizer shards
    may differ in addition."""
    partitions: FlatPartitions | None = None
    """Where the kinds are partitions of flat buffers: what the programs of other kinds are derived from."""
    context_ranks_differ: bool = False
    """Ranks of a context-parallel group run different programs: with causal attention each computes other blocks of the
    sequence."""
    independent_ranks: bool = False
    """Nothing says which ranks run alike (a script without a framework): each is sliced."""
    stage_headers: bool = False
    """A stage tells the next one shapes of what it will send: a slice needs the journal of the stage before it."""
    tokens_per_iteration: int = 0
    samples_per_iteration: int = 0
    model_flops_per_iteration: float = 0.0
    """Of the whole job, by the framework's own formula where it has one."""


class GroupsMade(msgspec.Struct, frozen=True, kw_only=True):
    """Process groups that one line of the script made one after the other."""

    desc: str
    site: str
    count: int
    first: tuple[int, ...]
    """Ranks of the first one (at most 16)."""
    digest: str
    """Of the ranks of all of them."""


class StartupCall(msgspec.Struct, frozen=True, kw_only=True):
    """A collective before the first iteration, ``count`` times in a row."""

    group: str
    group_size: int
    group_digest: str
    """Of the members."""
    call: CommSignature
    """Its ``group`` and ``site`` are blank."""
    site: str
    count: int


class DataLoaderUse(msgspec.Struct, frozen=True, kw_only=True):
    """A ``torch.utils.data.DataLoader`` that the script reads from."""

    site: str
    """Where it begins to be read."""
    num_batches: int


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """What a slice does with process groups before its first iteration, in order."""

    groups: tuple[GroupsMade, ...] = ()
    calls: tuple[StartupCall, ...] = ()
    loaders: tuple[DataLoaderUse, ...] = ()
    num_dropped: int = 0
    """Calls beyond those kept."""


BENCHMARK_VERSION = 1
"""Of :mod:`prism_plugins.host_benchmark`; figures of different versions cannot be compared."""


class HostFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a machine issues work (:mod:`prism_plugins.host_benchmark`); CPU time of the issuing thread, microseconds."""

    version: int
    """:data:`BENCHMARK_VERSION` of then."""
    dispatch_us: tuple[float, ...]
    """A step of a training loop without a device. Of a slice: measured after each iteration."""
    enqueue_us: dict[str, float]
    """A call on the device by kind."""
    in_training: bool = False
    """Measured in a process that trains, after its iterations, as slices do; elsewhere in a process of its own, whose caches and heap
    hold nothing else."""


class ScriptFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What ended a script."""

    message: str
    """One line."""
    traceback: str
    phase: str
    """Where it was."""


class SliceReport(msgspec.Struct, kw_only=True):
    """How a slice went."""

    schema: int = SCHEMA
    rank: int
    status: str
    """``ok``, ``user_error``, ``script_failed``, ``crashed``, ``never_trained``, ``out_of_memory``, ``interrupted``."""
    message: str = ""
    """For anything but ok: one line for the user."""
    traceback: str = ""
    phase: str = ""
    """Where it was when it crashed."""
    facts: JobFacts | None = None
    seconds: float = 0.0
    seconds_per_iteration: tuple[float, ...] = ()
    cpu_seconds_per_iteration: tuple[float, ...] = ()
    """CPU time of the process, all threads."""
    host: HostFigures | None = None
    """How fast the machine was; None where it was not measured."""
    iteration_hashes: tuple[str, ...] = ()
    steady: bool = False
    script_ended: bool = False
    """The script ended by itself after these iterations; otherwise it would have trained on."""
    num_ops: int = 0
    """Device ops (KERNEL events) in the steady iteration."""
    num_comms: int = 0
    record_ns_per_op: float = 0.0
    max_rss_bytes: int = 0
    peak_allocated_bytes: int = 0
    """By the slice's own ledger, over the steady iteration."""
    peak_requested_bytes: int = 0
    """Of that, what was asked for: the allocator gives whole cached blocks that are up to 1 MiB larger."""
    peak_reserved_bytes: int = 0
    allocated_bytes_end: int = 0
    """Live at the end of the steady iteration."""
    late_peak_active_bytes: int = 0
    """The same of a second ledger, in which the GPU is behind the host by all the launches its queue holds, so that blocks which
    other streams use count for so much longer; 0 where there is none (a real GPU, a CUDA build of torch)."""
    late_peak_reserved_bytes: int = 0
    allocator_conf: str = ""
    """``PYTORCH_ALLOC_CONF`` as the slice had it."""
    host_pageable_bytes: int = 0
    """Peak of large host tensors over the steady iteration, pinned ones apart."""
    host_pinned_bytes: int = 0
    """Page-locked by torch's pinned allocator when the steady iteration ends."""
    host_peak_bytes: int = 0
    """Peak of both together since the process began."""
    untouched_bytes: int = 0
    """Peak of host memory that was reserved for large tensors and not touched."""
    synthesized_reads: int = 0
    assumptions: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What the integration found wrong or doubtful about the job."""
    startup: Startup = Startup()
    groups_outside: tuple[GroupInfo, ...] = ()
    """Groups that were used outside of iterations, at start-up or between them; those of very many ranks are left out."""
    timers: tuple[tuple[str, int, int], ...] = ()
    """Spans that the framework's own timers measured in the last iteration: (name, ordinal of the EVENT_RECORD that
    begins it, of the one that ends it)."""
    gradient_buckets: tuple[tuple[int, ...], ...] = ()
    """Parameters whose gradients are reduced together, bucket after bucket of the last iteration; see
    :class:`FlatPartitions`."""
    log_lines: tuple[str, ...] = ()
    """The framework's own per-iteration log lines, as printed."""
    failure: ScriptFailure | None = None
    """The script's own error, after iterations that count (``status`` is ok)."""
    cached: bool = False
