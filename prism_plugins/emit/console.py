"""The summary on the console: what a tired engineer reads in ten seconds, in an order that never changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prism_plugins.emit.ranks import shorten_ranks
from prism_plugins.program.prediction import (
    ClassMemory,
    CommunicatorStart,
    Finding,
    HostMemory,
    Prediction,
)
from prism_plugins.program.replay import VIRTUAL_CLOCK
from prism_plugins.streams import PipeConsole

WIDTH_WITHOUT_TERMINAL = 110
MAX_ASSUMPTIONS = 12
MAX_UNPRICED = 8
MAX_FINDINGS = 12
MAX_OPPORTUNITIES = 3
_LABEL_WIDTH = 12
_BAR_CELLS = 24
_GIB = 2**30
_MIB = 2**20
_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def make_console(file: TextIO | None = None) -> Console:
    """A console that colours only on a terminal and has a fixed width elsewhere."""
    file = file or sys.stdout
    if (getattr(file, "encoding", None) or "").lower().replace("-", "") != "utf8" and hasattr(
        file, "reconfigure"
    ):
        file.reconfigure(errors="replace")
    console = PipeConsole(file=file, highlight=False, markup=False, soft_wrap=False)
    if not console.is_terminal:
        console = PipeConsole(
            file=file, highlight=False, markup=False, width=WIDTH_WITHOUT_TERMINAL, no_color=True
        )
    return console


def print_summary(
    prediction: Prediction, *, files: Sequence[tuple[str, str]], console: Console | None = None
) -> None:
    """Print the summary. ``files`` are (what, path) of what was written."""
    show(summary(prediction, files=files), console or make_console())


def show(renderable: RenderableType, console: Console) -> None:
    """Print; away from a terminal without trailing blanks, and with a broken pipe left to the caller."""
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as capture:
        console.print(renderable)
    console.file.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def summary(prediction: Prediction, *, files: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """The summary as one renderable."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", width=_LABEL_WIDTH, no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    rows.add_row("Job", _job(prediction))
    rows.add_row("Verdict", verdict(prediction))
    rows.add_row("Iteration", _speed(prediction))
    if prediction.replay:
        rows.add_row("Replay", _replay(prediction))
    rows.add_row("Time", _breakdown(prediction))
    if prediction.opportunities:
        rows.add_row("Fix first", _opportunities(prediction))
    rows.add_row("Memory", _memory(prediction))
    if prediction.host_memory is not None:
        rows.add_row("Host memory", _host_memory(prediction.host_memory))
    rows.add_row("Ranks", _ranks(prediction))
    rows.add_row("Audit", _audit(prediction))
    rows.add_row("Findings", _findings(prediction.findings))
    rows.add_row("Not priced", _unpriced(prediction))
    rows.add_row("Synthesized", _synthesized(prediction))
    rows.add_row("Assumed", _listed(prediction.assumptions, MAX_ASSUMPTIONS, "nothing"))
    if files:
        rows.add_row("Files", _files(files))
    return Group(Text(), Text("prism prediction", style="bold"), rows, Text())


def gib(num_bytes: float) -> str:
    """Bytes as GiB with one decimal, two below ten; as MiB where GiB would show one digit or none."""
    value = num_bytes / _GIB
    if 0 < value < 0.1:
        return f"{num_bytes / _MIB:.1f} MiB"
    return f"{value:.1f} GiB" if value >= 10 else f"{value:.2f} GiB"


def milliseconds(value: float) -> str:
    """Milliseconds with the precision a reader can use."""
    return (
        f"{value:,.0f} ms" if value >= 10_000 else f"{value:,.1f} ms" if value >= 10 else f"{value:,.3f} ms"
    )


def tightest(memory: Sequence[ClassMemory]) -> ClassMemory:
    """The class that comes closest to its device's capacity, or exceeds it most."""
    return max(memory, key=lambda m: m.device_used_bytes / max(m.capacity_bytes, 1))


