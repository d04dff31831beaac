"""Charts as inline SVG. Colours are CSS classes of the template, so that they follow the reader's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from prism_plugins.report.critical_path import CriticalPath
from prism_plugins.report.memory_curves import MemoryCurve
from prism_plugins.report.ops import OpUse
from prism_plugins.report.schedule import StageSchedule
from prism_plugins.report.traffic import TrafficMatrix

WIDTH = 1120
_LEFT = 92
_AXIS = 22
_MAX_TITLED = 2500
"""Bars with a tooltip each; more are drawn as one path a colour."""
MAX_SEGMENTS = 400
"""Of the critical path; more are too narrow to be seen, and are drawn as shares of the time in bins of this many pixels."""
_BIN = 2


def pipeline_svg(stages: Sequence[StageSchedule], total_ns: float) -> Markup:
    """One row a stage, one bar a phase."""
    row = 30 if len(stages) <= 4 else 22 if len(stages) <= 16 else max(6, 400 // len(stages))
    height = row * len(stages) + _AXIS
    scale = (WIDTH - _LEFT - 8) / max(total_ns, 1.0)
    parts = []
    many = sum(len(s.bars) for s in stages) > _MAX_TITLED
    paths: dict[str, list[str]] = {}
    for i, stage in enumerate(stages):
        y = i * row
        parts.append(_text(_LEFT - 8, y + row / 2 + 4, f"stage {stage.stage}", "label end"))
        parts.append(_rect(_LEFT, y + 1, (WIDTH - _LEFT - 8), row - 2, "idle"))
        for bar in stage.bars:
            x, w = _LEFT + bar.start_ns * scale, max((bar.end_ns - bar.start_ns) * scale, 0.2)
            kind = bar_class(bar.kind)
            if many:
                paths.setdefault(kind, []).append(f"M{x:.1f} {y + 1}h{w:.1f}v{row - 2}h-{w:.1f}z")
                continue
            title = f"{bar.name}, stage {stage.stage}: {bar.start_ns / 1e6:.2f} to {bar.end_ns / 1e6:.2f} ms"
            parts.append(_rect(x, y + 1, w, row - 2, f"bar {kind}", title))
            if bar.microbatch >= 0 and w > 15 and row > 12:
                parts.append(
                    _text(x + w / 2, y + row / 2 + 4, str(bar.microbatch), f"number middle on-{kind}")
                )
    for kind, data in paths.items():
        parts.append(Markup('<path class="{}" d="{}"/>').format(kind, "".join(data)))
    parts.append(_time_axis(height - _AXIS, total_ns, scale))
    return _svg(height, parts, "Pipeline schedule: stages over time")


def bar_class(kind: str) -> str:
    """CSS class of a phase."""
    return {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "grad_sync": "sync"}.get(kind, "misc")


def path_svg(path: CriticalPath, stage_of: Sequence[int], total_ns: float, num_stages: int) -> Markup:
    """The critical path: one row a stage, coloured by what the time goes to. ``stage_of`` is by segment.

    Of more than :data:`MAX_SEGMENTS` segments each bin shows how its time divides, from top to bottom.
    """
    row = 26 if num_stages <= 8 else 18 if num_stages <= 20 else max(6, 360 // num_stages)
    height = row * num_stages + _AXIS
    scale = (WIDTH - _LEFT - 8) / max(total_ns, 1.0)
    parts = [_text(_LEFT - 8, i * row + row / 2 + 4, f"stage {i}", "label end") for i in range(num_stages)]
    parts += [_rect(_LEFT, i * row + 1, WIDTH - _LEFT - 8, row - 2, "idle") for i in range(num_stages)]
    data: dict[str, list[str]] = {}
    if len(path.segments) > MAX_SEGMENTS:
        width = _BIN / scale
        for (stage, at), times in _time_in_bins(path, stage_of, width).items():
            y, whole = stage * row + 2.0, sum(times.values())
            for kind in sorted(times):
                h = (row - 4) * times[kind] / whole
                x = _LEFT + at * _BIN
                data.setdefault(kind, []).append(f"M{x:.1f} {y:.1f}h{_BIN}v{h:.1f}h-{_BIN}z")
                y += h
    else:
        for segment, stage in zip(path.segments, stage_of, strict=True):
            x, w = _LEFT + segment.start_ns * scale, max((segment.end_ns - segment.start_ns) * scale, 0.15)
            shape = f"M{x:.2f} {stage * row + 2}h{w:.2f}v{row - 4}h-{w:.2f}z"
            data.setdefault(_path_class(segment.kind), []).append(shape)
    for kind, shapes in data.items():
        parts.append(Markup('<path class="{}" d="{}"/>').format(kind, "".join(shapes)))
    parts.append(_time_axis(height - _AXIS, total_ns, scale))
    return _svg(height, parts, "Critical path over time")


def _path_class(kind: str) -> str:
    return {"communication": "comm", "optimizer": "opt"}.get(kind, kind)


def _time_in_bins(
    path: CriticalPath, stage_of: Sequence[int], width_ns: float
) -> dict[tuple[int, int], dict[str, float]]:
    """(stage, bin) → time by kind."""
    bins: dict[tuple[int, int], dict[str, float]] = {}
    for segment, stage in zip(path.segments, stage_of, strict=True):
        kind = _path_class(segment.kind)
        for at in range(int(segment.start_ns / width_ns), int(segment.end_ns / width_ns) + 1):
            inside = min(segment.end_ns, (at + 1) * width_ns) - max(segment.start_ns, at * width_ns)
            if inside > 0:
                times = bins.setdefault((stage, at), {})
                times[kind] = times.get(kind, 0.0) + inside
    return bins


def memory_svg(curve: MemoryCurve, *, total_ns: float, top_bytes: float, capacity_bytes: float) -> Markup:
    """Stacked areas by category, a small multiple."""
    width, height, left, bottom = 360, 150, 40, 18
    scale_x = (width - left - 6) / max(total_ns, 1.0)
    scale_y = (height - bottom - 8) / max(top_bytes, 1.0)
    base = [0.0] * len(curve.at_ns)
    x = [left + t * scale_x for t in curve.at_ns]
    right = float(width - 6)
    parts = []
    for name, values in curve.by_category.items():
        upper = [b + v for b, v in zip(base, values, strict=True)]
        if not x or max(values) <= 0:
            continue
        outline = _steps(x, upper, right, height - bottom, scale_y)
        back = _steps(x, base, right, height - bottom, scale_y)[::-1]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (*outline, *back))
        parts.append(
            Markup('<polygon class="m-{}" points="{}"><title>{}</title></polygon>').format(
                name, points, name.replace("_", " ")
            )
        )
        base = upper
    for fraction in (0.0, 0.5, 1.0):
        value = top_bytes * fraction
        y = height - bottom - value * scale_y
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                left, width - 6, y, y
            )
        )
        parts.append(_text(left - 4, y + 4, f"{value / 2**30:.0f}", "tick end"))
    if capacity_bytes <= top_bytes:
        y = height - bottom - capacity_bytes * scale_y
        parts.append(
            Markup(
                '<line class="limit" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"><title>capacity of the GPU</title></line>'
            ).format(left, width - 6, y, y)
        )
    parts.append(_text(left, height - 4, "0", "tick"))
    parts.append(_text(width - 6, height - 4, f"{total_ns / 1e6:,.0f} ms", "tick end"))
    return _svg(height, parts, "Memory over time, GiB", width=width)


def matrix_svg(matrix: TrafficMatrix) -> Markup:
    """Heat map, logarithmic: from one ten-thousandth of the busiest pair."""
    n = len(matrix.nbytes)
    cell = max(12, min(34, 560 // max(n, 1)))
    left, top = 56, 22
    size = n * cell
    largest = max((v for row in matrix.nbytes for v in row), default=0.0) or 1.0
    parts = []
    step = max(1, n // 8)
    for i in range(n):
        name = str(i * matrix.block)
        if i % step == 0:
            parts.append(_text(left - 5, top + i * cell + cell / 2 + 4, name, "tick end"))
            parts.append(_text(left + i * cell + cell / 2, top - 6, name, "tick middle"))
        for j, value in enumerate(matrix.nbytes[i]):
            shade = max(0.0, 1 + math.log10(value / largest) / 4) if value > 0 else 0.0
            title = f"{_ranks(i, matrix)} → {_ranks(j, matrix)}: {value / 1e9:,.3f} GB"
            parts.append(
                Markup(
                    '<rect class="{}" style="fill-opacity:{:.2f}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
                ).format(
                    "heat" if value > 0 else "none", 0.12 + 0.88 * shade if value > 0 else 1,
                    left + j * cell, top + i * cell, cell - 1, cell - 1, title,
                )
            )  # fmt: skip
    return _svg(top + size + 4, parts, "Communication matrix", width=left + size + 8)


def _ranks(i: int, matrix: TrafficMatrix) -> str:
    first = i * matrix.block
    last = min(first + matrix.block, matrix.ranks) - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def roofline_svg(ops: Iterable[OpUse], *, peak_flops: float, hbm_bytes_per_s: float) -> Markup:
    """Log-log: arithmetic intensity against what is reached; circles by share of the time."""
    shown = [op for op in ops if op.intensity > 0 and op.tflops > 0]
    width, height, left, bottom = 560, 330, 52, 36
    ridge = peak_flops / hbm_bytes_per_s
    low_x = min(-1.0, *(math.log10(op.intensity) for op in shown)) if shown else -1.0
    high_x = max(math.log10(ridge) + 1, *(math.log10(op.intensity) for op in shown)) if shown else 4.0
    low_x, high_x = math.floor(low_x), math.ceil(high_x)
    high_y = math.ceil(math.log10(peak_flops / 1e12))
    low_y = high_y - 5

    def at(intensity: float, tflops: float) -> tuple[float, float]:
        x = left + (math.log10(intensity) - low_x) / (high_x - low_x) * (width - left - 12)
        fraction = (math.log10(max(tflops, 10**low_y)) - low_y) / (high_y - low_y)
        return x, height - bottom - fraction * (height - bottom - 12)

    parts = []
    for power in range(low_y, high_y + 1):
        _, y = at(1.0, 10**power)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                left, width - 12, y, y
            )
        )
        parts.append(_text(left - 5, y + 4, f"{10**power:g}", "tick end"))
    for power in range(low_x, high_x + 1):
        x, _ = at(10**power, 1.0)
        parts.append(
            Markup('<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="12" y2="{}"/>').format(
                x, x, height - bottom
            )
        )
        parts.append(_text(x, height - bottom + 14, f"{10.0**power:g}", "tick middle"))
    start = max(10**low_x, 10**low_y * 1e12 / hbm_bytes_per_s)
    points = [
        at(start, start * hbm_bytes_per_s / 1e12),
        at(ridge, peak_flops / 1e12),
        at(10**high_x, peak_flops / 1e12),
    ]
    parts.append(
        Markup('<polyline class="roof" points="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in points))
    )
    for op in sorted(shown, key=lambda op: -op.share):
        x, y = at(op.intensity, op.tflops)
        title = f"{op.name} {op.shapes}: {100 * op.share:.1f} % of kernel time, {op.tflops:,.1f} TFLOP/s, {op.gb_per_s:,.0f} GB/s"
        parts.append(
            Markup(
                '<circle class="dot f-{}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>{}</title></circle>'
            ).format(family_class(op.family), x, y, 3 + 18 * math.sqrt(op.share), title)
        )
    parts.append(_text(width - 12, height - 4, "FLOP per byte of HBM", "tick end"))
    parts.append(_text(4, 10, "TFLOP/s", "tick"))
    return _svg(height, parts, "Roofline of the top ops", width=width)


def family_class(family: str) -> str:
    """CSS class of an op family."""
    if "gemm" in family:
        return "gemm"
    if "attention" in family or "softmax" in family:
        return "attention"
    if family in ("elementwise", "copy", "cat", "fill", "dropout", "fused"):
        return "elementwise"
    return "rest"


def _steps(
    x: Sequence[float], values: Sequence[float], right: float, floor: float, scale_y: float
) -> list[tuple[float, float]]:
    """A step line: each value holds until the next one."""
    points = []
    for i, (px, value) in enumerate(zip(x, values, strict=True)):
        y = floor - value * scale_y
        points += [(px, y), (x[i + 1] if i + 1 < len(x) else right, y)]
    return points


def _time_axis(y: float, total_ns: float, scale: float) -> Markup:
    total_ms = total_ns / 1e6
    raw = total_ms / 8 or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    parts = []
    for i in range(int(total_ms / step) + 1):
        x = _LEFT + i * step * 1e6 * scale
        parts.append(
            Markup('<line class="axis" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>').format(x, x, y, y + 4)
        )
        parts.append(_text(x, y + 17, f"{i * step:,g}" + (" ms" if i == 0 else ""), "tick middle"))
    return Markup("").join(parts)


def _rect(x: float, y: float, w: float, h: float, css: str, title: str = "") -> Markup:
    head = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"').format(
        css, x, y, w, h
    )
    return head + (Markup("><title>{}</title></rect>").format(title) if title else Markup("/>"))


def _text(x: float, y: float, text: str, css: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(css, x, y, text)


def _svg(height: float, parts: Sequence[Markup], name: str, *, width: float = WIDTH) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}" style="max-width:{:.0f}px">{}</svg>'
    ).format(width, height, escape(name), width, Markup("").join(parts))
