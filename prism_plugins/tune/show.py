"""What a search found, on the console: the ranking, what to paste, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from prism_plugins.emit.console import show
from prism_plugins.tune.compose import Estimate
from prism_plugins.tune.result import Candidate, TuneDir, TuneResult, Variant, describe

_GIB = 2**30
_ROWS = 12


def print_result(result: TuneResult, directory: TuneDir, console: Console) -> None:
    """Ranking, the user's own layout, arguments of the best one, reasons, and what the search left out."""
    counts = result.counts
    console.print(
        f"{counts.legal} legal layouts of {counts.points} points: {counts.too_big_by_bound} do not fit by bound, "
        f"{counts.slower_by_bound} are slower by bound, {counts.slower_by_layers} by their layers, {counts.composed} composed ({counts.too_big} of them do not fit), "
        f"{counts.emulated} emulated in full" + (f", {counts.left} not looked at" if counts.left else "")
    )
    show(ranking(result), console)
    for variant in result.sensitivity:
        console.print(told_of(variant))
    for line in verdict(result):
        console.print(line)
    for line in verifications(result):
        console.print(line)
    for reason, number in sorted(counts.illegal.items(), key=lambda item: -item[1])[:5]:
        console.print(f"not legal: {reason}" + (f" ({number} points)" if number > 1 else ""))
    for line in result.assumptions:
        console.print(f"assumed: {line}")
    console.print(
        f"{result.seconds:.0f} s, {result.cpu_seconds:.0f} s of CPU; status {result.status}; {directory.result}, "
        f"{directory.page}"
    )


def ranking(result: TuneResult) -> Table:
    """The best layouts, and the user's own one."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "ms", "by", "tokens/s/GPU", "GiB free", "bubble", "exposed", "limited by", "layout"):
        table.add_column(
            name,
            justify="left" if name in ("by", "limited by", "layout") else "right",
            no_wrap=name != "layout",
        )
    rows = [(str(i + 1), c) for i, c in enumerate(result.candidates[:_ROWS])]
    if result.own is not None:
        rows.append(("yours", result.own))
    for name, candidate in rows:
        estimate = candidate.best
        if estimate is None:
            continue
        rate = candidate.tokens_per_s_per_gpu
        table.add_row(
            name,
            f"{estimate.iteration_ms:,.1f}",
            estimate.source,
            f"{rate:,.0f}" if rate else "",
            f"{(result.capacity_bytes - estimate.memory_bytes) / _GIB:.1f}",
            _share(estimate.bubble_ms, estimate),
            _share(estimate.exposed_ms, estimate),
            limited_by(estimate),
            describe(candidate.knobs),
        )
    return table


def told_of(variant: Variant) -> str:
    """One line: the best composed layout of a variant of the launch."""
    unit = {"gpus": "{:g} GPUs", "nic": "NICs x {:g}", "sequence": "sequence {:g}"}[variant.what]
    head = f"with {unit.format(variant.value)} ({variant.legal} legal): "
    if variant.best is None or variant.best.best is None:
        return head + variant.note
    rate = variant.best.tokens_per_s_per_gpu
    speed = f", {rate:,.0f} tokens/s/GPU" if rate else ""
    return f"{head}{variant.best.best.iteration_ms:,.1f} ms{speed} (composed): {describe(variant.best.knobs)}"


def verifications(result: TuneResult) -> Iterator[str]:
    """What slices on a real GPU said, beside what was predicted."""
    for c in result.candidates:
        if c.verified is not None and c.best is not None:
            found, told = c.verified, c.best
            yield (
                f"verified on a GPU: {found.iteration_ms:,.1f} ms ({told.source} {told.iteration_ms:,.1f}), "
                f"{found.memory_bytes / _GIB:.1f} GiB ({told.memory_bytes / _GIB:.1f}): {describe(c.knobs)}"
            )
        elif c.unverified:
            yield f"not verified: {describe(c.knobs)}: {c.unverified}"


def _share(part: float, estimate: Estimate) -> str:
    return f"{part / estimate.iteration_ms:.0%}" if estimate.iteration_ms else ""


def limited_by(estimate: Estimate) -> str:
    """The largest part of the iteration beside useful compute, or compute where none takes a tenth."""
    parts = {
        "pipeline bubble": estimate.bubble_ms,
        "communication": estimate.exposed_ms,
        "optimizer": estimate.optimizer_ms,
        "host": estimate.host_ms,
    }
    name, part = max(parts.items(), key=lambda item: item[1])
    return name if part > estimate.iteration_ms / 10 else "compute"


def verdict(result: TuneResult) -> Iterator[str]:
    """The best layout, what to paste, and why it beats the launch's own."""
    if not result.candidates:
        return
    best = result.candidates[0]
    if not best.arguments:
        yield "the launch's own layout is the best found"
    else:
        yield from to_paste(best.arguments)
        yield from why(best, result.own, result.capacity_bytes)
    error = result.composition_error
    told = (
        f"composed times were up to {error:.1%} off the emulated ones"
        if error is not None
        else "nothing was emulated"
    )
    if result.proven:
        yield f"no layout that is left is faster: {told}"
    else:
        yield f"not proven to be the best: {told}; composed ones may be that far off (--emulate N looks at more)"


