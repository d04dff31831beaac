"""tune.html: time against memory of every layout that was composed or emulated, the Pareto front marked, no network needed."""

from __future__ import annotations

import html
from pathlib import Path

from prism_plugins.rundir import write_bytes
from prism_plugins.tune.result import Candidate, TuneResult, describe
from prism_plugins.tune.show import verdict

_WIDTH, _HEIGHT, _MARGIN = 900, 480, 60
_GIB = 2**30
_STYLE = """body{font:14px system-ui,sans-serif;margin:2em;max-width:1100px}table{border-collapse:collapse}
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
    """Per thing that was varied, a bar of tokens/s/GPU for each value and the layout that is best there."""
    if not result.sensitivity:
        return ""
    most = max((v.best.tokens_per_s_per_gpu or 0.0 for v in result.sensitivity if v.best), default=0.0) or 1.0
    lines = []
    for v in result.sensitivity:
        rate = (v.best.tokens_per_s_per_gpu or 0.0) if v.best else 0.0
        what = html.escape(describe(v.best.knobs)) if v.best else html.escape(v.note)
        lines.append(
            f'<tr><td>{v.what}</td><td>{v.value:g}</td><td>{rate:,.0f}</td><td><svg width="200" height="10"><rect '
            f'height="10" width="{200 * rate / most:.0f}" fill="#58a"/></svg></td><td>{what}</td></tr>'
        )
    return (
        "<h2>Best layout as other things change (composed)</h2><table><tr><th></th><th></th><th>tokens/s/GPU</th><th></th>"
        f"<th>layout</th></tr>{''.join(lines)}</table>"
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
