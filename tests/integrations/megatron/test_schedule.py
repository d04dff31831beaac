"""The dry run of Megatron's scheduler, against orders known by hand."""

from __future__ import annotations

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig

from prism_plugins.errors import PrismError
from prism_plugins.integrations.megatron.schedule import ScheduleInputs, stage_schedules
from prism_plugins.program.model import Phase


def make_config(*, pp: int, vpp: int | None = None, **options) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=pp * (vpp or 1),
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
        **options,
    )
    config.finalize_model_grads_func = lambda *args, **kwargs: None
    return config


def schedules_of(*, pp: int, microbatches: int, vpp: int | None = None, align: bool = False, **options):
    inputs = ScheduleInputs(
        pp=pp,
        chunks=vpp or 1,
        num_microbatches=microbatches,
        seq_length=8,
        micro_batch_size=1,
        config=make_config(pp=pp, vpp=vpp, **options),
        align_param_gather=align,
    )
    return stage_schedules(schedules, inputs)


def letters(schedule: tuple[Phase, ...]) -> str:
    """Only the compute steps, as F and B of the micro-batch (and chunk)."""
    texts = []
    for phase in schedule:
        if phase.kind in ("forward", "backward"):
            chunk = f".{phase.chunk}" if phase.chunk >= 0 else ""
            texts.append(f"{phase.kind[0].upper()}{phase.microbatch}{chunk}")
    return " ".join(texts)


def test_without_pipeline_every_forward_is_followed_by_its_backward():
    (only,) = schedules_of(pp=1, microbatches=3)
    assert letters(only) == "F0 B0 F1 B1 F2 B2"
    assert [p.kind for p in only][-1] == "grad_sync"


def test_one_forward_one_backward_of_four_stages():
    stages = schedules_of(pp=4, microbatches=5)
    assert [letters(s) for s in stages] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_transfers_of_a_middle_stage_name_what_they_carry():
    schedule = schedules_of(pp=3, microbatches=3)[1]
    assert [(p.kind, p.parts) for p in schedule] == [
        ("recv_forward", (("recv_forward", 0),)),
        ("forward", (("forward", 0),)),
        ("send_forward", (("send_forward", 0),)),
        ("recv_forward", (("recv_forward", 1),)),
        ("forward", (("forward", 1),)),
        ("send_forward_recv_backward", (("send_forward", 1), ("recv_backward", 0))),
        ("backward", (("backward", 0),)),
        ("send_backward_recv_forward", (("send_backward", 0), ("recv_forward", 2))),
        ("forward", (("forward", 2),)),
        ("send_forward_recv_backward", (("send_forward", 2), ("recv_backward", 1))),
        ("backward", (("backward", 1),)),
        ("send_backward", (("send_backward", 1),)),
        ("recv_backward", (("recv_backward", 2),)),
        ("backward", (("backward", 2),)),
        ("send_backward", (("send_backward", 2),)),
        ("grad_sync", (("grad_sync", 0),)),
    ]


def test_ends_of_the_pipeline_transfer_in_one_direction_only():
    stages = schedules_of(pp=2, microbatches=3)
    first = {name for p in stages[0] for name, _ in p.parts}
    last = {name for p in stages[1] for name, _ in p.parts}
    assert first == {"forward", "backward", "send_forward", "recv_backward", "grad_sync"}
    assert last == {"forward", "backward", "recv_forward", "send_backward", "grad_sync"}


def test_interleaved_order_of_two_stages_with_two_chunks():
    # Megatron's documented order for PP2 VPP2: (pp - rank - 1) * 2 + (chunks - 1) * pp warm-up forwards.
    stages = schedules_of(pp=2, vpp=2, microbatches=4, overlap_p2p_comm=True, batch_p2p_comm=False)
    assert letters(stages[0]) == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert letters(stages[1]) == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


def test_overlapped_transfers_are_waited_for_in_phases_of_their_own():
    stages = schedules_of(pp=4, vpp=2, microbatches=8, overlap_p2p_comm=True, batch_p2p_comm=False)
    for schedule in stages[1:-1]:
        parts = [part for p in schedule for part in p.parts]
        waits = {(name.removeprefix("wait_"), k) for name, k in parts if name.startswith("wait_")}
        assert waits <= set(parts)
        # Each wait comes after the call it waits for.
        for name, ordinal in waits:
            assert parts.index((name, ordinal)) < parts.index((f"wait_{name}", ordinal))
    assert not any(p.kind.startswith("wait") for p in schedules_of(pp=4, vpp=2, microbatches=8)[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_sends_and_receives_of_neighbours_match(overlap):
    options = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if overlap else {}
    stages = schedules_of(pp=4, vpp=2, microbatches=8, **options)
    count = [
        {
            name: sum(part == name for p in s for part, _ in p.parts)
            for name in ("send_forward", "recv_forward", "send_backward", "recv_backward")
        }
        for s in stages
    ]
    for stage in range(4):
        following = (stage + 1) % 4
        assert count[stage]["send_forward"] == count[following]["recv_forward"]
        assert count[following]["send_backward"] == count[stage]["recv_backward"]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(1, None, 4), (4, None, 2), (4, None, 9), (3, 2, 6)])
def test_every_micro_batch_is_worked_once_forward_then_backward(pp, vpp, microbatches):
    for schedule in schedules_of(pp=pp, vpp=vpp, microbatches=microbatches):
        work = letters(schedule).split()
        assert len(work) == len(set(work)) == 2 * microbatches * (vpp or 1)
        for step in work:
            if step[0] == "F":
                assert work.index(step) < work.index("B" + step[1:])


def test_parameter_gathers_that_the_scheduler_aligns_are_phases():
    plain = schedules_of(pp=2, vpp=3, microbatches=4, overlap_p2p_comm=True, batch_p2p_comm=False)
    aligned = schedules_of(
        pp=2, vpp=3, microbatches=4, overlap_p2p_comm=True, batch_p2p_comm=False, align=True
    )
    for without, with_gathers in zip(plain, aligned, strict=True):
        gathers = [p for p in with_gathers if p.kind == "start_param_sync"]
        assert [p.chunk for p in gathers] == [0, 1, 2]
        assert tuple(p for p in with_gathers if p.kind != "start_param_sync") == without


def test_a_schedule_megatron_refuses_is_one_line():
    with pytest.raises(
        PrismError, match=r"refuses this layout on stage 0 \(pp 4, 2 chunks, 3 micro-batches\)"
    ):
        schedules_of(pp=4, vpp=2, microbatches=3)


def test_a_dry_run_leaves_the_module_as_it_was():
    before = dict(vars(schedules))
    schedules_of(pp=2, microbatches=2)
    assert dict(vars(schedules)) == before
