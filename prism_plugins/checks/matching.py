"""Calls that meet must be the same call: collectives of a group, messages of a pair, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from prism_plugins.checks.calls import Calls, CellCalls, Channel, JobCalls, few
from prism_plugins.program.prediction import Finding
from prism_plugins.simulate.faults import compact_ranks

_MAX_FINDINGS = 12


def matching_findings(job: JobCalls) -> list[Finding]:
    """Every group and pair whose members do not call the same, an error each."""
    found: list[Finding] = []
    for channel, sides in job.channels().items():
        found.extend(_messages(job, channel, sides) if channel.is_pair else _collectives(job, sides))
    found = list(dict.fromkeys(found))
    if len(found) > _MAX_FINDINGS:
        rest = len(found) - _MAX_FINDINGS
        found = found[:_MAX_FINDINGS]
        found.append(
            Finding(kind="mismatch", severity="error", message=f"{rest} more groups or pairs do not match")
        )
    return found


# --- collectives ---


def _collectives(job: JobCalls, sides: list[tuple[int, str, Calls]]) -> Iterator[Finding]:
    yield from _absent(job, sides)
    by_sequence: dict[bytes, list[tuple[int, Calls]]] = {}
    for cell, _, calls in sides:
        by_sequence.setdefault(calls.key.tobytes(), []).append((cell, calls))
    if len(by_sequence) < 2:
        yield from _splits(job, sides)
        return
    ordered = sorted(by_sequence.values(), key=lambda same: -_count(job, same))
    usual = ordered[0]
    for other in ordered[1:]:
        yield _difference(job, usual, other)


def _count(job: JobCalls, same: list[tuple[int, Calls]]) -> int:
    return sum(len(job.cells[cell].ranks) for cell, _ in same)


def _ranks(job: JobCalls, same: list[tuple[int, Calls]]) -> tuple[int, ...]:
    return tuple(sorted({int(r) for cell, _ in same for r in job.cells[cell].ranks}))


def _absent(job: JobCalls, sides: list[tuple[int, str, Calls]]) -> Iterator[Finding]:
    """Members of a group that never call it while others do."""
    cell, _, calls = sides[0]
    first = job.cells[cell]
    group = first.program.groups[first.program.comms[int(calls.comm[0])].group]
    here = {int(r) for c, _, _ in sides for r in job.cells[c].ranks}
    absent = [r for r in group.ranks if r not in here]
    if absent:
        yield Finding(
            kind="missing_call",
            severity="error",
            ranks=compact_ranks(group.ranks),
            phase=_phase(first, calls, 0),
            message=(
                f"ranks {few(absent)} make no call on group {first.group_text(int(calls.comm[0]))}, on which ranks "
                f"{few(sorted(here & set(group.ranks)))} call {_text(first, calls, 0)}: they wait for ever"
            ),
        )


def _difference(job: JobCalls, usual: list[tuple[int, Calls]], other: list[tuple[int, Calls]]) -> Finding:
    a, b = usual[0][1], other[0][1]
    cell_a, cell_b = job.cells[usual[0][0]], job.cells[other[0][0]]
    ranks_a, ranks_b = _ranks(job, usual), _ranks(job, other)
    common = min(len(a.key), len(b.key))
    unequal = np.flatnonzero(a.key[:common] != b.key[:common])
    at = int(unequal[0]) if len(unequal) else common
    group = cell_a.group_text(int(a.comm[0]))
    where = f"in group {group}, call {at}: "
    extra = len(a.key) - len(b.key)
    if extra > 0 and _within(b.key, a.key):
        kind, text = "missing_call", _missing(cell_a, a, cell_b, b, at, extra, ranks_a, ranks_b)
    elif extra < 0 and _within(a.key, b.key):
        kind, text = "missing_call", _missing(cell_b, b, cell_a, a, at, -extra, ranks_b, ranks_a)
    elif at >= common:
        longer = (cell_a, a, ranks_a, ranks_b) if extra > 0 else (cell_b, b, ranks_b, ranks_a)
        kind = "missing_call"
        text = f"ranks {few(longer[2])} call {_text(longer[0], longer[1], at)}, ranks {few(longer[3])} have left the group"
    else:
        same_calls = Counter(a.key.tolist()) == Counter(b.key.tolist())
        kind = "order" if same_calls else "mismatch"
        text = (
            f"ranks {few(ranks_a)} call {_text(cell_a, a, at)}, ranks {few(ranks_b)} call {_text(cell_b, b, at)}"
        ) + (": the same calls in another order" if same_calls else "")
    return Finding(
        kind=kind,
        severity="error",
        ranks=compact_ranks(tuple(sorted({*ranks_a, *ranks_b}))),
        phase=_phase(cell_a, a, min(at, len(a.key) - 1)),
        message=where + text,
    )


def _within(shorter: np.ndarray, longer: np.ndarray) -> bool:
    """Whether one sequence is the other with some of its calls left out."""
    rest = iter(longer.tolist())
    return all(key in rest for key in shorter.tolist())


def _splits(job: JobCalls, sides: list[tuple[int, str, Calls]]) -> Iterator[Finding]:
    """all_to_all: what one member sends to another is what that one expects of it. Compared between the first ranks of
    the cells, up to the first call in which two differ."""
    first = job.cells[sides[0][0]].program
    if not any(first.comms[i].kind == "all_to_all" for i in np.unique(sides[0][2].comm).tolist()):
        return
    for (cell_a, _, a), (cell_b, _, b) in permutations(sides, 2):
        one, two = job.cells[cell_a], job.cells[cell_b]
        _, places = np.unique(np.stack((a.comm, b.comm)), axis=1, return_index=True)
        for at in sorted(places.tolist()):
            sent, received = one.program.comms[int(a.comm[at])], two.program.comms[int(b.comm[at])]
            ranks = one.program.groups[sent.group].ranks
            if sent.kind != "all_to_all" or ranks != two.program.groups[received.group].ranks:
                continue
            sender, receiver = ranks.index(one.program.rank), ranks.index(two.program.rank)
            given = _share(sent.send_splits, sent.in_numel, receiver, len(ranks))
            expected = _share(received.recv_splits, received.out_numel, sender, len(ranks))
            if given != expected:
                yield Finding(
                    kind="message_size",
                    severity="error",
                    ranks=compact_ranks((one.program.rank, two.program.rank)),
                    phase=_phase(one, a, at),
                    message=(
                        f"in group {one.group_text(int(a.comm[at]))}, call {at}: rank {one.program.rank} gives rank "
                        f"{two.program.rank} {given} elements in {_text(one, a, at)}, which expects {expected} of it in "
                        f"{_text(two, b, at)}"
                    ),
                )
                return


def _share(splits: tuple[int, ...], numel: int, member: int, size: int) -> int:
    return splits[member] if splits else numel // size


def _missing(
    longer: CellCalls,
    calls: Calls,
    shorter: CellCalls,
    others: Calls,
    at: int,
    extra: int,
    ranks: tuple[int, ...],
    without: tuple[int, ...],
) -> str:
    more = f" (and {extra - 1} more)" if extra > 1 else ""
    if at < len(others.key):
        instead = f"whose next call there is {_text(shorter, others, at)}"
    elif len(others.key):
        instead = f"who leave the group after {_text(shorter, others, len(others.key) - 1)}"
    else:
        instead = "who make no call there"
    return f"ranks {few(ranks)} call {_text(longer, calls, at)}{more}, ranks {few(without)} do not, {instead}"


def _text(cell: CellCalls, calls: Calls, at: int) -> str:
    return cell.text(int(calls.comm[at]), int(calls.event[at]))


def _phase(cell: CellCalls, calls: Calls, at: int) -> str:
    from prism_plugins.program.calls import phase_at

    return phase_at(cell.program, int(calls.event[at]))


# --- messages ---


def _messages(job: JobCalls, channel: Channel, sides: list[tuple[int, str, Calls]]) -> Iterator[Finding]:
    by_side = {side: (cell, calls) for cell, side, calls in sides}
    sends, recvs = by_side.get("send"), by_side.get("recv")
    pair = tuple(sorted({int(r) for c in (channel.sender, channel.receiver) for r in job.cells[c].ranks}))
    senders, receivers = (few(job.cells[c].ranks) for c in (channel.sender, channel.receiver))
    n = len(sends[1].key) if sends else 0
    m = len(recvs[1].key) if recvs else 0
    if sends and recvs:
        common = min(n, m)
        unequal = np.flatnonzero(sends[1].key[:common] != recvs[1].key[:common])
        if len(unequal):
            at = int(unequal[0])
            a, b = job.cells[sends[0]], job.cells[recvs[0]]
            yield Finding(
                kind="message_size",
                severity="error",
                ranks=compact_ranks(pair),
                phase=_phase(a, sends[1], at),
                message=(
                    f"message {at} from ranks {senders} to ranks {receivers} in group {a.group_text(int(sends[1].comm[0]))}: "
                    f"{_text(a, sends[1], at)} meets {_text(b, recvs[1], at)}"
                ),
            )
            return
    if n != m:
        side, what = (sends, "send") if n > m else (recvs, "recv")
        assert side is not None
        cell = job.cells[side[0]]
        missing = "receive" if n > m else "send"
        at = min(n, m)
        yield Finding(
            kind="unmatched_message",
            severity="error",
            ranks=compact_ranks(pair),
            phase=_phase(cell, side[1], at),
            message=(
                f"in group {cell.group_text(int(side[1].comm[0]))}: ranks {few(cell.ranks)} call "
                f"{_text(cell, side[1], at)} ({what} {at} of {max(n, m)}), and ranks "
                f"{receivers if what == 'send' else senders} have no {missing} for it"
            ),
        )
