"""Memory of one rank over a steady iteration: peak, reserved, what is live at the peak, what else the GPU holds.

Everything is computed from a :class:`~prism_plugins.program.model.Program`: the allocations live at its start and
its ALLOC and FREE events. The caching allocator is emulated block by block
(:mod:`prism_plugins.program.memory_allocator`), over the iteration twice: the second pass starts from the segments
the first one left behind, as a steady iteration does.

Limits: reserved memory in a real job also remembers how the model was built and the first iterations (their
fragmentation); an emulation from the live allocations alone can be below it.

Blocks that other streams use are held back after their release for as long as the GPU is behind the host: slices count
reserved memory also for a GPU that is behind as far as it can be, and the simulated times tell how far it is
(:mod:`prism_plugins.program.memory_release`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from prism_plugins.program.allocator_settings import AllocatorSettings, parse_settings
from prism_plugins.program.job import RankClass
from prism_plugins.program.memory_allocator import AllocatorUse, CachingAllocator, block_bytes
from prism_plugins.program.memory_device import (
    CommunicatorUse,
    DeviceOverhead,
    communicators,
    with_groups_outside,
)
from prism_plugins.program.memory_release import IssueTimes, held_blocks
from prism_plugins.program.model import (
    EventKind,
    GroupInfo,
    MemoryCategory,
    Phase,
    Program,
    category_of_flag,
)
from prism_plugins.program.prediction import ClassMemory, Finding, RankMemory
from prism_plugins.program.slices import SliceReport

GIB = 2**30
_CLOSE_TO_CAPACITY = 0.95


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one program, bytes. The fields are those of :class:`ClassMemory` that a program determines."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes_end: int
    device_used_bytes: int
    peak_phase: str
    by_category: dict[str, int]
    outside_torch: dict[str, int]


def memory_of_classes(
    classes: Sequence[RankClass],
    *,
    ranks: Sequence[str],
    capacity_bytes: int,
    ledgers: Mapping[int, SliceReport] | None = None,
    overhead: DeviceOverhead | None = None,
    init_communicators: int = 1,
    nvls_groups: Callable[[Program], Collection[int]] = lambda _: (),
    held_of: Callable[[RankClass], int] = lambda _: 0,
) -> tuple[ClassMemory, ...]:
    """Memory of the ranks of every class: its exemplar, raised to the largest of its variants and sliced ranks.

    Where a slice ran the exemplar, its own allocator saw the job from the start: allocated and reserved bytes are
    then the slice's. A class derived from another one's slice is emulated, and corrected by what emulation missed
    there (fragmentation that dates from before the iteration).

    Args:
        classes: The classes.
        ranks: The ranks of each class as text, for the report.
        capacity_bytes: Memory of the GPU as CUDA reports it.
        ledgers: Reports of slices, by rank.
        overhead: What CUDA, libraries and NCCL take.
        init_communicators: Communicators that no iteration uses but start-up did (the world group's).
        nvls_groups: Indices of the groups of a program in which a collective takes NVLS.
        held_of: Bytes that a class's ranks hold back at most (:func:`held_back_bytes`).
    """
    ledgers = ledgers or {}
    uses = [
        memory_of_program(
            c.exemplar,
            overhead=overhead,
            init_communicators=init_communicators,
            nvls_groups=nvls_groups(c.exemplar),
            settings=_settings(ledgers.get(c.representative)),
            groups_outside=groups_outside(c, ledgers),
        )
        for c in classes
    ]
    missed = {
        c.representative: _missed_by_emulation(use, ledgers[c.representative])
        for c, use in zip(classes, uses, strict=True)
        if c.exemplar.source != "derived" and c.representative in ledgers
    }
    return tuple(
        _class_memory(
            c,
            text,
            _corrected(use, missed.get(c.representative, _NOTHING_MISSED)),
            capacity_bytes,
            held_of(c),
            ledgers,
        )
        for c, text, use in zip(classes, ranks, uses, strict=True)
    )


def groups_outside(rank_class: RankClass, ledgers: Mapping[int, SliceReport]) -> tuple[GroupInfo, ...]:
    """Groups that the class's exemplar used outside of iterations; nothing where it was not sliced itself."""
    ledger = ledgers.get(rank_class.exemplar.rank)
    return ledger.groups_outside if ledger is not None else ()


def communicators_of(
    rank_class: RankClass,
    ledgers: Mapping[int, SliceReport],
    *,
    gpus_per_domain: int,
    nvls_groups: Collection[int] = (),
) -> tuple[CommunicatorUse, ...]:
    """The communicators of a class: of its iteration, and those that it used outside of it alone."""
    used = communicators(rank_class.exemplar, gpus_per_domain=gpus_per_domain, nvls_groups=nvls_groups)
    return with_groups_outside(used, groups_outside(rank_class, ledgers))


def _settings(ledger: SliceReport | None) -> AllocatorSettings:
    return parse_settings(ledger.allocator_conf) if ledger is not None else AllocatorSettings()


def _reserved_for_held_back(held_bytes: int, ledger: SliceReport | None) -> int:
    """By how much more is reserved because that many bytes are held back at most. It is between the slice's two ledgers,
    where nothing is held back and where the GPU is behind as far as it can be, as the peaks of what is held back are."""
    if not held_bytes or ledger is None:
        return 0
    most = ledger.late_peak_active_bytes - ledger.peak_allocated_bytes
    more = max(0, ledger.late_peak_reserved_bytes - ledger.peak_reserved_bytes)
    return round(more * min(1.0, held_bytes / most)) if most > 0 else 0


class _Missed(NamedTuple):
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes_end: int


_NOTHING_MISSED = _Missed(0, 0, 0)


def _missed_by_emulation(use: MemoryUse, ledger: SliceReport) -> _Missed:
    if not ledger.peak_reserved_bytes:
        return _NOTHING_MISSED
    return _Missed(*(getattr(ledger, field) - getattr(use, field) for field in _Missed._fields))


def _corrected(use: MemoryUse, missed: _Missed) -> MemoryUse:
    peak = use.peak_allocated_bytes + missed.peak_allocated_bytes
    reserved = max(use.peak_reserved_bytes + missed.peak_reserved_bytes, peak)
    return msgspec.structs.replace(
        use,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        allocated_bytes_end=use.allocated_bytes_end + missed.allocated_bytes_end,
        device_used_bytes=use.device_used_bytes + reserved - use.peak_reserved_bytes,
    )


def _class_memory(
    rank_class: RankClass,
    ranks: str,
    use: MemoryUse,
    capacity_bytes: int,
    held_bytes: int,
    ledgers: Mapping[int, SliceReport],
) -> ClassMemory:
    """The largest of its ranks: sliced ones by their own ledgers. Optimizer shards have nearly equal sizes, and making a
    variant is dear: the first, the last and the one that is known as the heaviest stand for all that were not sliced."""
    outside = use.device_used_bytes - use.peak_reserved_bytes
    sliced = tuple(
        RankMemory(
            rank=rank,
            peak_allocated_bytes=ledger.peak_allocated_bytes,
            peak_reserved_bytes=(
                reserved := ledger.peak_reserved_bytes + _reserved_for_held_back(held_bytes, ledger)
            ),
            allocated_bytes_end=ledger.allocated_bytes_end,
            device_used_bytes=reserved + outside,
        )
        for rank, ledger in sorted(ledgers.items())
        if ledger.peak_reserved_bytes and rank in rank_class.ranks
    )
    keys = sorted(rank_class.variants.keys() - ledgers.keys())
    looked_at = {*keys[:1], *keys[-1:], rank_class.heaviest} & {*keys}
    base = int(allocated_curve(rank_class.exemplar).max(initial=0)) if keys else 0
    peaks = [int(allocated_curve(rank_class.variants[key]).max(initial=0)) for key in looked_at]
    extra = max(0, max(peaks, default=0) - base)
    reserved = use.peak_reserved_bytes + extra
    reserved += _reserved_for_held_back(held_bytes, ledgers.get(rank_class.representative))
    reserved = max(reserved, *(s.peak_reserved_bytes for s in sliced), 0)
    return ClassMemory(
        ranks=ranks,
        name=rank_class.name,
        peak_allocated_bytes=max(
            use.peak_allocated_bytes + extra, *(s.peak_allocated_bytes for s in sliced), 0
        ),
        peak_reserved_bytes=reserved,
        allocated_bytes_end=max(use.allocated_bytes_end, *(s.allocated_bytes_end for s in sliced), 0),
        device_used_bytes=reserved + outside,
        held_back_bytes=held_bytes,
        capacity_bytes=capacity_bytes,
        peak_phase=use.peak_phase,
        by_category=use.by_category,
        outside_torch=use.outside_torch,
        sliced=sliced,
    )


def memory_of_program(
    program: Program,
    *,
    overhead: DeviceOverhead | None = None,
    init_communicators: int = 1,
    nvls_groups: Collection[int] = (),
    settings: AllocatorSettings | None = None,
    groups_outside: Iterable[GroupInfo] = (),
    passes: int = 2,
) -> MemoryUse:
    """Memory of one program over a steady iteration: the last of ``passes`` in a row, starting from an allocator
    that holds the initial allocations and nothing else. See :func:`memory_of_classes` for the other arguments."""
    overhead = overhead or DeviceOverhead()
    rows, steady = _emulate(program, passes=passes, settings=settings or AllocatorSettings())
    peak_row = int(rows[steady.peak_index]) if len(rows) else -1
    uses = with_groups_outside(
        communicators(program, gpus_per_domain=overhead.gpus_per_domain, nvls_groups=nvls_groups),
        groups_outside,
    )
    outside = overhead.parts(uses, init_communicators=init_communicators)
    return MemoryUse(
        peak_allocated_bytes=steady.peak_allocated_bytes,
        peak_reserved_bytes=steady.reserved_bytes,
        allocated_bytes_end=steady.allocated_bytes_end,
        device_used_bytes=steady.reserved_bytes + sum(outside.values()),
        peak_phase=phase_at(program, peak_row),
        by_category=categories_at(program, peak_row),
        outside_torch=outside,
    )


def allocated_curve(program: Program) -> np.ndarray:
    """Bytes allocated after each event, in 512-byte blocks, shape (num_events,), int64. A lower bound of what the
    caching allocator counts, which leaves the rest of a large block unsplit when it is 1 MiB or less."""
    events = program.events
    delta = np.zeros(len(events), np.int64)
    ids, sizes = _requests(program)
    blocks = block_bytes(sizes)
    allocs = np.flatnonzero(events["kind"] == EventKind.ALLOC)
    delta[allocs] = blocks[len(program.initial) :]
    frees = np.flatnonzero(events["kind"] == EventKind.FREE)
    ordinals = _ordinals_of(ids, events["ref"][frees].astype(np.int64))
    known = ordinals >= 0
    delta[frees[known]] = -blocks[ordinals[known]]
    return int(blocks[: len(program.initial)].sum()) + np.cumsum(delta)


def held_back_bytes(program: Program, times: IssueTimes) -> int:
    """By how much blocks in use and blocks held back for other streams together peak above blocks in use."""
    held = held_blocks(program, times)
    if not held:
        return 0
    in_use = allocated_curve(program)
    change = np.zeros(len(program.events), np.int64)
    alloc, release, reusable = np.array(held).T
    sizes = block_bytes(program.events["value"][alloc])
    np.add.at(change, release, sizes)
    np.subtract.at(change, reusable - 1, sizes)
    return int((in_use + np.cumsum(change)).max() - in_use.max())


def phase_at(program: Program, row: int) -> str:
    """The phase event ``row`` lies in, as text; empty outside of phases."""
    phase = _phase_index(program)[row] if 0 <= row < len(program.events) else -1
    return describe_phase(program.phases[phase]) if phase >= 0 else ""


def describe_phase(phase: Phase) -> str:
    """``forward micro-batch 3 chunk 1``."""
    text = phase.kind
    if phase.microbatch >= 0:
        text += f" micro-batch {phase.microbatch}"
    if phase.chunk > 0:
        text += f" chunk {phase.chunk}"
    return text


def categories_at(program: Program, row: int) -> dict[str, int]:
    """Requested bytes live after event ``row`` (-1: before the first), by :class:`MemoryCategory`.

    What was live at the start keeps its tag, and so does an allocation of the iteration that an integration tagged.
    Any other is ``temporary`` if its own phase frees it, a communication buffer if a send/receive phase made it, ``other`` if the optimizer or the gradient
    synchronisation made it and keeps it, else an activation.
    """
    found = category_of_allocations(program, row)
    totals = np.zeros(len(CATEGORIES), dtype=np.int64)
    np.add.at(totals, found.category, found.nbytes)
    used = np.unique(found.category)
    return {CATEGORIES[i]: int(totals[i]) for i in used[np.argsort(-totals[used], kind="stable")].tolist()}


CATEGORIES = tuple(category.value for category in MemoryCategory)
_CODES = {name: code for code, name in enumerate(CATEGORIES)}


class Allocations(NamedTuple):
    """Allocations of a program: initial ones first, then those of the iteration in order; arrays of one length."""

    category: np.ndarray
    """Index into :data:`CATEGORIES`."""
    nbytes: np.ndarray
    """Requested."""
    born: np.ndarray
    """Row of the event; -1 for what was live at the start."""
    died: np.ndarray
    """Row of its FREE; the number of events for what stays."""


def category_of_allocations(program: Program, live_after: int | None = None) -> Allocations:
    """All allocations with their category, or those live after event ``live_after``; see :func:`categories_at`."""
    events = program.events
    ids, sizes = _requests(program)
    num_initial = len(program.initial)
    born = np.concatenate(
        [np.full(num_initial, -1), np.flatnonzero(events["kind"] == EventKind.ALLOC)]
    ).astype(np.int64)
    died = np.full(len(ids), len(events), np.int64)
    frees = np.flatnonzero(events["kind"] == EventKind.FREE)
    ordinals = _ordinals_of(ids, events["ref"][frees].astype(np.int64))
    died[ordinals[ordinals >= 0]] = frees[ordinals >= 0]
    chosen = np.arange(len(ids))
    if live_after is not None:
        chosen = np.flatnonzero((born <= live_after) & (died > live_after))
    initial = chosen[chosen < num_initial]
    later = chosen[chosen >= num_initial]
    held = np.array([_CODES[program.initial[i].category] for i in initial.tolist()], dtype=np.int64)
    category = np.concatenate([held, _categories(program, born[later], died[later])])
    return Allocations(category, sizes[chosen], born[chosen], died[chosen])


def memory_findings(classes: Iterable[ClassMemory], *, data_parallel: int = 1) -> list[Finding]:
    """A finding for every class that does not fit its GPU, or hardly. ``data_parallel``: ranks over which state can be sharded."""
    findings = []
    for memory in classes:
        outside = memory.device_used_bytes - memory.peak_reserved_bytes
        live = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in memory.by_category.items() if size >= GIB // 20
        )
        where = f" during {memory.peak_phase}" if memory.peak_phase else ""
        need = memory.peak_allocated_bytes + outside
        comfortable = int(_CLOSE_TO_CAPACITY * memory.capacity_bytes)
        room = f"of {memory.capacity_bytes / GIB:.1f} GiB ({outside / GIB:.1f} GiB of it CUDA and NCCL)"
        if need > memory.capacity_bytes:
            severity = "error"
            cached = memory.device_used_bytes - need
            unused = (
                f", {memory.device_used_bytes / GIB:.1f} with the allocator's unused blocks"
                if cached > GIB // 20
                else ""
            )
            text = f"out of memory: {memory.name} needs {need / GIB:.1f} GiB {room}{unused}{where}; live GiB: {live}"
        elif memory.device_used_bytes > memory.capacity_bytes:
            severity = "warning"
            text = (
                f"borderline: {memory.name} fits only after the allocator returns cached blocks: "
                f"{memory.device_used_bytes / GIB:.1f} GiB {room}{where}; expandable segments may help"
            )
        elif memory.device_used_bytes > comfortable:
            severity = "warning"
            text = (
                f"borderline: {memory.name} hardly fits: {memory.device_used_bytes / GIB:.1f} GiB {room}{where}, "
                f"{(memory.capacity_bytes - memory.device_used_bytes) / GIB:.1f} GiB are left for fragmentation"
            )
        else:
            continue
        limit = memory.capacity_bytes if severity == "error" else comfortable
        used = need if severity == "error" else memory.device_used_bytes
        text += _knobs(memory, used - limit, data_parallel)
        findings.append(
            Finding(kind="oom", severity=severity, ranks=memory.ranks, phase=memory.peak_phase, message=text)
        )
    return findings


