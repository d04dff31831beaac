"""tune.html: time against memory of every layout that was composed or emulated, the Pareto front marked, no network needed."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from prism_plugins.rundir import write_bytes
from prism_plugins.tune.result import Candidate, TuneResult, Variant, describe
from prism_plugins.tune.show import verdict

_WIDTH, _HEIGHT, _MARGIN = 900, 480, 60
_LEFT, _PANEL, _GAP = 80, 310, 30
_HIGH, _LOW = 45, 300
"""Of the plot of what was varied."""
_AXES = {"gpus": "GPUs", "nic": "rate of the NICs, times", "sequence": "sequence length, tokens"}
_GIB = 2**30
_STYLE = """body{font:14px system-ui,sans-serif;margin:2em;max-width:1150px}table{border-collapse:collapse}
td,th{padding:.2em .8em;text-align:right}td:last-child,th:last-child{text-align:left}tr:nth-child(even){background:#f4f4f4}
.front{fill:#c22}.emulated{stroke:#000;stroke-width:1.5}circle{fill:#58a;fill-opacity:.6}"""


def pareto(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """Those that no other beats in both time and memory, fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(
        candidates, key=lambda c: (c.best.iteration_ms, c.best.memory_bytes) if c.best else (0, 0)
    ):
        best = candidate.best
        last = front[-1].best if front else None
        if best is not None and (last is None or best.memory_bytes < last.memory_bytes):
            front.append(candidate)
    return front


def write_page(path: Path, result: TuneResult) -> None:
    """Write the page."""
    write_bytes(path, render(result).encode())


def render(result: TuneResult) -> str:
    """The page as text."""
    shown = [c for c in result.candidates if c.best is not None]
    own = result.own
    if shown and own is not None and own.best is not None and all(c.arguments for c in shown):
        shown.append(own)  # It does not fit.
    front = pareto(result.candidates)
    rows = "".join(
        f"<tr><td>{c.best.iteration_ms:,.1f}</td><td>{c.best.source}</td><td>{c.best.memory_bytes / _GIB:.1f}</td>"
        f"<td>{html.escape(describe(c.knobs))}</td></tr>"
        for c in front
        if c.best
    )
    counts = result.counts
    said = "".join(f"<li>{html.escape(line)}</li>" for line in verdict(result))
    return f"""<!doctype html><meta charset="utf-8"><title>prism tune</title><style>{_STYLE}</style>
<h1>Layouts of {html.escape(Path(result.job.argv[0]).name)} on {result.job.options.world_size} GPUs of {html.escape(result.cluster)}</h1>
<p>{counts.legal} legal layouts, {counts.composed} composed, {counts.emulated} emulated in full (outlined). Red: no other layout
is better in both time and memory. Blue ones without outline are composed.</p>
<ul>{said}</ul>
{_plot(shown, {id(c) for c in front}, result.capacity_bytes)}
<table><tr><th>ms an iteration</th><th>by</th><th>GiB</th><th>layout</th></tr>{rows}</table>
{_sensitivity(result)}"""


def _sensitivity(result: TuneResult) -> str:
    """One plot: tokens/s/GPU of the best layout against everything that was varied, a letter for each layout; and a table."""
    if not result.sensitivity:
        return ""
    letters: dict[str, str] = {}
    varied = sorted(
        (*result.sensitivity, *_launched(result)), key=lambda v: (list(_AXES).index(v.what), v.value)
    )
    panels: dict[str, list[Variant]] = {}
    for v in varied:
        panels.setdefault(v.what, []).append(v)
        if v.best is not None:
            letters.setdefault(describe(v.best.knobs), _letter(len(letters)))
    most = max((v.best.tokens_per_s_per_gpu or 0.0 for v in varied if v.best), default=0.0) or 1.0
    left = [_LEFT + i * (_PANEL + _GAP) for i in range(len(panels))]
    drawn = "".join(
        _panel(what, variants, letters, x0, most)
        for x0, (what, variants) in zip(left, panels.items(), strict=True)
    )
    scale = "".join(
        f'<text x="{_LEFT - 10}" y="{_level(part) + 5:.1f}" text-anchor="end">{part * most:,.0f}</text>'
        for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    rows = "".join(_row(v, letters) for variants in panels.values() for v in variants)
    return (
        "<h2>The best layout as other things change (composed)</h2>"
        f'<svg width="{left[-1] + _PANEL + 20}" height="{_LOW + 50}" role="img"><text x="10" y="16">tokens/s/GPU</text>'
        f"{scale}{drawn}</svg><table><tr><th></th><th></th><th>legal</th><th>ms</th><th>tokens/s/GPU</th><th>GiB</th><th></th>"
        f"<th>layout</th></tr>{rows}</table>"
    )


def _launched(result: TuneResult) -> Iterator[Variant]:
    """The launch as it is, among its variants: the best composed layout, as theirs."""
    fitting = [c for c in result.candidates if c.composed is not None]
    best = min(fitting, key=lambda c: c.composed.iteration_ms if c.composed else 0.0, default=None)
    if best is None or best.composed is None:
        return
    told, rate = best.best, best.tokens_per_s_per_gpu
    rate = rate * told.iteration_ms / best.composed.iteration_ms if rate and told else None
    best = msgspec.structs.replace(best, emulated=None, tokens_per_s_per_gpu=rate)
    kinds = {v.what for v in result.sensitivity}
    for what, value in (("gpus", float(result.job.options.world_size)), ("nic", 1.0)):
        if what in kinds:
            yield Variant(what=what, value=value, legal=result.counts.legal, best=best)


def _letter(i: int) -> str:
    return chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "")


def _level(part: float) -> float:
    return _LOW - part * (_LOW - _HIGH)


def _panel(what: str, variants: list[Variant], letters: Mapping[str, str], x0: float, most: float) -> str:
    """One thing that was varied, on a logarithmic axis; a value without a layout is a cross at the bottom."""
    logs = [math.log2(v.value) for v in variants]
    span = (max(logs) - min(logs)) or 1.0
    marks, line = [], []
    for v, log in zip(variants, logs, strict=True):
        x = x0 + 20 + (log - min(logs)) / span * (_PANEL - 40)
        marks.append(
            f'<text x="{x:.1f}" y="{_LOW + 18}" text-anchor="middle" font-size="11">{v.value:g}</text>'
        )
        if v.best is None:
            marks.append(
                f'<text x="{x:.1f}" y="{_LOW - 4}" text-anchor="middle">x<title>{html.escape(v.note)}</title></text>'
            )
            continue
        y, layout = _level((v.best.tokens_per_s_per_gpu or 0.0) / most), describe(v.best.knobs)
        line.append(f"{x:.1f},{y:.1f}")
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{html.escape(layout)}</title></circle>'
            f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{letters[layout]}</text>'
        )
    return (
        f'<line x1="{x0}" y1="{_LOW}" x2="{x0 + _PANEL}" y2="{_LOW}" stroke="#000"/>'
        f'<line x1="{x0}" y1="{_LOW}" x2="{x0}" y2="{_HIGH}" stroke="#ccc"/>'
        f'<polyline points="{" ".join(line)}" fill="none" stroke="#58a"/>{"".join(marks)}'
        f'<text x="{x0 + _PANEL / 2}" y="{_LOW + 40}" text-anchor="middle">{_AXES[what]}</text>'
    )


def _row(v: Variant, letters: Mapping[str, str]) -> str:
    head = f"<tr><td>{_AXES[v.what]}</td><td>{v.value:g}</td><td>{v.legal}</td>"
    best = v.best.best if v.best is not None else None
    if v.best is None or best is None:
        return f"{head}<td></td><td></td><td></td><td></td><td>{html.escape(v.note)}</td></tr>"
    layout = describe(v.best.knobs)
    return (
        f"{head}<td>{best.iteration_ms:,.1f}</td><td>{v.best.tokens_per_s_per_gpu or 0.0:,.0f}</td>"
        f"<td>{best.memory_bytes / _GIB:.1f}</td><td>{letters[layout]}</td><td>{html.escape(layout)}</td></tr>"
    )


def _plot(shown: list[Candidate], front: set[int], capacity_bytes: int) -> str:
    estimates = [c.best for c in shown if c.best]
    if not estimates:
        return "<p>Nothing fits.</p>"
    slow, fast = max(e.iteration_ms for e in estimates), min(e.iteration_ms for e in estimates)
    span = (slow - fast) or slow
    top = max(capacity_bytes, *(e.memory_bytes for e in estimates))

    def x(ms: float) -> float:
        return _MARGIN + (ms - fast) / span * (_WIDTH - 2 * _MARGIN)

    def y(nbytes: float) -> float:
        return _HEIGHT - _MARGIN - nbytes / top * (_HEIGHT - 2 * _MARGIN)

    dots = "".join(
        f'<circle cx="{x(c.best.iteration_ms):.1f}" cy="{y(c.best.memory_bytes):.1f}" r="4" '
        f'class="{"front " if id(c) in front else ""}{c.best.source}"><title>{c.best.iteration_ms:,.1f} ms, '
        f"{c.best.memory_bytes / _GIB:.1f} GiB: {html.escape(describe(c.knobs))}</title></circle>"
        for c in shown
        if c.best
    )
    dots += "".join(
        f'<text x="{x(c.best.iteration_ms) + 7:.1f}" y="{y(c.best.memory_bytes) + 14:.1f}">yours</text>'
        for c in shown
        if c.best and not c.arguments
    )
    bottom = _HEIGHT - _MARGIN
    ticks = "".join(
        f'<text x="{_MARGIN - 8}" y="{y(part * top) + 5:.1f}" text-anchor="end">{part * top / _GIB:,.0f}</text>'
        f'<text x="{x(fast + part * span):.1f}" y="{bottom + 20}" text-anchor="middle">{fast + part * span:,.0f}</text>'
        for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return f"""<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">
<line x1="{_MARGIN}" y1="{bottom}" x2="{_WIDTH - _MARGIN}" y2="{bottom}" stroke="#000"/>
<line x1="{_MARGIN}" y1="{_MARGIN}" x2="{_MARGIN}" y2="{bottom}" stroke="#000"/>
<line x1="{_MARGIN}" y1="{y(capacity_bytes):.1f}" x2="{_WIDTH - _MARGIN}" y2="{y(capacity_bytes):.1f}" stroke="#999" stroke-dasharray="4"/>
<text x="{_MARGIN}" y="{y(capacity_bytes) - 6:.1f}" dx="90">{capacity_bytes / _GIB:.1f} GiB: the GPU</text>
<text x="{_MARGIN}" y="{_MARGIN - 20}">GiB a GPU</text>
<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 16}" text-anchor="end">ms an iteration</text>{ticks}{dots}</svg>"""
