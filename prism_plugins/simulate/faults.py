"""What a simulation can find wrong with a job: ranks that wait for ever, and collectives that do not match."""

from __future__ import annotations

import msgspec

from prism_plugins.program.prediction import Finding


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a fault: equal ranks, and what they do."""

    ranks: tuple[int, ...]
    call: str
    """The call they are in or ought to make, e.g. ``all_reduce of 4096 bytes``; ``none left`` when the program ended."""
    phase: str


class SimulationFault(Exception):
    """The job would hang or corrupt data. Raised by the simulation; the conductor makes a finding of it."""

    def __init__(
        self,
        *,
        kind: str,
        group: str,
        sequence: int,
        waiting: Party,
        other: Party,
        chain: tuple[Party, ...] = (),
        closed: bool = False,
    ) -> None:
        self.kind = kind
        """``hang`` or ``mismatch``."""
        self.group = group
        self.sequence = sequence
        """Number of the call on its communicator, from 0 in the iteration."""
        self.waiting = waiting
        self.other = other
        self.chain = chain
        """Each waits for the next."""
        self.closed = closed
        """The last of the chain waits for the first."""
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """One line: who waits in what, for whom, and where that one is."""
        if self.closed or len(self.chain) > 1:
            waits = " for ".join(
                f"ranks {compact_ranks(party.ranks)}{', which' if i else ''} wait in {party.call} (phase {party.phase})"
                for i, party in enumerate(self.chain)
            )
            if self.closed:
                return f"deadlock: {waits} for ranks {compact_ranks(self.chain[0].ranks)}"
            return (
                f"hang: {waits} for ranks {compact_ranks(self.other.ranks)}, which are in {self.other.call}"
            )
        verb = "waits for" if self.kind == "hang" else "does not match"
        return (
            f"{self.kind} in group {self.group}, call {self.sequence}: ranks {compact_ranks(self.waiting.ranks)} in "
            f"{self.waiting.call} (phase {self.waiting.phase}) {verb} ranks {compact_ranks(self.other.ranks)}, which are in "
            f"{self.other.call} (phase {self.other.phase})"
        )

    def finding(self) -> Finding:
        """The fault as the report shows it."""
        parties = (*self.chain, self.waiting, self.other)
        ranks = tuple(sorted({rank for party in parties for rank in party.ranks}))
        return Finding(
            kind="deadlock" if self.closed else self.kind,
            severity="error",
            ranks=compact_ranks(ranks),
            phase=self.waiting.phase,
            message=self.message,
        )


def compact_ranks(ranks: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` → ``0-2,5``; long lists are cut."""
    parts: list[str] = []
    ordered = sorted(ranks)
    i = 0
    while i < len(ordered) and len(parts) < 8:
        j = i
        while j + 1 < len(ordered) and ordered[j + 1] == ordered[j] + 1:
            j += 1
        parts.append(str(ordered[i]) if i == j else f"{ordered[i]}-{ordered[j]}")
        i = j + 1
    return ",".join(parts) + (",…" if i < len(ordered) else "")
