"""What every recorder does alike with what Python adds to an iteration: calls, waits and phases, in tables of the process."""

from __future__ import annotations

import itertools
from typing import Any

from prism_plugins.capture.startup import StartupLog
from prism_plugins.program.model import CommSignature, EventFlag, EventKind, GroupInfo, Phase

MAX_GROUP = 4096
"""Larger groups are left out of reports: their lists of ranks would be most of them."""


class CallRecorder:
    """Base of the recorders; each gives ``_add(kind, ref, value, flags)`` and sets ``_starting`` to False in ``start``."""

    def __init__(self) -> None:
        self.recording = False
        self.startup = StartupLog()
        """What happens before the first iteration."""
        self._starting = True
        self._comms: dict[CommSignature, int] = {}
        self._groups: dict[GroupInfo, int] = {}
        self._phases: dict[Phase, int] = {}
        self._used_outside: set[int] = set()
        self._open_phase = -1
        self._works = itertools.count(1)

    def _add(self, kind: int, ref: int, value: int, flags: int) -> object:
        """Append an event on the current stream."""
        raise NotImplementedError

    def group(self, info: GroupInfo) -> int:
        """Index of a process group in the groups table."""
        return self._groups.setdefault(info, len(self._groups))

    def comm(self, signature: CommSignature, *, work: int, is_async: bool) -> None:
        """A collective or p2p call on the current stream."""
        if self.recording:
            index = self._comms.setdefault(signature, len(self._comms))
            self._add(EventKind.COMM, index, work, EventFlag.ASYNC if is_async else 0)
            return
        self._used_outside.add(signature.group)
        if self._starting:
            self.startup.call(signature)

    def message(self, tensor: Any) -> None:
        """A send or receive uses this tensor's memory."""

    def groups_outside(self) -> tuple[GroupInfo, ...]:
        """Groups of at most :data:`MAX_GROUP` ranks that were used outside of iterations: at start-up, or between them."""
        groups = list(self._groups)
        used = (groups[i] for i in sorted(self._used_outside))
        return tuple(group for group in used if len(group.ranks) <= MAX_GROUP)

    def group_made(self, ranks: tuple[int, ...], desc: str, site: str) -> None:
        """The script made a process group, of which this rank may be a member."""
        if self._starting:
            self.startup.group_made(ranks, desc, site)

    def new_work(self) -> int:
        """A work id that was never used in this process."""
        return next(self._works)

    def wait(self, work: int) -> None:
        """The current stream waits for a collective."""
        if self.recording:
            self._add(EventKind.WORK_WAIT, work, 0, 0)

    def begin_phase(self, phase: Phase) -> None:
        """Open a phase; closes the one that is open."""
        self.end_phase()
        if self.recording:
            self._open_phase = self._phases.setdefault(phase, len(self._phases))
            self._add(EventKind.PHASE_BEGIN, self._open_phase, 0, 0)

    def end_phase(self) -> None:
        """Close the open phase, if any."""
        if self._open_phase >= 0:
            self._add(EventKind.PHASE_END, self._open_phase, 0, 0)
            self._open_phase = -1