_KNOBS = {
    MemoryCategory.ACTIVATIONS: "recompute activations, use a smaller micro-batch, or more tensor or pipeline parallelism",
    MemoryCategory.OPTIMIZER_STATE: "shard the optimizer over data-parallel ranks (distributed optimizer, ZeRO-1), or offload it",
    MemoryCategory.GRADIENTS: "shard gradients (ZeRO-2), or use more tensor or pipeline parallelism",
    MemoryCategory.PARAMETERS: "use more tensor or pipeline parallelism, or shard parameters (ZeRO-3)",
}
_KNOBS_OF_ONE = _KNOBS | {
    MemoryCategory.OPTIMIZER_STATE: "offload the optimizer, or use more tensor or pipeline parallelism",
    MemoryCategory.GRADIENTS: "use more tensor or pipeline parallelism",
    MemoryCategory.PARAMETERS: "use more tensor or pipeline parallelism",
}
"""Where there is one data-parallel rank: nothing to shard over."""


def _knobs(memory: ClassMemory, excess: int, data_parallel: int) -> str:
    """What lowers the largest part that has a remedy, or the largest ones if one alone does not hold as much as has to go."""
    remedies = _KNOBS if data_parallel > 1 else _KNOBS_OF_ONE
    held = {name: size for name, size in memory.by_category.items() if name in remedies}
    chosen: list[str] = []
    for name in sorted(held, key=lambda name: -held[name]):
        if sum(held[other] for other in chosen) >= excess:
            break
        chosen.append(name)
    if not chosen:
        return ""
    parts = " and ".join(f"{name.replace('_', ' ')} {held[name] / GIB:.1f}" for name in chosen)
    how = "; and ".join(remedies[name] for name in chosen)
    return f"; {excess / GIB:.1f} GiB have to go, the largest parts with a remedy hold {parts}: {how}"