def _job(p: Prediction) -> Text:
    layout = " · ".join(
        f"{name} {p.layout.get(name, 1)}"
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        if name in ("tp", "pp", "dp")
        or (p.layout.get(name, 1) > 1 and (name != "etp" or p.layout.get("ep", 1) > 1))
    )
    return Text(
        f"{p.framework}, {p.world_size:,} ranks ({layout}), {_count(p.num_microbatches, 'micro-batch', 'micro-batches')}"
        f" on {p.cluster}; device {p.device}"
    )


def verdict(p: Prediction) -> Text:
    """Does it run, can the answer be trusted, does it fit: each from the findings."""
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for finding in p.findings:
        ranks_of.setdefault((finding.kind, finding.severity), []).append(finding.ranks)
    text = Text()
    for (kind, severity), ranks in ranks_of.items():
        if severity == "error" and kind not in ("oom", "audit"):
            text.append(f"does not run: {kind.replace('_', ' ')}", style="bold red")
            text.append(f" on ranks {_join(ranks)}\n" if any(ranks) else "\n")
    if ("audit", "error") in ranks_of:
        text.append("not to be trusted", style="bold red")
        text.append(f": ranks {_join(ranks_of['audit', 'error'])} do not run what was inferred for them\n")
    if not p.memory:
        return text
    if ("oom", "error") in ranks_of:
        text.append("out of memory", style="bold red")
        text.append(f" on ranks {_join(ranks_of['oom', 'error'])}")
    elif ("oom", "warning") in ranks_of:
        text.append("fits, but hardly,", style="bold yellow")
        text.append(f" on ranks {_join(ranks_of['oom', 'warning'])}")
    else:
        text.append("fits", style="bold green")
    worst = tightest(p.memory)
    share = 100 * worst.device_used_bytes / max(worst.capacity_bytes, 1)
    text.append(
        f"; tightest is {worst.name}: {gib(worst.device_used_bytes)} of {gib(worst.capacity_bytes)} ({share:.1f} %)"
    )
    return text


def _join(ranks: Sequence[str]) -> str:
    """Rank lists of several findings as one."""
    return shorten_ranks(",".join(r for r in ranks if r), max_runs=6)


def _speed(p: Prediction) -> Text:
    if not p.iteration_time_ms:
        return Text("not predicted: the job would not run")
    parts = [milliseconds(p.iteration_time_ms)]
    if p.expected_error.fraction is not None:
        parts[0] += f" ± {100 * p.expected_error.fraction:.0f} %"
    if p.tokens_per_s_per_gpu is not None:
        parts.append(f"{p.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")
    elif p.samples_per_s is not None:
        parts.append(f"{p.samples_per_s:,.1f} samples/s")
    if p.tflops_per_gpu is not None:
        parts.append(f"{p.tflops_per_gpu:,.1f} TFLOP/s/GPU")
    if p.mfu is not None:
        parts.append(f"MFU {100 * p.mfu:.1f} %")
    text = Text("   ".join(parts), style="bold")
    if p.expected_error.fraction is None and p.expected_error.basis:
        text.append(f"\nexpected error unknown: {p.expected_error.basis}", style="not bold yellow")
    return text


def _replay(p: Prediction) -> Text:
    """Replays beside the simulation."""
    lines = []
    for one in p.replay:
        if one.timer == VIRTUAL_CLOCK:
            lines.append(
                f"rank {one.rank} on a virtual clock: {milliseconds(one.iteration_time_ms)} an iteration; its log: {one.log}"
            )
            continue
        error = one.iteration_time_ms / one.simulated_ms - 1 if one.simulated_ms else 0.0
        lines.append(
            f"rank {one.rank} on this GPU: {milliseconds(one.iteration_time_ms)} ({100 * error:+z.1f} % of the simulation), "
            f"spread {100 * one.spread:.1f} % over {one.iterations} iterations; its log: {one.log}"
        )
    return Text("\n".join(lines))


