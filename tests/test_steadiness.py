"""Two iterations are equal when their device work is, whatever their run-wide ids."""

import numpy as np
import pytest

from prism_plugins.program.model import EVENT_DTYPE, EventKind
from prism_plugins.steadiness import iteration_hash

K = EventKind


def events(*rows):
    return np.array(
        [(kind, flags, stream, ref, value) for kind, flags, stream, ref, value in rows], EVENT_DTYPE
    )


def iteration(work=0, event=0, alloc=0, host=10):
    return events(
        (K.PHASE_BEGIN, 0, 0, 0, 0),
        (K.ALLOC, 0, 0, alloc, 512),
        (K.KERNEL, 0, 0, 3, 0),
        (K.COMM, 1, 0, 0, work),
        (K.EVENT_RECORD, 0, 0, event, 0),
        (K.EVENT_WAIT, 0, 1, event, 0),
        (K.KERNEL, 0, 1, 4, 0),
        (K.WORK_WAIT, 0, 0, work, 0),
        (K.HOST, 0, 0, 0, host),
        (K.FREE, 0, 0, alloc, 0),
        (K.PHASE_END, 0, 0, 0, 0),
    )


def test_ids_of_works_events_and_allocations_are_relative():
    first = iteration_hash(iteration())
    assert first == iteration_hash(iteration(work=700, event=33, alloc=9000, host=77))


def test_garbage_collection_does_not_count():
    with_free = np.insert(iteration(), 4, events((K.FREE, 0, 0, 1, 0)))
    assert iteration_hash(with_free) == iteration_hash(iteration())


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (2, "ref", 5),  # another kernel
        (2, "stream", 1),  # another stream
        (3, "ref", 1),  # another collective
        (3, "flags", 0),  # synchronous
        (0, "ref", 1),  # another phase
        (7, "stream", 2),  # another stream waits
    ],
)
def test_any_difference_on_the_device_counts(row, column, value):
    changed = iteration()
    changed[column][row] = value
    assert iteration_hash(changed) != iteration_hash(iteration())


def test_waiting_for_another_event_or_work_counts():
    two = events((K.EVENT_RECORD, 0, 0, 1, 0), (K.EVENT_RECORD, 0, 0, 2, 0), (K.EVENT_WAIT, 0, 1, 1, 0))
    other = two.copy()
    other["ref"][2] = 2
    assert iteration_hash(two) != iteration_hash(other)
    two = events((K.COMM, 1, 0, 0, 1), (K.COMM, 1, 0, 0, 2), (K.WORK_WAIT, 0, 0, 1, 0))
    other = two.copy()
    other["ref"][2] = 2
    assert iteration_hash(two) != iteration_hash(other)


def test_no_events():
    assert iteration_hash(np.zeros(0, EVENT_DTYPE)) == iteration_hash(np.zeros(0, EVENT_DTYPE))