def _emulate(
    program: Program, *, passes: int, settings: AllocatorSettings
) -> tuple[np.ndarray, AllocatorUse]:
    """Rows of the ALLOC and FREE events, and what the allocator did over them in the last pass."""
    events = program.events
    ids, requested = _requests(program)
    num_initial = len(program.initial)
    rows = np.flatnonzero((events["kind"] == EventKind.ALLOC) | (events["kind"] == EventKind.FREE))
    is_alloc = events["kind"][rows] == EventKind.ALLOC
    blocks = block_bytes(requested, settings)
    sizes = np.full(len(rows), -1, np.int64)
    sizes[is_alloc] = blocks[num_initial:]
    targets = np.full(len(rows), -1, np.int64)
    targets[~is_alloc] = _ordinals_of(ids, events["ref"][rows[~is_alloc]].astype(np.int64))
    streams = events["stream"][rows].astype(np.int64)
    begins = np.flatnonzero(events["kind"] == EventKind.PHASE_BEGIN)
    boundaries = np.unique(np.searchsorted(rows, begins))

    allocator = CachingAllocator(settings)
    initial = blocks[:num_initial]
    use = allocator.run(initial, np.full(num_initial, -1), np.zeros(num_initial, np.int64))
    renewed_by = _renewals(blocks, targets[~is_alloc], num_initial)
    per_pass = int(is_alloc.sum())
    inside = targets >= num_initial
    for index in range(passes):
        shifted = np.where(inside, targets + index * per_pass, targets)
        if index:
            old = np.flatnonzero((targets >= 0) & ~inside)
            shifted[old] = [renewed_by.get(t, -1) for t in targets[old].tolist()]
            shifted[old] += np.where(shifted[old] >= 0, (index - 1) * per_pass, 0)
        use = allocator.run(sizes, shifted, streams, boundaries)
    return rows, use


