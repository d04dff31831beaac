"""What a program does in all, whatever the order: what a derived program has to share with the captured one."""

from __future__ import annotations

import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import EventKind


class Work:
    """What a program does in all, whatever the order, to be compared with another stage's."""

    def __init__(self, events: np.ndarray) -> None:
        kind = np.ascontiguousarray(events["kind"])
        at = {k: np.flatnonzero(kind == k) for k in _KINDS}

        def numbers(of: EventKind, column: str) -> np.ndarray:
            return events[column][at[of]].astype(np.int64)

        self._done = [_multiset(numbers(k, column)) for k, column, _ in _DONE]
        self._from_before = []
        for makes, column, needs, what in _MADE:
            made, needed = (at[makes], numbers(makes, column)), (at[needs], numbers(needs, "ref"))
            self._from_before.append(_from_before(made, needed, makes == EventKind.ALLOC, what))
        self._live_at_end = _missing_in(numbers(EventKind.ALLOC, "ref"), numbers(EventKind.FREE, "ref"))

    def check(self, derived: Work) -> None:
        """Raise unless the derived program does the same."""
        for mine, other, (_, _, what) in zip(self._done, derived._done, _DONE, strict=True):
            if not np.array_equal(mine, other):
                raise CannotDeriveError(f"the derived program has other {what} than the captured one")
        for mine, other, (_, _, _, what) in zip(self._from_before, derived._from_before, _MADE, strict=True):
            if not np.array_equal(mine, other):
                raise CannotDeriveError(f"the derived program needs an {what} that nothing makes")
        if not np.array_equal(self._live_at_end, derived._live_at_end):
            raise CannotDeriveError(
                "the derived program ends with other live allocations than the captured one"
            )


_DONE = (
    (EventKind.KERNEL, "ref", "kernels"),
    (EventKind.COMM, "ref", "transfers"),
    (EventKind.ALLOC, "value", "allocations"),
    (EventKind.FREE, "value", "releases"),
    (EventKind.EVENT_WAIT, "value", "waits for events"),
    (EventKind.STREAM_SYNC, "stream", "synchronisations"),
)
_MADE = (
    (EventKind.ALLOC, "ref", EventKind.FREE, "allocation"),
    (EventKind.COMM, "value", EventKind.WORK_WAIT, "communication"),
    (EventKind.EVENT_RECORD, "ref", EventKind.EVENT_WAIT, "event"),
)
_KINDS = {k for row in (*_DONE, *_MADE) for k in row if isinstance(k, EventKind)}


def _from_before(
    made: tuple[np.ndarray, np.ndarray], needed: tuple[np.ndarray, np.ndarray], once: bool, what: str
) -> np.ndarray:
    """Numbers that are needed but not made in the iteration; ``made`` and ``needed`` are (events, numbers). Raises when one
    that is made is needed before or, with ``once``, is made or needed twice."""
    (made_at, makes), (needed_at, needs) = made, needed
    if once and not (_all_distinct(makes) and _all_distinct(needs)):
        raise CannotDeriveError(f"the derived program makes or releases an {what} twice")
    table = FirstPlaces(makes, made_at)
    when = table.of(needs)
    if np.any(when > needed_at):
        raise CannotDeriveError(f"the derived program needs an {what} before it is made")
    return _distinct(needs[when < 0])


class FirstPlaces:
    """Numbers → where each comes first, -1 for others. By a table where the numbers are dense: sorting and hashing take ten times
    as long on these columns."""

    _SPREAD = 16

    def __init__(self, numbers: np.ndarray, where: np.ndarray) -> None:
        self._low = int(numbers.min(initial=0))
        spread = int(numbers.max(initial=0)) - self._low + 1
        self._dense = spread <= self._SPREAD * len(numbers) + 1024
        if self._dense:
            self._where = np.full(spread, -1, dtype=np.int64)
            self._where[numbers[::-1] - self._low] = where[
                ::-1
            ]  # of equal numbers the last one written stays
        else:
            self._numbers, first = np.unique(numbers, return_index=True)
            self._where = where[first]

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Where each number comes first."""
        if not len(self._where):
            return np.full(len(numbers), -1, dtype=np.int64)
        if self._dense:
            at = numbers - self._low
            known = (at >= 0) & (at < len(self._where))
        else:
            at = np.searchsorted(self._numbers, numbers)
            known = self._numbers[np.minimum(at, len(self._where) - 1)] == numbers
        return np.where(known, self._where[np.clip(at, 0, len(self._where) - 1)], -1)


def _all_distinct(numbers: np.ndarray) -> bool:
    places = np.arange(len(numbers))
    return bool((FirstPlaces(numbers, places).of(numbers) == places).all())


def _missing_in(numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Sorted distinct numbers that are not among the others."""
    return _distinct(numbers[FirstPlaces(others, np.arange(len(others))).of(numbers) < 0])


def _multiset(numbers: np.ndarray) -> np.ndarray:
    """Equal for the same numbers in any order."""
    if len(numbers) and int(numbers.min()) >= 0 and int(numbers.max()) < len(numbers):
        return np.bincount(numbers)
    return np.sort(numbers)


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """Sorted distinct numbers."""
    numbers = np.sort(numbers)
    return numbers[np.append(True, numbers[1:] != numbers[:-1])] if len(numbers) else numbers
