"""What ranks do before the first iteration must be the same on all of them: groups made, collectives called, batches
to come. Only sliced ranks can be compared; ``--prism-ranks`` and ``--prism-audit`` add more of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from prism_plugins.checks.calls import call_text, few
from prism_plugins.program.calls import P2P, agreement
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import GroupsMade, SliceReport, StartupCall

_PHASE = "start-up"


def startup_findings(reports: Mapping[int, SliceReport]) -> list[Finding]:
    """Differences between sliced ranks, an error each (numbers of batches: a warning); and ranks that end early."""
    return [*_groups(reports), *_calls(reports), *_batches(reports), *_left(reports)]


def _groups(reports: Mapping[int, SliceReport]) -> list[Finding]:
    made = {rank: report.startup.groups for rank, report in reports.items()}
    return [
        _finding(
            "groups",
            ranks,
            f"ranks {few(usual)} make {_group_text(a)}, ranks {few(other)} {_instead(b, 'make', _group_text)}: every rank "
            "has to make every group, in the same order, or new_group hangs",
        )
        for usual, other, a, b, ranks in _differences(made)
    ]


def _group_text(made: GroupsMade) -> str:
    several = f" and {made.count - 1} more" if made.count > 1 else ""
    where = f" at {made.site}" if made.site else ""
    return f"group {made.desc} of ranks {few(made.first)}{several}{where}"


def _calls(reports: Mapping[int, SliceReport]) -> list[Finding]:
    if any(report.startup.num_dropped for report in reports.values()):
        return []
    sequences: dict[tuple[str, str, int], dict[int, list[StartupCall]]] = {}
    for rank, report in reports.items():
        for call in report.startup.calls:
            if call.call.kind not in P2P:
                key = (call.group, call.group_digest, call.group_size)
                sequences.setdefault(key, {}).setdefault(rank, []).append(call)
    found = []
    everybody = {len(report.facts.stages) for report in reports.values() if report.facts is not None}
    for (group, _, size), calls in sequences.items():
        world = next((r.facts.layout.world_size for r in reports.values() if r.facts is not None), 0)
        if size == world and everybody:
            for rank in reports:
                calls.setdefault(rank, [])
        keyed = {rank: tuple(_expanded(of_rank)) for rank, of_rank in calls.items()}
        for usual, other, a, b, ranks in _differences(keyed, key=_call_key):
            found.append(
                _finding(
                    "startup",
                    ranks,
                    f"before the first iteration, in group {group}: ranks {few(usual)} call {_call_text(a)}, ranks "
                    f"{few(other)} {_instead(b, 'call', _call_text)}",
                )
            )
    return found


def _expanded(calls: Sequence[StartupCall]) -> list[StartupCall]:
    return [call for call in calls for _ in range(min(call.count, 10_000))]


def _call_key(call: StartupCall) -> Hashable:
    return (agreement(call.call), call.call.reduce_op)


def _call_text(call: StartupCall) -> str:
    return call_text(call.call) + (f" at {call.site}" if call.site else "")


def _batches(reports: Mapping[int, SliceReport]) -> list[Finding]:
    by_site: dict[str, dict[int, list[int]]] = {}
    for rank, report in sorted(reports.items()):
        for loader in report.startup.loaders:
            by_site.setdefault(loader.site, {}).setdefault(loader.num_batches, []).append(rank)
    found = []
    for site, ranks_of in by_site.items():
        if len(ranks_of) > 1:
            texts = [f"{n} batches on ranks {few(ranks)}" for n, ranks in sorted(ranks_of.items())]
            found.append(
                Finding(
                    kind="uneven_batches",
                    severity="warning",
                    ranks=few(sorted(r for ranks in ranks_of.values() for r in ranks)),
                    phase=_PHASE,
                    message=f"the data loader read at {site} has {', '.join(texts)}: ranks with fewer leave the loop "
                    "while the others wait in their next collective",
                )
            )
    return found


def _left(reports: Mapping[int, SliceReport]) -> list[Finding]:
    """Ranks whose script ends after fewer iterations than others train."""
    going_on = {rank: len(r.iteration_hashes) for rank, r in reports.items() if not r.script_ended}
    left = {
        rank: n
        for rank, r in reports.items()
        if r.script_ended and (n := len(r.iteration_hashes)) <= max(going_on.values(), default=-1)
    }
    if not left:
        return []
    when = ", ".join(
        f"ranks {few([r for r, m in left.items() if m == n])} end after {n}"
        for n in sorted(set(left.values()))
    )
    return [
        Finding(
            kind="early_exit",
            severity="error",
            ranks=few(sorted(reports)),
            message=f"{when} recorded iterations, ranks {few(sorted(going_on))} train on: they wait for ever in their next "
            "collective",
        )
    ]


def _differences(
    of_rank: Mapping[int, Sequence], key=lambda item: item
) -> list[tuple[list[int], list[int], object, object, list[int]]]:
    """(usual ranks, other ranks, the usual's item, the other's item or None, all of these) of each group of ranks that
    differs from what most do; where the usual ones have nothing more, the sides are exchanged."""
    alike: dict[tuple, list[int]] = {}
    for rank, items in of_rank.items():
        alike.setdefault(tuple(key(item) for item in items), []).append(rank)
    ordered = sorted(alike.items(), key=lambda entry: -len(entry[1]))
    found = []
    for keys, ranks in ordered[1:]:
        usual_keys, usual = ordered[0]
        common = min(len(keys), len(usual_keys))
        at = next((i for i in range(common) if keys[i] != usual_keys[i]), common)
        a = of_rank[usual[0]][at] if at < len(usual_keys) else None
        b = of_rank[ranks[0]][at] if at < len(keys) else None
        everybody = sorted({*usual, *ranks})
        if a is None:
            found.append((ranks, usual, b, a, everybody))
        else:
            found.append((usual, ranks, a, b, everybody))
    return found


def _instead(item: object, verb: str, text) -> str:
    return "none" if item is None else f"{verb} {text(item)}"


def _finding(kind: str, ranks: list[int], message: str) -> Finding:
    return Finding(kind=kind, severity="error", ranks=few(ranks), phase=_PHASE, message=message)