def to_paste(arguments: Sequence[str]) -> Iterator[str]:
    """What to paste, and in words what else changes."""
    yield "paste: " + " ".join(a for a in arguments if not a.startswith("("))
    notes = [a.removeprefix("(").removesuffix(")") for a in arguments if a.startswith("(")]
    if notes:
        yield "and: " + ", ".join(notes)


def why(best: Candidate, own: Candidate | None, capacity_bytes: int) -> list[str]:
    """Three lines with predicted gains; of the same kind of estimate where both have one."""
    if own is None or own.best is None or best.best is None:
        return ["why: the launch's own layout could not be composed, there is nothing to compare with"]
    if own.failed:
        return [f"why: the launch's own layout does not run: {own.failed}"]
    pair = (best.emulated, own.emulated) if best.emulated and own.emulated else (best.composed, own.composed)
    new, old = pair
    if new is None or old is None:
        new, old = best.best, own.best
    lines = []
    if old.memory_bytes > capacity_bytes:
        lines.append(
            f"yours needs {old.memory_bytes / _GIB:.1f} GiB of {capacity_bytes / _GIB:.1f} and does not fit"
        )
    lines.append(
        f"{old.iteration_ms:,.0f} -> {new.iteration_ms:,.0f} ms an iteration ({old.iteration_ms / new.iteration_ms - 1:+z.1%} "
        f"throughput, both {new.source})"
        if new.source == old.source
        else f"{old.iteration_ms:,.0f} ({old.source}) -> {new.iteration_ms:,.0f} ms ({new.source}) an iteration"
    )
    gains = {
        "pipeline bubble": old.bubble_ms - new.bubble_ms,
        "waiting for communication": old.exposed_ms - new.exposed_ms,
        "compute": old.compute_ms - new.compute_ms,
        "optimizer": old.optimizer_ms - new.optimizer_ms,
        "host": old.host_ms - new.host_ms,
    }
    ordered = sorted(gains.items(), key=lambda item: -item[1])
    saved = [f"{name} {gain:,.0f} ms less" for name, gain in ordered if gain > 0.005 * old.iteration_ms][:2]
    paid = [
        f"{name} {-gain:,.0f} ms more" for name, gain in ordered[::-1] if gain < -0.005 * old.iteration_ms
    ][:2]
    lines.append("; ".join(saved + paid) or "parts differ by less than half a per cent")
    lines.append(
        f"memory {old.memory_bytes / _GIB:.1f} -> {new.memory_bytes / _GIB:.1f} GiB of {capacity_bytes / _GIB:.1f}"
    )
    return [f"why: {line}" for line in lines[:3]]