def _breakdown(p: Prediction) -> RenderableType:
    if not p.iteration_time_ms:
        return Text("not predicted")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    b = p.breakdown_ms
    parts = (
        ("compute", b.compute),
        ("optimizer", b.optimizer),
        ("exposed communication", b.exposed_communication),
        ("pipeline bubble", b.bubble),
        ("host-bound", b.host),
    )
    total = sum(value for _, value in parts) or 1.0
    for name, value in parts:
        share = value / total
        table.add_row(name, milliseconds(value), f"{100 * share:.1f} %", "▇" * round(_BAR_CELLS * share))
    exposed = [
        f"{dims} {milliseconds(ms)}" for dims, ms in p.exposed_communication_ms.items() if ms >= 0.0005
    ]
    note = " (those of pp count as bubble above)" if "pp" in p.exposed_communication_ms else ""
    by_group = (
        [Text(f"transfers that no kernel hides, by group{note}: {', '.join(exposed)}")] if exposed else []
    )
    return Group(Text(f"of the slowest rank, {p.slowest_rank}"), table, *by_group)


def _opportunities(p: Prediction) -> RenderableType:
    """What costs most, and what an iteration without it would save."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    if any(f.kind == "oom" and f.severity == "error" for f in p.findings):
        text = Text("memory", style="bold")
        text.append(": it does not fit; what would make it fit is named under Findings", style="not bold")
        table.add_row("", "", text)
    for o in p.opportunities[:MAX_OPPORTUNITIES]:
        share = f"{100 * o.gain_ms / max(p.iteration_time_ms, 1e-9):.1f} %"
        text = Text(o.what, style="bold")
        text.append(f": {o.advice} ({o.method})", style="not bold")
        table.add_row(f"≤ {milliseconds(o.gain_ms)}", share, text)
    return table


def _memory(p: Prediction) -> RenderableType:
    if not p.memory:
        return Text("not predicted")
    worst = tightest(p.memory)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)

    def add(name: str, num_bytes: float, style: str = "") -> None:
        share = num_bytes / max(worst.capacity_bytes, 1)
        table.add_row(name, gib(num_bytes), "▇" * round(_BAR_CELLS * min(share, 2)), style=style)

    add("peak allocated", worst.peak_allocated_bytes, "bold")
    for name, value in sorted(worst.by_category.items(), key=lambda item: -item[1]):
        if value:
            add(f"  {name.replace('_', ' ')}", value)
    add("peak reserved", worst.peak_reserved_bytes)
    if worst.held_back_bytes:
        add("  held back for other streams", worst.held_back_bytes)
    add("outside torch", worst.device_used_bytes - worst.peak_reserved_bytes)
    for name, value in _outside_torch(worst):
        add(f"  {name}", value)
    add("used of the device", worst.device_used_bytes, "bold")
    table.add_row("capacity", gib(worst.capacity_bytes), "▁" * _BAR_CELLS)
    where = f", peak in {worst.peak_phase}" if worst.peak_phase else ""
    head = Text(f"of {worst.name}, ranks {shorten_ranks(worst.ranks)}{where}")
    notes = [Text(_spread(p.memory)), *([_communicators(p.communicators)] if p.communicators else [])]
    return Group(head, table, *notes)


def _communicators(start: CommunicatorStart) -> Text:
    """Number of communicators, their memory, and how long they take to open."""
    what = _count(start.count, "NCCL communicator", "NCCL communicators")
    missing = f", {start.not_priced} of them not priced" if start.not_priced else ""
    return Text(
        f"{what} a rank, {gib(start.memory_bytes)}, opened in about {start.init_seconds:.1f} s before or in the first "
        f"iteration (ranks {shorten_ranks(start.ranks)}; order of magnitude{missing})"
    )


def _outside_torch(memory: ClassMemory) -> list[tuple[str, int]]:
    """CUDA, libraries and NCCL; prediction.json lists every communicator."""
    nccl = {name: size for name, size in memory.outside_torch.items() if name.startswith("nccl")}
    rest = [(n.replace("_", " "), size) for n, size in memory.outside_torch.items() if n not in nccl]
    groups = len(nccl.keys() - {"nccl"})
    return [*rest, (f"NCCL, {_count(groups, 'group', 'groups')}", sum(nccl.values()))] if nccl else rest


def _host_memory(host: HostMemory) -> Text:
    return Text(
        f"of a node, large tensors: {gib(host.pinned_bytes)} pinned, {gib(host.pageable_bytes)} pageable; "
        f"{gib(host.peak_bytes)} at most since the start, of {gib(host.capacity_bytes)}\n"
        f"a slice reserved {gib(host.untouched_bytes)} of host memory without touching it"
    )


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def _spread(memory: Sequence[ClassMemory]) -> str:
    if len(memory) == 1:
        return "all ranks alike"
    used = [m.device_used_bytes for m in memory]
    return f"all {len(memory)} classes use {gib(min(used))} to {gib(max(used))}"


def _ranks(p: Prediction) -> Text:
    seconds = sum(s.seconds for s in p.slices)
    cached = sum(s.cached for s in p.slices)
    ops = max((s.ops for s in p.slices), default=0)
    derived = sum(c.num_ranks for c in p.classes if c.source == "derived")
    sliced = len({s.rank for s in p.slices} - set(p.audit.ranks))
    counts = {"sliced": sliced, "inferred": max(p.world_size - derived - sliced, 0), "derived": derived}
    sources = ", ".join(f"{count:,} {source}" for source, count in counts.items() if count)
    text = Text(
        f"{len(p.slices)} slices ({seconds:.1f} s of work, {cached} from the cache, up to {ops:,} ops an iteration)"
        f" stand for {p.world_size:,} ranks in {_count(len(p.classes), 'class', 'classes')}"
    )
    if sources:
        text.append(f"\nprograms of ranks: {sources}; simulated in {p.simulate_seconds:.2f} s")
    return text


def _audit(p: Prediction) -> Text:
    if not p.audit.ranks:
        return Text("none (--prism-audit N compares N inferred ranks with real slices)", style="dim")
    ranks = ",".join(map(str, p.audit.ranks))
    failed = len(p.audit.ranks) - p.audit.matched
    line = f"{p.audit.matched} of {len(p.audit.ranks)} match (ranks {ranks})"
    if p.audit.approximated:
        line += (
            f"; ranks {','.join(map(str, p.audit.approximated))} in communication and phases only: up to "
            f"{p.audit.differing_ops} other ops differ, peak memory by {100 * p.audit.peak_error:.3f} %"
        )
    return Text(line, style="bold red" if failed else "green")


def _findings(findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text("none")
    order = {"error": 0, "warning": 1, "info": 2}
    shown = sorted(findings, key=lambda f: order.get(f.severity, 3))
    text = Text()
    for i, finding in enumerate(shown[:MAX_FINDINGS]):
        where = f" [ranks {shorten_ranks(finding.ranks)}{', ' + finding.phase if finding.phase not in ('', 'none') else ''}]"
        text.append("\n" if i else "")
        text.append(
            f"{finding.severity}: {finding.kind.replace('_', ' ')}",
            style=_SEVERITY_STYLE.get(finding.severity, ""),
        )
        text.append((where if finding.ranks else "") + f" {finding.message}")
    return _with_rest(text, len(shown) - MAX_FINDINGS)


def _unpriced(p: Prediction) -> Text:
    if not p.unpriced_ops:
        return Text("every op has a cost rule")
    ordered = sorted(p.unpriced_ops.items(), key=lambda item: -item[1])
    text = Text(
        f"{sum(p.unpriced_ops.values()):,} occurrences of {len(ordered)} ops, charged by their bytes: ",
        style="yellow",
    )
    text.append(", ".join(f"{name} ({count:,})" for name, count in ordered[:MAX_UNPRICED]))
    return _with_rest(text, len(ordered) - MAX_UNPRICED)


def _synthesized(p: Prediction) -> Text:
    if not p.synthesized_reads:
        return Text("no value the script read back was synthesized")
    return Text(f"{p.synthesized_reads:,} values the script read back were synthesized, not computed")


def _listed(lines: Sequence[str], limit: int, nothing: str) -> Text:
    if not lines:
        return Text(nothing)
    return _with_rest(Text("\n".join(f"· {line}" for line in lines[:limit])), len(lines) - limit)


def _with_rest(text: Text, hidden: int) -> Text:
    if hidden > 0:
        text.append(f"\n… and {hidden} more in prediction.json", style="dim")
    return text


def _files(files: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, path in files:
        table.add_row(what, path)
    return Padding(table, 0)
