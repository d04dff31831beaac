"""What an iteration's event stream holds."""

from __future__ import annotations

import threading

import numpy as np
import torch

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.program.model import (
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    TensorSpec,
)

DEVICE = "virtual"
BIG = (1024, 1024)


def big(**options):
    return torch.randn(BIG, device="cuda", **options)


def record(function):
    recorder = get_recorder()
    recorder.start()
    function()
    return recorder.stop()


def ops(recorded):
    kernels = recorded.events[recorded.events["kind"] == EventKind.KERNEL]
    return [recorded.signatures[i] for i in kernels["ref"]]


def names(recorded):
    return [s.op.removeprefix("aten::") for s in ops(recorded)]


def kinds(recorded):
    return [EventKind(k) for k in recorded.events["kind"]]


def test_signatures():
    x, half = big(), torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    recorded = record(lambda: (x @ x.t(), half.sum(dim=1, keepdim=True), x.add_(2)))
    mm, total, add = ops(recorded)
    assert mm == OpSignature(
        op="aten::mm",
        inputs=(TensorSpec("float32", BIG), TensorSpec("float32", BIG, (1, 1024))),
        outputs=(TensorSpec("float32", BIG),),
    )
    assert total.op == "aten::sum.dim_IntList"
    assert total.inputs == (TensorSpec("bfloat16", (1024, 512)),)
    assert dict(total.scalars) == {"dim": (1,), "keepdim": True}
    assert add.op == "aten::add_.Tensor"
    assert add.outputs == (TensorSpec("float32", BIG),)


def test_views_and_allocations_are_not_kernels():
    x = big()

    def work():
        y = x.view(-1)[10:].t().unsqueeze(0).detach().expand(2, -1)
        torch.empty(5, device="cuda")
        torch.empty_like(x)
        x.permute(1, 0).transpose(0, 1).reshape(-1).chunk(2)
        torch.empty(0, device="cuda").add_(1)
        return y.requires_grad

    recorded = record(work)
    assert names(recorded) == []
    assert kinds(recorded) == [EventKind.ALLOC, EventKind.FREE, EventKind.ALLOC, EventKind.FREE]


def test_small_tensors_record_the_same_as_large_ones():
    small = torch.ones(4, 4, device="cuda")
    assert names(record(lambda: torch.relu(small @ small + 1))) == ["mm", "add.Tensor", "relu"]
    assert names(record(lambda: torch.relu(big() @ big() + 1)))[2:] == ["mm", "add.Tensor", "relu"]


def step(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_iterations_have_equal_ids():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 8)).cuda()
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        x = big()
        step(model, optimizer, x)
        first = record(lambda o=optimizer, x=x: step(model, o, x))
        second = record(lambda o=optimizer, x=x: step(model, o, x))
        assert kinds(first) == kinds(second)
        same = first.events["kind"] == EventKind.KERNEL
        assert np.array_equal(first.events["ref"][same], second.events["ref"][same])
        assert "addmm" in names(first)


def test_reads_of_the_host():
    x, small = big(), torch.ones(3, device="cuda")
    recorded = record(lambda: (x.sum().item(), small.sum().item()))
    syncs = recorded.events[recorded.events["kind"] == EventKind.STREAM_SYNC]
    assert syncs["flags"].tolist() == [EventFlag.SYNTHESIZED, 0]
    assert names(recorded) == ["sum.dim_IntList", "_local_scalar_dense"] * 2


def test_copies_between_host_and_device():
    x, host = big(), torch.ones(BIG)
    pinned = torch.empty(BIG).pin_memory()
    device = torch.empty(BIG, device="cuda")
    K, S = EventKind.KERNEL, EventKind.STREAM_SYNC
    assert kinds(record(lambda: pinned.copy_(x))) == [K, S]
    assert kinds(record(lambda: pinned.copy_(x, non_blocking=True))) == [K]
    assert kinds(record(lambda: host.copy_(x, non_blocking=True))) == [
        K,
        S,
    ]  # pageable memory: the host waits
    assert kinds(record(lambda: device.copy_(host))) == [K, S]
    assert kinds(record(lambda: device.copy_(host, non_blocking=True))) == [K, S]
    assert kinds(record(lambda: device.copy_(pinned, non_blocking=True))) == [K]
    few, few_on_host = torch.empty(100, device="cuda"), torch.ones(100)
    assert kinds(record(lambda: few.copy_(few_on_host, non_blocking=True))) == [K]
    assert kinds(record(lambda: device.copy_(x))) == [K]
    # Of another dtype: converted on the device first, into memory of its own.
    double = torch.empty(BIG, dtype=torch.float64).pin_memory()
    assert kinds(record(lambda: double.copy_(x, non_blocking=True))) == [
        EventKind.ALLOC,
        K,
        K,
        EventKind.FREE,
    ]


def test_copies_say_between_what():
    host, device = torch.ones(BIG), torch.empty(BIG, device="cuda")
    pinned = host.pin_memory()
    recorded = record(
        lambda: (device.copy_(host), device.copy_(pinned), host.copy_(device), pinned.copy_(device))
    )
    assert [(s.attrs["direction"], s.attrs["host"]) for s in ops(recorded)] == [
        ("h2d", "pageable"),
        ("h2d", "pinned"),
        ("d2h", "pageable"),
        ("d2h", "pinned"),
    ]


