"""Memory of small hand-made programs, worked out by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prism_plugins.program.job import RankClass
from prism_plugins.program.memory import (
    allocated_curve,
    categories_at,
    held_back_bytes,
    memory_findings,
    memory_of_classes,
    memory_of_program,
)
from prism_plugins.program.memory_device import MIB, CommunicatorUse, DeviceOverhead, communicators
from prism_plugins.program.memory_release import IssueTimes
from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    MemoryCategory,
    Phase,
    Program,
    category_flag,
)
from prism_plugins.program.slices import SliceReport

GIB = 2**30
NOTHING = DeviceOverhead(context_bytes=0, libraries_bytes=0)


def program(steps, *, initial=(), phases=(), comms=(), groups=()):
    """A program from (kind, ref, value) triples."""
    events = np.zeros(len(steps), EVENT_DTYPE)
    for event, (kind, ref, value) in zip(events, steps, strict=True):
        event["kind"], event["ref"], event["value"] = kind, ref, value
    return Program(
        rank=0,
        events=events,
        signatures=[],
        comms=list(comms),
        groups=list(groups),
        phases=list(phases),
        initial=[Allocation(i, n, c) for i, n, c in initial],
    )


def alloc(ref, nbytes):
    return (EventKind.ALLOC, ref, nbytes)


def free(ref):
    return (EventKind.FREE, ref, 0)


def begin(phase):
    return (EventKind.PHASE_BEGIN, phase, 0)


def end(phase):
    return (EventKind.PHASE_END, phase, 0)


PHASES = [
    Phase(kind="recv_forward", microbatch=0),
    Phase(kind="forward", microbatch=0, chunk=0),
    Phase(kind="backward", microbatch=0, chunk=0),
]

TRAINING = program(
    [
        begin(0),
        alloc(10, 4 * MIB),  # received activation
        end(0),
        begin(1),
        alloc(11, 64 * MIB),  # kept for backward
        alloc(12, 32 * MIB),  # freed by its own phase: the peak
        free(12),
        end(1),
        begin(2),
        alloc(13, 16 * MIB),
        free(11),
        free(13),
        free(10),
        end(2),
    ],
    initial=[
        (1, 100 * MIB, MemoryCategory.PARAMETERS),
        (2, 100 * MIB + 1, MemoryCategory.GRADIENTS),
    ],
    phases=PHASES,
)


def test_peak_phase_and_categories():
    use = memory_of_program(TRAINING, overhead=NOTHING)
    # 100 MiB + 1 byte takes a block of its own 102 MiB segment, split after 512 bytes beyond 100 MiB
    assert use.peak_allocated_bytes == (100 + 100 + 4 + 64 + 32) * MIB + 512
    assert use.peak_phase == "forward micro-batch 0"
    assert use.by_category == {
        "parameters": 100 * MIB,
        "gradients": 100 * MIB + 1,
        "activations": 64 * MIB,
        "temporary": 32 * MIB,
        "communication_buffers": 4 * MIB,
    }
    assert list(use.by_category) == sorted(use.by_category, key=lambda c: -use.by_category[c])
    assert use.allocated_bytes_end == 200 * MIB + 512
    assert use.device_used_bytes == use.peak_reserved_bytes


def test_a_tag_given_during_the_iteration_counts():
    tagged = program([alloc(1, MIB), alloc(2, 2 * MIB)])
    tagged.events["flags"][0] = category_flag(MemoryCategory.GRADIENTS)
    assert categories_at(tagged, 1) == {"activations": 2 * MIB, "gradients": MIB}


def test_curve_counts_blocks_of_512_bytes():
    curve = allocated_curve(program([alloc(1, 1), alloc(2, 513), free(1), alloc(3, 0), free(3), free(2)]))
    assert curve.tolist() == [512, 1536, 1024, 1024, 1024, 0]


def test_reserved_of_the_second_iteration_counts():
    """A block that one iteration hands to the next is freed by the next one, not leaked."""
    steady = program(
        [alloc(2, 30 * MIB), free(1), free(2), alloc(3, 30 * MIB)],
        initial=[(1, 30 * MIB, MemoryCategory.OTHER)],
    )
    use = memory_of_program(steady, overhead=NOTHING)
    assert use.allocated_bytes_end == 30 * MIB
    assert use.peak_allocated_bytes == use.peak_reserved_bytes == 60 * MIB


def test_empty_program_holds_its_parameters():
    use = memory_of_program(program([], initial=[(1, 3 * MIB, MemoryCategory.PARAMETERS)]), overhead=NOTHING)
    assert use.peak_allocated_bytes == 3 * MIB
    assert use.peak_reserved_bytes == 20 * MIB
    assert use.by_category == {"parameters": 3 * MIB}
    assert use.peak_phase == ""


COMMUNICATING = program(
    [
        (EventKind.COMM, 0, 1),
        (EventKind.COMM, 0, 2),
        (EventKind.COMM, 1, 3),
        (EventKind.COMM, 2, 3),  # batched with the one before
        (EventKind.COMM, 3, 4),
        (EventKind.COMM, 4, 5),
        (EventKind.COMM, 5, 6),
    ],
    comms=[
        CommSignature(kind="all_reduce", group=0),
        CommSignature(kind="send", group=1, peer=1),
        CommSignature(kind="recv", group=1, peer=1),
        CommSignature(kind="send", group=2, peer=1),
        CommSignature(kind="all_to_all", group=3),
        CommSignature(kind="all_reduce", group=4),
    ],
    groups=[
        GroupInfo(ranks=(0, 1), name="tp"),
        GroupInfo(ranks=(0, 2), name="pp"),
        GroupInfo(ranks=(0, 2), name="other pp"),
        GroupInfo(ranks=(0, 4), name="ep"),
        GroupInfo(ranks=(0,), name="alone"),
    ],
)


def test_communicators_by_use():
    assert communicators(COMMUNICATING) == (
        CommunicatorUse(name="tp", ranks=(0, 1), collective=True),
        CommunicatorUse(name="pp", ranks=(0, 2), collective=False, near_peers=1),
        CommunicatorUse(name="other pp", ranks=(0, 2), collective=False, pairs=1),
        CommunicatorUse(name="ep", ranks=(0, 4), collective=True, near_peers=1),
        CommunicatorUse(name="alone", ranks=(0,), collective=True),
    )
    assert communicators(program([])) == ()
    apart = communicators(COMMUNICATING, gpus_per_domain=2)
    assert [(use.near_peers, use.far_peers) for use in apart] == [(0, 0), (0, 1), (0, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("channels", "first", "further", "p2p", "pair"), [(32, 840, 486, 384, 262), (8, 504, 150, 96, 70)]
)
def test_nccl_figures_are_the_measured_ones(channels, first, further, p2p, pair):
    overhead = DeviceOverhead(channels=channels)

    def use(**kinds):
        return CommunicatorUse(ranks=(0, 1), **({"collective": False} | kinds))

    def mib(*uses):
        parts = overhead.parts(uses)
        return sum(size for name, size in parts.items() if name.startswith("nccl")) / MIB

    one = use(collective=True)
    assert mib(one) == pytest.approx(first, abs=2)
    assert mib(one, one) - mib(one) == pytest.approx(further, abs=2)
    if channels == 32:
        assert mib(one, use(near_peers=1)) - mib(one) == pytest.approx(637, abs=2)  # measured pp2: p2p only
        alone = CommunicatorUse(ranks=(0,), collective=True)
        assert mib(one, alone) - mib(one) == pytest.approx(389, abs=2)
    assert mib(use(collective=True, near_peers=1)) - mib(one) == pytest.approx(p2p, abs=2)
    assert mib(one, use(pairs=1)) - mib(one) == pytest.approx(pair, abs=2)


def test_all_to_all_of_a_node_takes_gigabytes():
    """github.com/NVIDIA/nccl/issues/1685: 3.28 GB more after the first all_to_all of eight H100s, its communicator included."""
    eight = CommunicatorUse(ranks=tuple(range(8)), collective=True, near_peers=7)
    assert DeviceOverhead().use_bytes(eight) == pytest.approx(3.28e9, rel=0.07)


def test_all_to_all_of_several_nodes_takes_little_more():
    ranks = tuple(range(64))
    overhead = DeviceOverhead()
    far = CommunicatorUse(ranks=ranks, collective=True, near_peers=7, far_peers=56)
    extra = overhead.use_bytes(far) - overhead.communicator_bytes(ranks)
    assert extra == 7 * 2 * 12 * MIB + 32 * 4 * MIB


def test_communicators_of_several_nodes_have_few_channels_and_nvls_has_buffers():
    overhead = DeviceOverhead()
    pair, far_pair = overhead.communicator_bytes((0, 1)), overhead.communicator_bytes((0, 8))
    assert far_pair < pair / 4
    node = tuple(range(8))
    assert overhead.communicator_bytes(node, nvls=True) - overhead.communicator_bytes(node) == 256 * MIB


def test_parts_outside_torch_are_named_and_sum_up():
    use = memory_of_program(COMMUNICATING)
    assert use.device_used_bytes == use.peak_reserved_bytes + sum(use.outside_torch.values())
    assert list(use.outside_torch)[:4] == ["cuda_context", "libraries", "nccl", "nccl tp (2 ranks)"]
    assert "nccl start-up" in use.outside_torch
    world = msgspec.structs.replace(COMMUNICATING.groups[0], desc="default_pg")
    groups = [world, *COMMUNICATING.groups[1:]]
    assert (
        "nccl start-up"
        not in memory_of_program(msgspec.structs.replace(COMMUNICATING, groups=groups)).outside_torch
    )


def memory_of_class(held, *, ranks, **options):
    (memory,) = memory_of_classes([held], ranks=[ranks], **options)
    return memory


def rank_class(exemplar, **variants):
    return RankClass(name="stage 0", ranks=np.arange(4), representative=0, exemplar=exemplar, **variants)


def test_class_takes_its_largest_variant():
    bigger = program([alloc(1, 64 * MIB), free(1)])
    both = rank_class(program([alloc(1, 32 * MIB), free(1)]), variants={3: bigger}, variant_of={3: 3})
    memory = memory_of_class(both, ranks="0-3", capacity_bytes=80 * GIB, overhead=NOTHING)
    assert memory.peak_allocated_bytes == 64 * MIB
    assert (memory.name, memory.ranks, memory.capacity_bytes) == ("stage 0", "0-3", 80 * GIB)


@pytest.mark.parametrize(
    ("capacity_gib", "severity", "says"),
    [
        (1, "error", "out of memory: stage 0 needs 1.5 GiB of 1.0 GiB"),
        (1.55, "warning", "borderline: stage 0 hardly fits"),
        (4, None, ""),
    ],
)
def test_findings(capacity_gib, severity, says):
    held = rank_class(program([alloc(1, 7 * MIB), free(1)], initial=[(9, GIB, MemoryCategory.PARAMETERS)]))
    overhead = DeviceOverhead(context_bytes=400 * MIB, libraries_bytes=90 * MIB)
    memory = memory_of_class(held, ranks="0-3", capacity_bytes=int(capacity_gib * GIB), overhead=overhead)
    findings = memory_findings([memory])
    if severity is None:
        assert findings == []
        return
    assert [f.severity for f in findings] == [severity]
    assert says in findings[0].message
    assert findings[0].ranks == "0-3"
    if severity == "error":
        assert "parameters 1.0" in findings[0].message


def test_only_fragmented_memory_is_a_warning():
    held = rank_class(program([alloc(1, 2 * MIB), free(1)], initial=[(9, GIB, MemoryCategory.PARAMETERS)]))
    memory = memory_of_class(held, ranks="0-3", capacity_bytes=GIB + 10 * MIB, overhead=NOTHING)
    (finding,) = memory_findings([memory])
    assert finding.severity == "warning"
    assert "borderline" in finding.message
    assert "cached blocks" in finding.message


@pytest.mark.parametrize(
    ("capacity_gib", "data_parallel", "says", "not_says"),
    [
        (
            5.5,
            8,
            "0.5 GiB have to go, the largest parts with a remedy hold activations 3.0: recompute",
            "shard",
        ),
        (2.5, 8, "activations 3.0 and optimizer state 2.0: recompute activations", "offload the optimizer"),
        (2.5, 1, "; and offload the optimizer", "shard"),
    ],
)
def test_what_would_make_it_fit(capacity_gib, data_parallel, says, not_says):
    initial = [
        (7, 3 * GIB, MemoryCategory.ACTIVATIONS),
        (8, GIB, MemoryCategory.PARAMETERS),
        (9, 2 * GIB, MemoryCategory.OPTIMIZER_STATE),
    ]
    held = rank_class(program([], initial=initial))
    memory = memory_of_class(held, ranks="0-3", capacity_bytes=int(capacity_gib * GIB), overhead=NOTHING)
    (finding,) = memory_findings([memory], data_parallel=data_parallel)
    assert finding.severity == "error"
    assert says in finding.message
    assert not_says not in finding.message


def test_the_ledger_of_a_slice_replaces_the_emulation():
    report = SliceReport(
        rank=0,
        status="ok",
        peak_allocated_bytes=33 * MIB,
        peak_reserved_bytes=50 * MIB,
        allocated_bytes_end=3 * MIB,
    )
    bigger = program([alloc(1, 64 * MIB), free(1)])
    held = rank_class(program([alloc(1, 32 * MIB), free(1)]), variants={3: bigger}, variant_of={3: 3})
    memory = memory_of_class(held, ranks="0-3", capacity_bytes=GIB, ledgers={0: report}, overhead=NOTHING)
    assert memory.peak_allocated_bytes == (33 + 32) * MIB
    assert memory.peak_reserved_bytes == memory.device_used_bytes == (50 + 32) * MIB
    assert memory.allocated_bytes_end == 3 * MIB


@pytest.mark.parametrize(
    ("lag_ns", "held_mib", "reserved_mib"), [(0, 0, 50), (100, 16, 50 + 10), (900, 80, 50 + 20)]
)
def test_blocks_that_other_streams_use_are_held_back_by_the_simulated_lag(lag_ns, held_mib, reserved_mib):
    """Each block of 16 MiB is released when the next one is there; the other stream is ``lag_ns`` behind the host."""
    steps = [(EventKind.KERNEL, 0, 0)]
    for ref in range(6):
        steps += [alloc(ref, 16 * MIB), (EventKind.KERNEL, 0, 0), free(ref)]
    held = program(steps)
    held.events["flags"][held.events["kind"] == EventKind.ALLOC] = EventFlag.OTHER_STREAM
    held.events["stream"][held.events["kind"] == EventKind.KERNEL] = 1
    host = np.arange(len(steps)) * 40.0
    times = IssueTimes(host, host, host + lag_ns)
    # The slice's second ledger: the GPU as far behind as it can be. It held back 32 MiB and reserved 20 MiB more for it.
    report = SliceReport(
        rank=0, status="ok", peak_allocated_bytes=16 * MIB, peak_reserved_bytes=50 * MIB,
        late_peak_active_bytes=48 * MIB, late_peak_reserved_bytes=70 * MIB,
    )  # fmt: skip
    (memory,) = memory_of_classes(
        [rank_class(held)], ranks=["0"], capacity_bytes=GIB, ledgers={0: report}, overhead=NOTHING,
        held_of=lambda c: held_back_bytes(c.exemplar, times),
    )  # fmt: skip
    assert memory.held_back_bytes == held_mib * MIB
    assert memory.peak_reserved_bytes == memory.device_used_bytes == reserved_mib * MIB


def test_sliced_ranks_of_a_class_count_by_their_own_ledgers():
    def report(rank, allocated, reserved):
        return SliceReport(
            rank=rank, status="ok", peak_allocated_bytes=allocated * MIB, peak_reserved_bytes=reserved * MIB,
            allocated_bytes_end=rank * MIB,
        )  # fmt: skip

    other = program([alloc(1, 64 * MIB), free(1)])
    held = rank_class(program([alloc(1, 32 * MIB), free(1)]), variants={1: other}, variant_of={1: 1})
    ledgers = {0: report(0, 33, 50), 1: report(1, 31, 70)}
    (memory,) = memory_of_classes(
        [held],
        ranks=["0-1"],
        capacity_bytes=GIB,
        ledgers=ledgers,
        overhead=DeviceOverhead(context_bytes=MIB, libraries_bytes=0),
    )
    # Rank 1 is known: its variant does not raise the class. Each figure is that of the rank that has most.
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (33 * MIB, 70 * MIB)
    assert (memory.allocated_bytes_end, memory.device_used_bytes) == (MIB, 71 * MIB)
    assert [
        (s.rank, s.peak_allocated_bytes, s.peak_reserved_bytes, s.device_used_bytes) for s in memory.sliced
    ] == [
        (0, 33 * MIB, 50 * MIB, 51 * MIB),
        (1, 31 * MIB, 70 * MIB, 71 * MIB),
    ]


def test_derived_classes_inherit_what_emulation_missed_in_their_source():
    sliced = rank_class(program([alloc(1, 32 * MIB), free(1)]))
    derived = rank_class(program([alloc(1, 40 * MIB), free(1)]))
    derived.exemplar.source = "derived"
    report = SliceReport(rank=0, status="ok", peak_allocated_bytes=33 * MIB, peak_reserved_bytes=50 * MIB)
    _, memory = memory_of_classes(
        [sliced, derived], ranks=["0", "1"], capacity_bytes=GIB, ledgers={0: report}, overhead=NOTHING
    )
    assert memory.peak_allocated_bytes == 41 * MIB
    assert memory.peak_reserved_bytes == 58 * MIB


def test_few_variants_are_made():
    class Variants(dict):
        made = ()

        def __getitem__(self, key):
            self.made = (*self.made, key)
            return super().__getitem__(key)

    variants = Variants({key: program([alloc(1, key * MIB), free(1)]) for key in range(1, 100)})
    memory = memory_of_class(
        rank_class(program([]), variants=variants), ranks="0-99", capacity_bytes=GIB, overhead=NOTHING
    )
    assert memory.peak_allocated_bytes == 99 * MIB
    assert sorted(variants.made) == [1, 99]


def test_groups_that_only_start_up_or_logging_use_are_communicators_too():
    world, tensor, pipe = (
        GroupInfo(ranks=ranks, name=name, desc=name)
        for ranks, name in (((0, 1, 2, 3), "default_pg"), ((0, 1), "TENSOR"), ((0, 2), "PIPE"))
    )
    sends = CommSignature(kind="send", group=1, dtype="uint8", in_numel=MIB, peer=1)
    iteration = program([(EventKind.COMM, 0, 1)], comms=[sends], groups=[tensor, pipe])
    report = SliceReport(rank=0, status="ok", peak_reserved_bytes=MIB, groups_outside=(world, tensor, pipe))
    overhead = DeviceOverhead(context_bytes=0, libraries_bytes=0)
    (memory,) = memory_of_classes(
        [rank_class(iteration)], ranks=["0-3"], capacity_bytes=GIB, ledgers={0: report}, overhead=overhead
    )
    parts = memory.outside_torch
    assert parts["nccl default_pg (4 ranks)"] == overhead.communicator_bytes((0, 1, 2, 3))
    assert parts["nccl TENSOR (2 ranks)"] == overhead.communicator_bytes((0, 1))
    # The pair that an unbatched send opens, and the group's own communicator.
    pair = overhead.pair_base_bytes + overhead.channels * overhead.pair_channel_bytes
    assert parts["nccl PIPE (2 ranks)"] == overhead.communicator_bytes((0, 2)) + pair
    assert memory.device_used_bytes == memory.peak_reserved_bytes + sum(parts.values())
