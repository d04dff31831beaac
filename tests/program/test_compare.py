import msgspec
import numpy as np
import pytest

from prism_plugins.program.compare import compare_programs
from prism_plugins.program.model import EVENT_DTYPE, Allocation, EventFlag, EventKind
from tests.program.pipeline_model import make_program


def program(**kind):
    return make_program(stage=1, num_stages=4, num_microbatches=6, **kind)


def first_of(program, kind, skip=0):
    return int(np.flatnonzero(program.events["kind"] == kind)[skip])


def test_equal_but_for_ids_and_table_order():
    left, right = program(first_id=100), program(first_id=9000)
    right.signatures = [*reversed(right.signatures)]
    kernels = right.events["kind"] == EventKind.KERNEL
    right.events["ref"][kernels] = len(right.signatures) - 1 - right.events["ref"][kernels]
    right.groups = [msgspec.structs.replace(g, name="other") for g in right.groups]
    assert compare_programs(left, right) is None


def test_whether_a_value_was_computed_makes_no_difference():
    left, right = program(), program()
    sync = np.array([(EventKind.STREAM_SYNC, 0, 0, 0, 0)], dtype=EVENT_DTYPE)
    for one, flag in ((left, 0), (right, EventFlag.SYNTHESIZED)):
        sync["flags"] = flag
        one.events = np.concatenate([one.events, sync])
    assert compare_programs(left, right) is None


def test_the_first_differing_kernel_is_named_with_phase_and_both_sides():
    left, right = program(), program()
    at = first_of(right, EventKind.KERNEL, skip=9)
    right.events["ref"][at] = (right.events["ref"][at] + 1) % len(right.signatures)
    found = compare_programs(left, right)
    assert found.what == "device"
    assert found.num_differing == 1
    assert found.left != found.right
    assert "aten::" in found.left
    assert "forward" in found.phase
    assert found.left in str(found)


def change_stream(p):
    p.events["stream"][first_of(p, EventKind.KERNEL, 3)] = 7


def change_comm_size(p):
    p.comms[0] = msgspec.structs.replace(p.comms[0], in_numel=1)


def change_peer(p):
    p.comms[0] = msgspec.structs.replace(p.comms[0], peer=3)


def change_group(p):
    p.groups[0] = msgspec.structs.replace(p.groups[0], ranks=(0, 1, 2, 5))


def change_dtype(p):
    p.comms[0] = msgspec.structs.replace(p.comms[0], dtype="float16")


def make_sync(p):
    p.events["flags"][first_of(p, EventKind.COMM)] = 0


def drop_a_wait(p):
    p.events = np.delete(p.events, first_of(p, EventKind.WORK_WAIT, 2))


def wait_for_another(p):
    a, b = first_of(p, EventKind.WORK_WAIT, 2), first_of(p, EventKind.WORK_WAIT, 3)
    p.events["ref"][[a, b]] = p.events["ref"][[b, a]]


def rename_a_phase(p):
    p.phases[0] = msgspec.structs.replace(p.phases[0], kind="other")


def append_a_sync(p):
    p.events = np.append(p.events, np.array([(EventKind.DEVICE_SYNC, 0, 0, 0, 0)], dtype=EVENT_DTYPE))


@pytest.mark.parametrize(
    "change",
    [
        change_stream,
        change_comm_size,
        change_peer,
        change_group,
        change_dtype,
        make_sync,
        drop_a_wait,
        wait_for_another,
        rename_a_phase,
        append_a_sync,
    ],
)
def test_device_differences_are_found(change):
    changed = program()
    change(changed)
    for left, right in ((program(), changed), (changed, program())):
        found = compare_programs(left, right)
        assert found is not None
        assert found.what == "device"


def grow(p):
    p.events["value"][first_of(p, EventKind.ALLOC, 4)] += 512


def release_in_another_order(p):
    a, b = first_of(p, EventKind.FREE, 2), first_of(p, EventKind.FREE, 3)
    p.events["ref"][[a, b]] = p.events["ref"][[b, a]]


@pytest.mark.parametrize("change", [grow, release_in_another_order])
def test_memory_differences_are_found(change):
    changed = program()
    change(changed)
    found = compare_programs(program(), changed)
    assert found.what == "memory"
    assert "of" in found.left


def test_initial_allocations_are_compared_as_a_set():
    left, right = program(), program()
    left.initial = [Allocation(1, 10, "parameters"), Allocation(2, 20, "gradients")]
    right.initial = [Allocation(5, 20, "gradients"), Allocation(4, 10, "parameters")]
    assert compare_programs(left, right) is None
    right.initial[0] = Allocation(5, 21, "gradients")
    found = compare_programs(left, right)
    assert found.what == "initial"
    assert "21 B" in found.right