def test_work_on_large_host_tensors_is_host_work():
    big_on_host, few = torch.empty(BIG), torch.ones(100)
    recorded = record(lambda: (big_on_host.mul_(2), few.mul_(2), big_on_host.norm(), big_on_host.view(-1)))
    assert kinds(recorded) == [EventKind.HOST] * 2
    multiply, norm = (recorded.signatures[i - 1] for i in recorded.events["ref"])
    assert multiply.op == "host::mul_.Tensor"
    assert multiply.inputs == (TensorSpec("float32", BIG),)
    assert norm.op == "host::linalg_vector_norm"


def test_masks_make_the_host_wait():
    x = big()
    mask = x > 0
    recorded = record(lambda: x[mask])
    assert names(recorded) == ["nonzero", "index.Tensor"]
    assert EventKind.STREAM_SYNC in kinds(recorded)
    assert names(record(lambda: x.masked_fill_(mask, 0))) == ["masked_fill_.Scalar"]

    def put():
        x[mask] = 0.0

    assert names(record(put)) == ["masked_fill_.Tensor"] or names(record(put)) == ["masked_fill_.Scalar"]


def test_communication_phases_and_host_work():
    recorder = get_recorder()
    info = GroupInfo(ranks=(0, 1), name="g", desc="TENSOR_MODEL_PARALLEL_GROUP")
    group = recorder.group(info)
    assert recorder.group(info) == group
    forward, backward = Phase(kind="forward", microbatch=0), Phase(kind="backward", microbatch=0)
    side = torch.cuda.Stream()

    def work():
        recorder.begin_phase(forward)
        signature = CommSignature(kind="all_reduce", group=group, dtype="bfloat16", in_numel=8, out_numel=8)
        one, two = recorder.new_work(), recorder.new_work()
        assert one != two
        recorder.comm(signature, work=one, is_async=False)
        with torch.cuda.stream(side):
            recorder.comm(signature, work=two, is_async=True)
            recorder.wait(two)
        recorder.begin_phase(backward)
        recorder.host(1500)
        recorder.host_op("host::cpu_adam", [torch.empty(8)])
        recorder.end_phase()
        recorder.end_phase()

    recorded = record(work)
    assert kinds(recorded) == [
        EventKind.PHASE_BEGIN, EventKind.COMM, EventKind.COMM, EventKind.WORK_WAIT, EventKind.PHASE_END,
        EventKind.PHASE_BEGIN, EventKind.HOST, EventKind.HOST, EventKind.PHASE_END,
    ]  # fmt: skip
    _, first, second, wait, *_ = recorded.events
    assert recorded.comms[first["ref"]] == recorded.comms[second["ref"]]
    assert (first["flags"], second["flags"]) == (0, EventFlag.ASYNC)
    assert first["stream"] == 0 != second["stream"]
    assert second["stream"] == wait["stream"]
    assert second["value"] == wait["ref"]
    assert recorded.phases[recorded.events[0]["ref"]] == forward
    known, priced = recorded.events[6:8]
    assert (known["value"], known["ref"]) == (1500, 0)
    assert priced["value"] == 0
    assert recorded.signatures[priced["ref"] - 1] == OpSignature(
        op="host::cpu_adam", inputs=(TensorSpec("float32", (8,)),)
    )
    assert recorded.groups[group] == info


def test_fused_ops_share_the_table():
    x = big()
    recorder = get_recorder()

    def work():
        recorder.kernel("prism::fused", [x], [x], attrs={"name": "swiglu", "flops": 10})
        x.relu_()
        recorder.kernel("prism::fused", [x], [x], attrs={"name": "swiglu", "flops": 10})

    recorded = record(work)
    one, relu, two = ops(recorded)
    assert one == two
    assert one.attrs == {"name": "swiglu", "flops": 10}
    assert one.inputs == (TensorSpec("float32", BIG),)
    assert relu.op == "aten::relu_"


def test_nothing_is_recorded_outside():
    recorded = record(lambda: None)
    assert len(recorded.events) == 0
    big().relu()
    assert len(record(lambda: None).events) == 0


def test_threads_record_into_one_stream():
    x = big()

    def work():
        threads = [threading.Thread(target=lambda: [x.relu() for _ in range(200)]) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    assert len(ops(record(work))) == 800


def test_recording_costs_are_measured():
    x = big()
    record(lambda: [x.relu() for _ in range(1000)])
    stats = get_recorder().stats()
    assert 0 < stats.record_ns_per_op < 20_000
    assert stats.num_ops >= 1000
    assert stats.num_cache_hits > stats.num_cache_misses


def test_peaks_survive_a_script_that_resets_them():
    recorder = get_recorder()
    recorder.reset_peaks()
    before = recorder.stats().allocated_bytes
    big()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    assert recorder.stats().peak_allocated_bytes >= before + 4 * 2**20
    recorder.reset_peaks()
    assert recorder.stats().peak_allocated_bytes == before