def _renewals(blocks: np.ndarray, freed: np.ndarray, num_initial: int) -> dict[int, int]:
    """What takes the place of an initial allocation that the iteration frees: ordinal → ordinal of an allocation
    of the same size that the iteration keeps, in order."""
    kept: dict[int, list[int]] = {}
    freed_set = set(freed.tolist())
    for ordinal in range(len(blocks) - 1, num_initial - 1, -1):
        if ordinal not in freed_set:
            kept.setdefault(int(blocks[ordinal]), []).append(ordinal)
    renewed = {}
    for ordinal in freed.tolist():
        if 0 <= ordinal < num_initial:
            same_size = kept.get(int(blocks[ordinal]))
            if same_size:
                renewed[ordinal] = same_size.pop()
    return renewed


def _requests(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Allocation ids and requested bytes: the initial ones, then those of the iteration, in order."""
    allocs = program.events[program.events["kind"] == EventKind.ALLOC]
    ids = np.concatenate(
        [np.array([a.id for a in program.initial], np.int64), allocs["ref"].astype(np.int64)]
    )
    sizes = np.concatenate(
        [np.array([a.nbytes for a in program.initial], np.int64), allocs["value"].astype(np.int64)]
    )
    return ids, sizes


def _ordinals_of(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Position of each wanted id in ``ids``; -1 where it is absent."""
    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    found = order[at]
    return np.where(ids[found] == wanted, found, -1)


def _phase_index(program: Program) -> np.ndarray:
    """Index of the phase each event lies in, -1 outside, shape (num_events,)."""
    kind = program.events["kind"]
    marks = np.flatnonzero((kind == EventKind.PHASE_BEGIN) | (kind == EventKind.PHASE_END))
    value = np.where(kind[marks] == EventKind.PHASE_BEGIN, program.events["ref"][marks].astype(np.int64), -1)
    lengths = np.diff(np.concatenate(([0], marks, [len(kind)])))
    return np.repeat(np.concatenate(([-1], value)), lengths)


def _categories(program: Program, born: np.ndarray, died: np.ndarray) -> np.ndarray:
    """Category (its code) of allocations of the iteration by the rows of their ALLOC and FREE, shape (n,) each."""
    phase_of = _phase_index(program)
    phase = phase_of[born]
    p2p, late = (
        np.array([test(p.kind) for p in program.phases] + [False])[phase]
        for test in (
            lambda kind: kind.startswith(("recv", "send")),
            lambda kind: kind in ("optimizer", "grad_sync"),
        )
    )
    freed_in = np.append(phase_of, -2)[died]
    untold = np.where(
        p2p,
        _CODES[MemoryCategory.COMMUNICATION],
        np.where(
            freed_in == phase,
            _CODES[MemoryCategory.TEMPORARY],
            np.where(late, _CODES[MemoryCategory.OTHER], _CODES[MemoryCategory.ACTIVATIONS]),
        ),
    )
    flags = program.events["flags"][born]
    names = {flag: category_of_flag(flag) for flag in np.unique(flags).tolist()}
    for flag, category in names.items():
        if category is not None:
            untold = np.where(flags == flag, _CODES[category], untold)
    return untold
